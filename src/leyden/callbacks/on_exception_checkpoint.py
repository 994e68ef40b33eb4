"""Another name of `leyden.callbacks.exception_checkpoint`, for code that imports Lightning's module path."""

from leyden.callbacks.exception_checkpoint import OnExceptionCheckpoint

__all__ = ["OnExceptionCheckpoint"]
