"""Callbacks: what happens around training without being part of the model."""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Callback": "leyden.core.callback",
        "Checkpoint": "leyden.core.callback",
        "EarlyStopping": "leyden.callbacks.early_stopping",
        "GradientAccumulationScheduler": "leyden.callbacks.small",
        "LambdaCallback": "leyden.callbacks.small",
        "LearningRateMonitor": "leyden.callbacks.monitors",
        "ModelCheckpoint": "leyden.callbacks.checkpoint",
        "ModelSummary": "leyden.callbacks.summary",
        "OnExceptionCheckpoint": "leyden.callbacks.exception_checkpoint",
        "ProgressBar": "leyden.callbacks.progress_bar",
        "RichModelSummary": "leyden.callbacks.summary",
        "RichProgressBar": "leyden.callbacks.progress_rich",
        "RichProgressBarTheme": "leyden.callbacks.progress_rich",
        "TQDMProgressBar": "leyden.callbacks.progress_tqdm",
        "Timer": "leyden.callbacks.small",
    },
    submodules=("early_stopping", "progress", "progress_bar"),
)
