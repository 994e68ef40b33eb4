"""The errors that Leyden raises on purpose. Each names the value, the limit and the way out."""

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "LeydenDeprecationWarning",
    "MisconfigurationException",
    "PossibleUserWarning",
    "SIGTERMException",
    "UnsafeCheckpointError",
    "raise_all",
]


class MisconfigurationException(Exception):
    """The arguments, or the methods a user defined, can't work together."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or does not fit the objects it is loaded into."""


class UnsafeCheckpointError(CheckpointError):
    """Loading this file would have to run code that the file names; refused unless ``weights_only=False``."""


class SIGTERMException(SystemExit):
    """SIGTERM arrived; the run was ended at a batch boundary. Exit code 143, as a shell reports it."""

    def __init__(self) -> None:
        super().__init__(143)


class PossibleUserWarning(UserWarning):
    """Something that is probably, but not certainly, a mistake."""


class LeydenDeprecationWarning(DeprecationWarning):
    """A name or argument that works today and has a better form; the message shows it."""


def raise_all(problems: Sequence[str], what: str) -> None:
    """Raises one `MisconfigurationException` that lists every problem; does nothing when there is none.

    Args:
        problems: One message per problem, each complete in itself.
        what: What was being checked, for the first line, e.g. ``"Trainer(...)"``.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise MisconfigurationException(f"{what}: {problems[0]}")
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    raise MisconfigurationException(f"{what}: {len(problems)} problems\n{lines}")
