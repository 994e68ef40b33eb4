"""THE training loop."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, Any

from leyden.base.errors import SIGTERMException
from leyden.base.log import rank_zero_info, warn_once
from leyden.base.states import RunningStage
from leyden.loops.advice import advise_on_eval_mode, advise_on_log_interval
from leyden.loops.calls import Calls, call_clocked, profiled_reads, profiler_spans
from leyden.loops.emit import emit
from leyden.loops.epoch_loop import EpochLoop
from leyden.loops.loading import Batches, LoadedData, batch_transfer, load_data
from leyden.loops.optimize import AutomaticOptimization, ManualOptimization, RunBatch, takes_batch_idx
from leyden.loops.progress import CountView
from leyden.loops.schedule import Schedulers, ValidationSchedule, batches_between_validations, quiet_until
from leyden.loops.watch import LossWatch, Request, StopWatch

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["FitLoop"]


class FitLoop:
    """Trains a module::

    load the training data
    on_train_start
    while not done (epochs, steps, stop asked for):
        on_train_epoch_start
        for batch in batches:
            move it to the device
            on_train_batch_start                # the module's -1 ends the epoch
            training_step, zero_grad, backward, and if due: clip, optimizer.step
            step schedulers of interval "step"; on the last batch those of interval "epoch"
            on_train_batch_end
            write to loggers, if due
            validate, if due
            step plateau schedulers of interval "step"
            stop asked for? signal received?
        on_train_epoch_end                      # callbacks, module, then callbacks that monitor a metric
        step plateau schedulers of interval "epoch"
        write the epoch's values to loggers
    on_train_end
    """

    def __init__(self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None) -> None:
        self.trainer = trainer
        self.min_epochs = min_epochs
        self.max_epochs = max_epochs
        self.epoch_loop = EpochLoop(trainer)
        self.data: LoadedData | None = None
        self._max_batches: int | float = math.inf  # kept after a run: people read it then
        self._batches: Batches | None = None  # of the coming epoch, where they were begun ahead of it
        self._reloaded_at = 0  # epoch
        self._last_validation = 0.0  # time.monotonic()
        self._watch = LossWatch()
        self._stop = StopWatch(trainer.signals.take, None)
        self._loader_states: list[dict[str, Any]] = []  # of the loaders that can restore themselves
        self._loaders_resumed = False
        self._resumed = False  # the coming epoch was begun by the run that wrote the checkpoint
        self._metrics_before: dict[str, Any] = {}  # that run's callback_metrics
        self._in_epoch_end = False  # ... which wrote it in hooks of an epoch's end

    # ---- limits --------------------------------------------------------------------------------------------------

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        return self.trainer.min_steps

    @property
    def max_batches(self) -> int | float:
        return self._max_batches

    @property
    def batch_idx(self) -> int:
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        return self.epoch_loop.total_batch_idx

    @property
    def epoch_progress(self) -> CountView:
        return self.trainer.progress.epoch_view()

    @property
    def can_stop_early(self) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are met."""
        progress = self.trainer.progress
        epochs_met = progress.epochs_processed >= self.min_epochs if self.min_epochs else True
        return epochs_met and (progress.global_step >= self.min_steps if self.min_steps else True)

    def why_done(self) -> str | None:
        """The reason to start no further epoch, or None."""
        trainer, progress = self.trainer, self.trainer.progress
        if self.max_batches == 0:
            return "no training batches"
        if _reached(progress.global_step, self.max_steps):
            return f"`max_steps={self.max_steps}` reached"
        if _reached(progress.epochs_processed, self.max_epochs):
            return f"`max_epochs={self.max_epochs}` reached"
        if trainer.should_stop and self.can_stop_early:
            return "`trainer.should_stop` was set"
        return None

    def resume(self, loader_states: list[dict[str, Any]], metrics: dict[str, Any], in_epoch_end: bool) -> None:
        """The counters come from a checkpoint: go on inside its epoch, if it is from inside one.

        Args:
            loader_states: Of the loaders that can restore themselves.
            metrics: The ``callback_metrics`` when it was written.
            in_epoch_end: It was written in hooks of an epoch's end, so what follows them is still to be done.
        """
        progress = self.trainer.progress
        self._resumed = progress.epochs_started > progress.epochs_processed
        self._loader_states = loader_states
        self._metrics_before, self._in_epoch_end = metrics, in_epoch_end

    @property
    def resumes_inside_epoch(self) -> bool:
        """Whether the run goes on from a checkpoint of the middle, or of the end hooks, of an epoch."""
        return self._resumed

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        trainer = self.trainer
        self.setup_data()
        if self._finished() or trainer.limit_train_batches == 0:
            return
        self._load_validation_data()
        self._stop = StopWatch(trainer.signals.take, trainer.comm)
        advise_on_eval_mode(trainer.lightning_module)
        self._take_over()
        trainer.calls.run("on_train_start", trainer.metrics)
        while not self._finished():
            schedulers = self._start_epoch()
            self._train_batches(schedulers)
            self._end_epoch(schedulers)
        trainer.calls.run("on_train_end", trainer.metrics)

    def _take_over(self) -> None:
        """Shows what was logged before the checkpoint, and makes the scheduler steps that were due after it."""
        trainer, progress = self.trainer, self.trainer.progress
        if self._metrics_before:
            trainer.callback_metrics.update(self._metrics_before)
        if self._in_epoch_end and progress.is_last_batch:
            schedulers = Schedulers(trainer, lenient=True)
            schedulers.advance(schedulers.plateau_epoch, progress.epoch - 1)
        self._metrics_before, self._in_epoch_end = {}, False

    def _finished(self) -> bool:
        reason = self.why_done()
        if reason is None:
            return False
        progress = self.trainer.progress
        progress.epoch = max(progress.epoch, progress.epochs_processed)
        rank_zero_info(f"`Trainer.fit` stopped: {reason}.")
        return True

    def setup_data(self) -> None:
        """Loads the training data, the first time and whenever ``reload_dataloaders_every_n_epochs`` says so."""
        trainer = self.trainer
        if self.data is not None and not self._reload_due():
            return
        if trainer.limit_train_batches == 0:
            return
        self.data = load_data(trainer, trainer.sources["train"], RunningStage.TRAINING)
        self._max_batches = self.data.num_batches
        self._reloaded_at = trainer.current_epoch
        if self.max_batches == 0:
            return
        self._loaders_resumed = self.data.load_states(self._loader_states)
        self._loader_states = []
        self.data.set_epoch(trainer.progress.epochs_processed)  # before loader workers begin to read ahead
        self._batches = Batches(self.data, trainer.comm)
        trainer.val_check_batch = None
        self._last_validation = monotonic()
        if trainer.val_check_time is None:
            trainer.val_check_batch = batches_between_validations(
                trainer.val_check_interval,
                self.max_batches,
                trainer.check_val_every_n_epoch,
                validates=trainer.limit_val_batches > 0,
            )
        advise_on_log_interval(trainer, self.max_batches)

    def _reload_due(self) -> bool:
        every = self.trainer.reload_dataloaders_every_n_epochs
        return bool(every) and self.trainer.current_epoch - self._reloaded_at >= every

    def _load_validation_data(self) -> None:
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0):
            self.epoch_loop.val_loop.setup_data()  # early, so that a progress bar knows its length

    def _start_epoch(self) -> Schedulers:
        trainer, progress = self.trainer, self.trainer.progress
        self.setup_data()
        assert self.data is not None
        self.data.set_epoch(progress.epochs_processed)
        trainer.recompile()
        if not self._resumed:
            progress.start_epoch()
            trainer.calls.run("on_train_epoch_start", trainer.metrics)
        if self._batches is None:
            self._batches = Batches(self.data, trainer.comm)
        if self._resumed and not self._loaders_resumed:
            self._batches.skip(progress.batch)
        self._watch.start_epoch(progress.epoch)
        return Schedulers(trainer, lenient=self._resumed)

    def _train_batches(self, schedulers: Schedulers) -> None:
        """One epoch's batches: the hot path. What can be looked up before is looked up before."""
        trainer, progress, signals = self.trainer, self.trainer.progress, self.trainer.signals
        module, metrics, calls = trainer.lightning_module, trainer.metrics, trainer.calls
        automatic, delegated = module.automatic_optimization, trainer.strategy.handles_gradient_accumulation
        run_batch, with_index = self._batch_runner(calls), takes_batch_idx(module.training_step)
        to_device, has_start_hooks = batch_transfer(trainer, trainer.sources["train"]), calls.has_batch_start
        on_batch_end, clocked, wake_up = calls.on_train_batch_end, calls.clocked_batch_end, 0.0
        validation = ValidationSchedule.build(trainer)
        accumulate, max_batches, max_steps = trainer.accumulate_grad_batches, self.max_batches, self.max_steps
        if not self._ready_for_batches(validation, schedulers):
            return
        batches = self._take_batches()
        log_every = self._log_every()
        quiet_end = self._quiet_until(progress.batch, schedulers, validation, log_every)
        metrics.start_batch(None)

        for batch in profiled_reads(trainer, "[_TrainingEpochLoop].train_dataloader_next", batches):
            index = progress.batch
            quiet = index < quiet_end  # an update, not the last, and nothing will be due after it
            last = not quiet and (index + 1 == max_batches or batches.ended)
            update = quiet or (index + 1) % accumulate == 0 or (last and not delegated)
            progress.batch_ready, progress.is_last_batch = index + 1, last
            metrics.batch = batch = batch if to_device is None else to_device(batch, 0)
            metrics.batch_size = None

            # train on it
            outputs, skip_epoch = None, False
            if batch is None:
                warn_once("the training loader yielded None: this batch is skipped", key="train-batch-none")
            elif has_start_hooks and self._call_batch_start(batch, index):
                skip_epoch = progress.is_last_batch = last = update = True
            else:
                outputs = run_batch((batch, index) if with_index else (batch,), index, update)
            if quiet and not skip_epoch:
                progress.batch = index + 1
            else:
                progress.batch_trained(update)
                schedulers.after_batch(index, update, last)
            if skip_epoch:
                break

            # tell everyone
            if metrics.must_sync:
                metrics.close_step()
            if on_batch_end:
                progress.in_end_hooks, progress.step_uncounted = True, update
                metrics.current_hook = "on_train_batch_end"
                for call in on_batch_end:
                    call(outputs, batch, index)
                progress.in_end_hooks = False
            if clocked and (not quiet or monotonic() >= wake_up):
                wake_up = call_clocked(clocked, outputs, batch, index)
            if quiet and not (trainer.should_stop or signals.noted):
                progress.batches_that_stepped += 1
                progress.step_uncounted = False
                continue
            if metrics.must_sync:
                metrics.close_step(hooks=True)
            metrics.batch = metrics.batch_size = None
            if log_every and (update or not automatic) and self._log_due(log_every):
                emit(trainer, metrics.publish())

            # validate, stop
            if validation.this_epoch and self._validation_due(validation, index, last):
                self._validate(zero_grad=update)
            if update:
                schedulers.advance(schedulers.plateau_step, index)
                progress.count_step()
            if last or _reached(progress.global_step, max_steps) or self._asked_to_stop():
                break
            if not quiet:
                quiet_end = self._quiet_until(index + 1, schedulers, validation, log_every)

    def _quiet_until(
        self, index: int, schedulers: Schedulers, validation: ValidationSchedule, log_every: int
    ) -> int | float:
        """The first batch from ``index`` on that is not like all others; -1 where each of them may be special."""
        trainer = self.trainer
        special = (
            trainer.accumulate_grad_batches != 1
            or not trainer.lightning_module.automatic_optimization
            or trainer.comm is not None
            or schedulers.per_step
            or math.isinf(self.max_batches)
            or (validation.this_epoch and validation.seconds is not None)
        )
        if special:
            return -1
        return quiet_until(
            index,
            trainer.progress,
            max_batches=self.max_batches,
            max_steps=self.max_steps,
            log_every=log_every,
            validation=validation,
        )

    def _batch_runner(self, calls: Calls) -> RunBatch:
        automatic = self.trainer.lightning_module.automatic_optimization
        kind = AutomaticOptimization if automatic else ManualOptimization
        return profiler_spans(self.trainer)("run_training_batch", kind(self.trainer, calls, self._watch).run_batch)

    def _log_every(self) -> int:
        """Steps between rows for the loggers; 0 where none are written."""
        trainer = self.trainer
        return (1 if trainer.fast_dev_run else trainer.log_every_n_steps) if trainer.loggers else 0

    def _log_due(self, log_every: int) -> bool:
        return (self.trainer.progress.batches_that_stepped + 1) % log_every == 0 or self.trainer.should_stop

    def _asked_to_stop(self) -> bool:
        """Obeys signals; whether training ends here because a callback or the user said so."""
        trainer = self.trainer
        if (trainer.signals.noted or trainer.comm is not None) and (request := self._stop.requested()):
            self._obey(request)
        return trainer.should_stop and self._may_stop()

    def _ready_for_batches(self, validation: ValidationSchedule, schedulers: Schedulers) -> bool:
        """Makes up for what the run that wrote the checkpoint did not get to; whether to train on batches at all."""
        trainer, progress = self.trainer, self.trainer.progress
        if self._resumed and progress.batch and not progress.val_done and validation.this_epoch:
            last = progress.is_last_batch or progress.batch == self.max_batches
            if self._validation_due(validation, progress.batch - 1, last):
                self._validate(zero_grad=True)
        if self._resumed and progress.batch and progress.batch_stepped:
            schedulers.advance(schedulers.plateau_step, progress.batch - 1)
        self._resumed = False
        if progress.batch >= self.max_batches:
            self._batches = None  # all of them were trained before the checkpoint, and the next epoch needs its own
            return False
        return not (trainer.should_stop and self._may_stop())  # it may have been set in a hook before the first batch

    def _take_batches(self) -> Batches:
        batches, self._batches = self._batches, None
        assert batches is not None
        return batches

    def _validation_due(self, validation: ValidationSchedule, index: int, last: bool) -> bool:
        stopping = self.trainer.should_stop and self.can_stop_early
        return validation.due(index, self.trainer.progress.total_batches - 1, last, stopping, self._last_validation)

    def _call_batch_start(self, batch: Any, index: int) -> bool:
        """The hooks before a batch, and whether the module's own asked to end the epoch by returning -1."""
        calls, metrics, progress = self.trainer.calls, self.trainer.metrics, self.trainer.progress
        progress.in_start_hooks, metrics.current_hook = True, "on_train_batch_start"
        for call in calls.on_train_batch_start:
            call(batch, index)
        own = calls.module_train_batch_start
        answer = None if own is None else own(batch, index)
        for call in calls.strategy_train_batch_start:
            call(batch, index)
        progress.in_start_hooks = answer == -1
        return progress.in_start_hooks

    def _validate(self, zero_grad: bool) -> None:
        """Validates inside the training epoch; the training metrics wait meanwhile."""
        trainer = self.trainer
        training_metrics = trainer.metrics
        training_metrics.publish()  # later reads of the views must find the last step's values
        trainer.state.stage = RunningStage.VALIDATING
        if zero_grad:
            # Gradients that are done with need not take memory beside the validation's activations.
            trainer.lightning_module.on_validation_model_zero_grad()
        self.epoch_loop.val_loop.run()
        trainer.state.stage = RunningStage.TRAINING
        trainer.metrics = training_metrics
        self._last_validation = monotonic()

    def _obey(self, request: Request) -> None:
        """Does what a signal asked for, at the end of a batch or an epoch, on all ranks alike."""
        if request is Request.TERMINATE:
            raise SIGTERMException
        self.trainer.requeue()

    def _may_stop(self) -> bool:
        for logger in self.trainer.loggers:
            logger.save()
        if self.can_stop_early:
            return True
        warn_once(
            f"a stop was asked for, but min_epochs={self.min_epochs} or min_steps={self.min_steps} is not reached: "
            "training goes on until it is",
            key="stop-before-minimum",
        )
        return False

    def _end_epoch(self, schedulers: Schedulers) -> None:
        trainer, progress = self.trainer, self.trainer.progress
        metrics, calls = trainer.metrics, trainer.calls
        self._watch.look()
        metrics.batches_seen = progress.batch
        metrics.publish()  # the last step's values stay readable
        metrics.close_epoch()
        progress.epochs_processed += 1
        calls.run("on_train_epoch_end", metrics)
        metrics.close_epoch()  # what the hooks logged
        metrics.current_hook = "on_train_epoch_end"
        for call in calls.monitors_train_epoch_end:
            call()
        metrics.close_epoch()
        logged = metrics.publish()
        if schedulers.plateau_epoch and (progress.is_last_batch or progress.batch == self.max_batches):
            schedulers.advance(schedulers.plateau_epoch, progress.epoch)
        # Loggers expect the epoch's values at the step of its last batch, which the counter has already passed.
        progress.batches_that_stepped -= 1
        emit(trainer, logged)
        progress.batches_that_stepped += 1
        metrics.reset()
        progress.epoch += 1
        if request := self._stop.agree():
            self._obey(request)

    def teardown(self) -> None:
        """Lets go of iterators (and the workers behind them)."""
        self._batches = None
        self._resumed = self._in_epoch_end = False
        self._metrics_before = {}


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and limit != -1 and count >= limit
