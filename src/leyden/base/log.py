"""Messages to people: one logger, and helpers that speak on rank zero only, or once only."""

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from leyden.base.errors import LeydenDeprecationWarning, PossibleUserWarning

__all__ = [
    "log",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "warn_once",
]

R = TypeVar("R")

# Files whose lines say nothing to a user.
_NOT_THE_USERS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__)


class _StderrHandler(logging.StreamHandler):
    """Writes to the standard error of the moment, which bars and tests replace for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


log = logging.getLogger("leyden")
if not log.handlers and not logging.getLogger().handlers:
    # A message nobody sees helps nobody. Logging that was configured before this import is left as it is.
    _handler = _StderrHandler()
    _handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(_handler)
    log.setLevel(logging.INFO)
    log.propagate = False

# Where launchers leave the rank of this process, most specific first.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def _rank_from_environment() -> int:
    for name in _RANK_VARIABLES:
        value = os.environ.get(name)
        if value is not None and value.isdigit():
            return int(value)
    return 0


def rank_zero_only(fn: Callable[..., R]) -> Callable[..., R | None]:
    """Decorator: the function runs on global rank zero only and returns None elsewhere.

    The rank is ``rank_zero_only.rank``: read from the launcher's environment at import, and set for certain when a
    strategy joins its process group.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> R | None:
        if rank_zero_only.rank == 0:  # pyright: ignore[reportFunctionMemberAccess]
            return fn(*args, **kwargs)
        return None

    return wrapped


rank_zero_only.rank = _rank_from_environment()  # pyright: ignore[reportFunctionMemberAccess]


@rank_zero_only
def rank_zero_info(message: str, *args: Any) -> None:
    """Logs at INFO on rank zero."""
    log.info(message, *args)


@rank_zero_only
def rank_zero_debug(message: str, *args: Any) -> None:
    """Logs at DEBUG on rank zero."""
    log.debug(message, *args)


@rank_zero_only
def rank_zero_warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 4) -> None:
    """Warns on rank zero, pointing at the line of the user's code that led here.

    Args:
        message: What is doubtful, and what to do.
        category: Of the warning.
        stacklevel: The frame to point at; where it is in this package, the next one that is not.
    """
    level, frame = 1, sys._getframe()
    while frame is not None and (level < stacklevel or frame.f_code.co_filename.startswith(_NOT_THE_USERS)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category=category, stacklevel=level)


def rank_zero_deprecation(message: str, stacklevel: int = 5) -> None:
    """Says on rank zero that a form is old, and which is the new one."""
    rank_zero_warn(message, category=LeydenDeprecationWarning, stacklevel=stacklevel)


if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):  # Lightning's variable
    warnings.simplefilter("ignore", category=PossibleUserWarning)

_said: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning, key: str | None = None) -> None:
    """Warns on rank zero the first time in this process that ``key`` (default: the message) is seen."""
    key = message if key is None else key
    if key not in _said:
        _said.add(key)
        rank_zero_warn(message, category=category, stacklevel=5)
