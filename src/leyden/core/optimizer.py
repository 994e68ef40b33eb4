"""Alias: Lightning has these names here. They live in `leyden.core.optim`."""

from leyden.core.optim import LightningOptimizer, LRSchedulerConfig

__all__ = ["LRSchedulerConfig", "LightningOptimizer"]
