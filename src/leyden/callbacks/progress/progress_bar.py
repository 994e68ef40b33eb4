"""Another name of `leyden.callbacks.progress_bar`."""

from leyden.callbacks.progress_bar import ProgressBar, get_standard_metrics

__all__ = ["ProgressBar", "get_standard_metrics"]
