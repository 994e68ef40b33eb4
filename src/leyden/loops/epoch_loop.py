"""The inner loop's names, for code that reads ``trainer.fit_loop.epoch_loop``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.base.states import RunningStage
from leyden.loops.evaluate import EvaluationLoop
from leyden.loops.progress import CountView

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["EpochLoop"]


class EpochLoop:
    """The names under which other code knows the inner loop: counters to read, and the validation loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.val_loop = EvaluationLoop(trainer, RunningStage.VALIDATING, verbose=False, in_fit=True)

    @property
    def batch_progress(self) -> CountView:
        return self._trainer.progress.batch_view()

    @property
    def batch_idx(self) -> int:
        return self._trainer.progress.batch_ready - 1

    @property
    def total_batch_idx(self) -> int:
        return self._trainer.progress.batch_view().total.ready - 1

    @property
    def global_step(self) -> int:
        return self._trainer.progress.global_step

    @property
    def max_steps(self) -> int:
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, max_steps: int) -> None:
        self._trainer.max_steps = max_steps

    @property
    def min_steps(self) -> int | None:
        return self._trainer.min_steps

    @min_steps.setter
    def min_steps(self, min_steps: int | None) -> None:
        self._trainer.min_steps = min_steps

    @property
    def _batches_that_stepped(self) -> int:
        return self._trainer.progress.batches_that_stepped
