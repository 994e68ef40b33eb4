"""Another name of a class in `leyden.strategies.base`, for code that imports Lightning's module path."""

from leyden.strategies.base import Strategy

__all__ = ["Strategy"]
