"""What is due after a batch: a validation, a scheduler step. Decisions here, effects in the loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn

if TYPE_CHECKING:
    from leyden.core.optim import LRSchedulerConfig
    from leyden.loops.progress import Progress
    from leyden.trainer.trainer import Trainer

__all__ = ["Schedulers", "ValidationSchedule", "batches_between_validations", "quiet_until"]


def batches_between_validations(
    val_check_interval: int | float,
    max_batches: int | float,
    every_n_epoch: int | None,
    validates: bool,
) -> int | float:
    """Batches between validations; infinity: at the end of an epoch whose length nobody knows.

    Raises:
        ValueError: An interval longer than the epoch would never come.
        MisconfigurationException: A fraction of an unknown length.
    """
    if isinstance(val_check_interval, int):
        if val_check_interval > max_batches and every_n_epoch is not None and validates:
            raise ValueError(
                f"val_check_interval={val_check_interval} is more than the {max_batches} training batches of an epoch, "
                "so validation would never run. Pass a smaller interval, or check_val_every_n_epoch=None to count "
                "batches across epochs, or limit_val_batches=0 to go without validation"
            )
        return val_check_interval
    if math.isinf(max_batches):
        if val_check_interval == 1.0:
            return math.inf
        raise MisconfigurationException(
            f"val_check_interval={val_check_interval} is a fraction of an epoch, but the training loader has no "
            "length: pass a number of batches (int), a time ('00:00:30:00'), or 1.0 for the end of the epoch"
        )
    return max(1, int(max_batches * val_check_interval))


@dataclass(slots=True)
class ValidationSchedule:
    """When to validate inside an epoch. Built at each epoch's start."""

    this_epoch: bool  # validation is on, and this epoch is one of every n
    every_n_batches: int | float | None  # None: by time
    across_epochs: bool  # count batches over epochs
    seconds: float | None
    unsized_limit: int | None  # limit_train_batches of a loader without length

    @classmethod
    def build(cls, trainer: Trainer) -> ValidationSchedule:
        every_n = trainer.check_val_every_n_epoch
        enabled = trainer.enable_validation and (every_n is None or (trainer.current_epoch + 1) % every_n == 0)
        interval = trainer.val_check_time
        limit = trainer.limit_train_batches
        return cls(
            this_epoch=enabled,
            every_n_batches=trainer.val_check_batch,
            across_epochs=every_n is None,
            seconds=None if interval is None else interval.total_seconds(),
            unsized_limit=limit if isinstance(limit, int) else None,
        )

    def due(self, batch_idx: int, total_batch_idx: int, is_last: bool, stopping: bool, last_time: float) -> bool:
        """Whether to validate after this batch.

        Args:
            batch_idx: Index in the epoch.
            total_batch_idx: Index over all epochs.
            is_last: The epoch's last batch.
            stopping: A stop was asked for and may happen now; the model is validated once more before.
            last_time: `time.monotonic` of the last validation, or of the start.
        """
        if not self.this_epoch:
            return False
        unsized = self.every_n_batches == math.inf
        if stopping or (is_last and unsized):
            return True
        if self.seconds is not None:
            return time.monotonic() - last_time >= self.seconds
        if unsized:
            return self.unsized_limit is not None and (batch_idx + 1) % self.unsized_limit == 0
        assert self.every_n_batches is not None
        return ((total_batch_idx if self.across_epochs else batch_idx) + 1) % self.every_n_batches == 0


def quiet_until(
    index: int,
    progress: Progress,
    *,
    max_batches: int | float,
    max_steps: int,
    log_every: int,
    validation: ValidationSchedule,
) -> int | float:
    """The first batch from ``index`` on after which something may be due; before it the loop need not ask.

    Holds where every batch makes one step, and nothing is due by the clock.

    Args:
        index: The coming batch of the epoch.
        progress: The counters as they are before that batch.
        max_batches: Of the epoch; its last batch is never quiet.
        max_steps: Of the run; -1: no limit.
        log_every: Steps between rows for the loggers; 0: none are written.
        validation: Of this epoch.
    """
    due = [max_batches - 1]
    if max_steps != -1:
        due.append(index + max_steps - progress.global_step - 1)
    if log_every:
        due.append(index + log_every - 1 - progress.batches_that_stepped % log_every)
    every = validation.every_n_batches
    if validation.this_epoch and every is not None:
        counted = progress.batches_before + index if validation.across_epochs else index
        due.append(index + every - 1 - counted % every)
    return min(due)


class Schedulers:
    """The learning-rate schedulers of a run, sorted by when they step.

    Args:
        trainer: Whose schedulers.
        lenient: Skip a plateau step whose metric is missing: in an epoch that goes on from a checkpoint, it may have
            been logged before.
    """

    __slots__ = ("_lenient", "_module", "_trainer", "epoch", "per_step", "plateau_epoch", "plateau_step", "step")

    def __init__(self, trainer: Trainer, lenient: bool = False) -> None:
        self._lenient = lenient
        module = trainer.lightning_module
        configs = trainer.lr_scheduler_configs if module.automatic_optimization else []
        self._trainer = trainer
        self._module = module
        self.step = [c for c in configs if c.interval == "step" and not c.reduce_on_plateau]
        self.epoch = [c for c in configs if c.interval == "epoch" and not c.reduce_on_plateau]
        self.plateau_step = [c for c in configs if c.interval == "step" and c.reduce_on_plateau]
        self.plateau_epoch = [c for c in configs if c.interval == "epoch" and c.reduce_on_plateau]

        self.per_step = bool(self.step or self.plateau_step)

    def after_batch(self, index: int, update: bool, last: bool) -> None:
        """Steps those that go by updates, and on the epoch's last batch those that go by epochs."""
        if update:
            self.advance(self.step, index)
        if last:
            self.advance(self.epoch, self._trainer.current_epoch)

    def advance(self, configs: Sequence[LRSchedulerConfig], index: int) -> None:
        """Steps those whose frequency divides ``index + 1``; ``index`` is the batch's in the epoch, or the epoch's."""
        for config in configs:
            if (index + 1) % config.frequency:
                continue
            value = None
            if config.reduce_on_plateau:
                value = self._monitored(config)
                if value is None:
                    continue
            self._trainer.metrics.current_hook = "lr_scheduler_step"
            self._module.lr_scheduler_step(config.scheduler, value)

    def _monitored(self, config: LRSchedulerConfig) -> Any:
        metrics = self._trainer.callback_metrics
        value = metrics.get(config.monitor)  # pyright: ignore[reportArgumentType]
        if value is None and not self._lenient:
            message = (
                f"ReduceLROnPlateau monitors {config.monitor!r}, which was not logged; there are {sorted(metrics)}. "
                "Log it, or set 'monitor' in the scheduler dict to one of these"
            )
            if config.strict:
                raise MisconfigurationException(f"{message}; or pass 'strict': False to skip the step.")
            rank_zero_warn(f"{message}. The step is skipped ('strict': False).", category=RuntimeWarning)
        return value
