"""Another name of `leyden.callbacks.progress_rich`."""

from leyden.callbacks.progress_rich import RichProgressBar, RichProgressBarTheme

__all__ = ["RichProgressBar", "RichProgressBarTheme"]
