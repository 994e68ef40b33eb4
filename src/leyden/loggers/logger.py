"""Another name of `leyden.loggers.base`, for code that imports Lightning's module path."""

from leyden.loggers.base import DummyExperiment, DummyLogger, Logger, rank_zero_experiment

__all__ = ["DummyExperiment", "DummyLogger", "Logger", "rank_zero_experiment"]
