"""Another name of `leyden.callbacks.summary`, for code that imports Lightning's module path."""

from leyden.callbacks.summary import RichModelSummary

__all__ = ["RichModelSummary"]
