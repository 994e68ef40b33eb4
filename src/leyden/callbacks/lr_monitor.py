"""Another name of `leyden.callbacks.monitors`, for code that imports Lightning's module path."""

from leyden.callbacks.monitors import LearningRateMonitor

__all__ = ["LearningRateMonitor"]
