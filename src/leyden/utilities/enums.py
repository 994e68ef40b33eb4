"""Enums that compare with strings, in any case."""

from enum import Enum
from typing import Any

__all__ = ["GradClipAlgorithmType", "LightningEnum"]


class LightningEnum(str, Enum):
    """A member equals its value, its name, and any string that differs from them only in case."""

    @classmethod
    def from_str(cls, value: str) -> "LightningEnum":
        """The member that ``value`` names.

        Raises:
            ValueError: No member has this name or value.
        """
        for member in cls:
            if value.lower() in (member.name.lower(), member.value.lower()):
                return member
        raise ValueError(f"{value!r} is not one of {', '.join(repr(member.value) for member in cls)}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            other = other.value
        return isinstance(other, str) and self.value.lower() == other.lower()

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.value.lower())


class GradClipAlgorithmType(LightningEnum):
    """What ``gradient_clip_algorithm`` may be."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Whether ``val`` names an algorithm."""
        return any(member.value == val for member in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """The names of all algorithms."""
        return [member.value for member in GradClipAlgorithmType]
