"""Which warnings to hear."""

import warnings

from leyden.base.errors import PossibleUserWarning

__all__ = ["PossibleUserWarning", "disable_possible_user_warnings"]


def disable_possible_user_warnings(module: str = "") -> None:
    """Silences warnings about what is probably, but not certainly, a mistake.

    Args:
        module: A regular expression that the name of the warning's module must match; default: any module.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)
