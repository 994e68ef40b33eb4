"""Other names of the progress bars, for code that imports Lightning's module paths."""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ProgressBar": "leyden.callbacks.progress_bar",
        "RichProgressBar": "leyden.callbacks.progress_rich",
        "TQDMProgressBar": "leyden.callbacks.progress_tqdm",
    },
    submodules=("progress_bar", "rich_progress", "tqdm_progress"),
)
