"""Another name of `leyden.callbacks.small`, for code that imports Lightning's module path."""

from leyden.callbacks.small import GradientAccumulationScheduler

__all__ = ["GradientAccumulationScheduler"]
