"""Warnings before training about what is probably not meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leyden.base.errors import PossibleUserWarning
from leyden.base.log import rank_zero_warn

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["advise_on_eval_mode", "advise_on_log_interval"]


def advise_on_log_interval(trainer: Trainer, batches: int | float) -> None:
    """An epoch shorter than ``log_every_n_steps`` writes few step values."""
    every = trainer.log_every_n_steps
    if trainer.loggers and batches < every and not trainer.fast_dev_run:
        rank_zero_warn(
            f"an epoch has {batches} training batches, fewer than log_every_n_steps={every}: step values are seldom "
            "written. Pass a smaller log_every_n_steps",
            category=PossibleUserWarning,
        )


def advise_on_eval_mode(module: torch.nn.Module) -> None:
    """Parts in eval mode when training starts: dropout and batch norm behave as in evaluation there."""
    frozen = [name for name, part in module.named_modules() if not part.training]
    if frozen:
        shown = ", ".join(repr(name) for name in frozen[:3])
        rank_zero_warn(
            f"training starts with {len(frozen)} parts of the module in eval mode ({shown}...): dropout and batch norm "
            "behave there as in evaluation. If that is not on purpose, call module.train() before fit"
        )
