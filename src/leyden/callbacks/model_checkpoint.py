"""Another name of `leyden.callbacks.checkpoint`, for code that imports Lightning's module path."""

from leyden.callbacks.checkpoint import ModelCheckpoint

__all__ = ["ModelCheckpoint"]
