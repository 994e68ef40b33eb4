"""Leyden trains PyTorch models, from one CPU to a cluster.

The names that most scripts need are here; the rest is in the packages named as in Lightning: `leyden.callbacks`,
`leyden.loggers`, `leyden.strategies`, `leyden.plugins`, `leyden.profilers`, `leyden.accelerators`, `leyden.utilities`.
"""

from typing import TYPE_CHECKING

from leyden.__about__ import __version__
from leyden.base.registry import lazy_exports

if TYPE_CHECKING:
    from leyden.base.seed import seed_everything
    from leyden.core.callback import Callback
    from leyden.core.datamodule import LightningDataModule
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__getattr__, __dir__, _names = lazy_exports(
    __name__,
    {
        "Trainer": "leyden.trainer.trainer",
        "LightningModule": "leyden.core.module",
        "LightningDataModule": "leyden.core.datamodule",
        "Callback": "leyden.core.callback",
        "seed_everything": "leyden.base.seed",
    },
    submodules=(
        "accelerators",
        "callbacks",
        "cli",
        "core",
        "demos",
        "loggers",
        "plugins",
        "profilers",
        "strategies",
        "train",
        "trainer",
        "utilities",
    ),
)

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "__version__", "seed_everything"]
