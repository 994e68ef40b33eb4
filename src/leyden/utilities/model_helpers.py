"""What a user's class overrides."""

from leyden.core.hooks import is_overridden

__all__ = ["is_overridden"]
