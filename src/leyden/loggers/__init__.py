"""Experiment loggers: where metrics and hyperparameters of a run go."""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CSVLogger": "leyden.loggers.csv_logs",
        "DummyLogger": "leyden.loggers.base",
        "Logger": "leyden.loggers.base",
        "TensorBoardLogger": "leyden.loggers.tensorboard",
    },
    submodules=("base", "csv_logs", "hparams_yaml", "logger", "tensorboard"),
)
