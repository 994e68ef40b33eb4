"""Helpers of classes that check all their values, and list everything that is wrong in one error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import MisconfigurationException, raise_all
from leyden.base.registry import did_you_mean

__all__ = ["UNSET", "ConfigError", "gone", "is_int", "is_number", "one_of", "refuse"]


class ConfigError(MisconfigurationException, ValueError):
    """Values that can't be, or don't fit together; the message lists them all."""


class _Unset:
    """The default of arguments that exist only to say what to use instead."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises one `ConfigError` with all ``problems``; ``what`` was checked. Nothing happens when there are none."""
    try:
        raise_all(problems, what)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from None


def is_int(value: Any) -> bool:
    """Whether it is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def one_of(name: str, value: Any, known: Sequence[str]) -> list[str]:
    """What is wrong with a value that has to be one of the ``known`` texts."""
    if isinstance(value, str) and value in known:
        return []
    hint = did_you_mean(value, known) if isinstance(value, str) else f"known: {', '.join(map(repr, known))}"
    return [f"{name}={value!r}: {hint}"]


def gone(values: Mapping[str, Any], advice: Mapping[str, str]) -> list[str]:
    """What to say of arguments that exist no more: name -> value, name -> what to do. Only of those that are set."""
    return [f"{name}={values[name]!r} is gone: {text}" for name, text in advice.items() if values[name] is not UNSET]
