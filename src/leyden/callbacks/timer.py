"""Another name of `leyden.callbacks.small`, for code that imports Lightning's module path."""

from leyden.callbacks.small import Interval, Timer

__all__ = ["Interval", "Timer"]
