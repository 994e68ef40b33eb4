"""Types for annotations in user code."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import NotRequired, Required, TypedDict

from leyden.core.optim import LRSchedulerConfig

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfig",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]

# What a step may return: a loss, a dict with "loss" (training) or with anything (evaluation), or None.
STEP_OUTPUT: TypeAlias = Tensor | Mapping[str, Any] | None

# An iterable of batches, or nested collections of such.
TRAIN_DATALOADERS: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]
LRSchedulerPLType: TypeAlias = LRScheduler | ReduceLROnPlateau


class LRSchedulerConfigType(TypedDict, total=False):
    """The dict form of a scheduler in ``configure_optimizers``."""

    scheduler: Required[LRSchedulerTypeUnion]
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """The dict form of ``configure_optimizers`` without a scheduler."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """The dict form of ``configure_optimizers`` with a scheduler."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


# What configure_optimizers may return.
OptimizerLRScheduler: TypeAlias = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRSchedulerTypeUnion | LRSchedulerConfig]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
