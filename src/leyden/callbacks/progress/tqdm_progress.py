"""Another name of `leyden.callbacks.progress_tqdm`."""

from typing import Any

from leyden.callbacks import progress_tqdm
from leyden.callbacks.progress_tqdm import TQDMProgressBar, convert_inf

__all__ = ["TQDMProgressBar", "convert_inf"]


def __getattr__(name: str) -> Any:
    return getattr(progress_tqdm, name)
