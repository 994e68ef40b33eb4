"""Layer 2: what users subclass. The module, the datamodule, callbacks, and the table of their hooks."""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Callback": "leyden.core.callback",
        "Checkpoint": "leyden.core.callback",
        "LightningDataModule": "leyden.core.datamodule",
        "LightningModule": "leyden.core.module",
        "LightningOptimizer": "leyden.core.optim",
        "LRSchedulerConfig": "leyden.core.optim",
    },
)
