"""Another name of `leyden.core.callback`, for code that imports Lightning's module path."""

from leyden.core.callback import Callback, Checkpoint

__all__ = ["Callback", "Checkpoint"]
