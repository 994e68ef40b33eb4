"""Inside a worker of `leyden.train`: what a plain Trainer reports there, and where it goes on after a restart."""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

from leyden.base import files
from leyden.base.log import rank_zero_info, rank_zero_warn, warn_once
from leyden.base.states import TrainerFn
from leyden.base.tree import to_scalars
from leyden.callbacks.checkpoint import ModelCheckpoint
from leyden.core.callback import Callback
from leyden.dist.worker import CheckpointNote, Worker, current, fit_number, start_checkpoint

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["WorkerReport", "WorkerSigns", "worker_checkpoint"]

_FILE = "checkpoint.ckpt"  # of the report callback that scripts for Ray Train use: both kinds of folders read the same


_SIGN_EVERY = 0.5  # seconds


class WorkerSigns(Callback):
    """Shows the orchestrator, twice a second at most, that there is progress: a long epoch would look like a hang."""

    def __init__(self) -> None:
        self._next = 0.0

    def _sign(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SIGN_EVERY
            worker = current()
            if worker is not None:
                worker.stop_requested()  # asking is the sign

    def on_train_batch_end(self, *batch: Any) -> None:
        self._sign()

    def on_validation_batch_end(self, *batch: Any) -> None:
        self._sign()

    def on_test_batch_end(self, *batch: Any) -> None:
        self._sign()

    def on_predict_batch_end(self, *batch: Any) -> None:
        self._sign()


class WorkerReport(Callback):
    """Reports metrics when an epoch or a validation ends, and a checkpoint whenever a `ModelCheckpoint` saved one.

    The folder of a reported checkpoint holds ``checkpoint.ckpt``, whatever the `ModelCheckpoint` calls the file. Files
    that two of them save at the same point hold the same weights and are one report. All ranks report at the same
    points; rank 0, which writes the files, brings them.
    """

    runs_last = True  # after the checkpoints, whose files it looks for;
    monitors_metric = True  # also at the end of an epoch, where those come after the module

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        callbacks = _model_checkpoints(trainer)
        self._seen = {id(each): _last_save(each) for each in callbacks}
        if any(type(each) is not ModelCheckpoint or each._saves_between_batches for each in callbacks):
            # Only then: a hook that is there is called after every batch.
            self.on_train_batch_end = self._after_batch  # pyright: ignore[reportAttributeAccessIssue]

    def _after_batch(self, trainer: Trainer, pl_module: LightningModule, *step: Any) -> None:
        self._report(trainer, due=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking:
            progress = trainer.progress
            epoch_ends = progress.is_last_batch or progress.batch == trainer.num_training_batches
            self._report(trainer, due=not epoch_ends)  # the report at the epoch's end has these metrics too

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, due=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, due=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._seen and trainer.state.fn is TrainerFn.FITTING:
            self._report(trainer, due=False)

    def _report(self, trainer: Trainer, due: bool) -> None:
        worker = current()
        if worker is None:  # the user's function has returned and keeps on training in a thread
            return
        saved = self._newly_saved(trainer)
        if not saved and not due:
            return
        metrics = to_scalars(trainer.callback_metrics)
        metrics.update(epoch=trainer.current_epoch, step=trainer.global_step)
        source = _worth_reporting(saved, _model_checkpoints(trainer))
        if source is None:
            worker.report(metrics, None)
            return
        with tempfile.TemporaryDirectory(prefix="leyden-report-") as folder:
            _collect(trainer, source, folder)
            worker.report(metrics, folder if os.listdir(folder) else None)
        self._stop_where_asked(trainer, worker)

    def _newly_saved(self, trainer: Trainer) -> list[ModelCheckpoint]:
        """Those that saved since the last look; the same on all ranks, since saving takes all of them."""
        callbacks = _model_checkpoints(trainer)
        saved = [each for each in callbacks if _last_save(each) != self._seen.get(id(each), ("", 0))]
        self._seen = {id(each): _last_save(each) for each in callbacks}
        return saved

    def _stop_where_asked(self, trainer: Trainer, worker: Worker) -> None:
        # Here, and not at any step: what was trained is saved now, so nothing is done twice.
        if trainer.strategy.reduce_boolean_decision(worker.stop_requested(), all=False):
            rank_zero_info("the orchestrator asked the workers to end: training stops at this checkpoint")
            trainer.should_stop = True


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _last_save(callback: ModelCheckpoint) -> tuple[str, int]:
    return callback._last_checkpoint_saved, callback._last_global_step_saved


def _worth_reporting(saved: list[ModelCheckpoint], present: list[ModelCheckpoint]) -> ModelCheckpoint | None:
    """Whose file to report: one that training can go on from, if there ever is one."""
    full = [each for each in saved if not each.save_weights_only]
    if full:
        return full[-1]
    if saved and all(each.save_weights_only for each in present):
        warn_once(
            "ModelCheckpoint(save_weights_only=True): what this run reports can't be resumed from, so a restart would "
            "begin again. Leave the argument out, or add a second ModelCheckpoint that saves all"
        )
        return saved[-1]
    return None  # it would take the place of the last checkpoint that can be resumed from


def _collect(trainer: Trainer, source: ModelCheckpoint, folder: str) -> None:
    """Puts the file, and the note for `worker_checkpoint`, into ``folder`` of the ranks that have a part of it."""
    path = source._last_checkpoint_saved
    target = os.path.join(folder, _FILE)
    if not files.is_local(path):
        trainer.save_checkpoint(target, source.save_weights_only)
    elif trainer.is_global_zero:
        os.symlink(os.path.abspath(path), target)  # no copy: the file may be large, and stays where it is meanwhile
    if os.path.exists(target):
        CheckpointNote(fit_number(), None if source.save_weights_only else _FILE, path).write(folder)


def worker_checkpoint() -> str | None:
    """Where this fit goes on after a restart of the worker; None where it starts, or outside of a worker.

    A script may call fit several times. After a restart it runs from its top, and only the fit that wrote the last
    checkpoint goes on from it.
    """
    if current() is None:
        return None
    folder, number = start_checkpoint(), fit_number()
    if folder is None:
        return None
    note = CheckpointNote.read(folder)
    if note is None:
        if number == 1:
            rank_zero_info(
                "the last checkpoint of this run was reported by the training function itself: where a fit should go "
                "on from it, pass fit(ckpt_path=...)"
            )
        return None
    if note.fit != number:
        if note.fit > number:
            rank_zero_warn(
                f"fit number {note.fit} of this script wrote the last checkpoint; fit number {number} runs again from "
                "its start. To skip it after a restart, look at leyden.train.get_checkpoint() first"
            )
        return None
    if note.file is None:
        rank_zero_warn("the last checkpoint of this run holds weights only: training starts again from its beginning")
        return None
    return os.path.join(folder, note.file)
