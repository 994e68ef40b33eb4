"""THE evaluation loop: validation (alone or inside fit, sanity check included) and test."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.base.errors import SIGTERMException
from leyden.base.states import RunningStage
from leyden.base.tree import to_scalars
from leyden.loops.calls import module_overrides, profiled_reads, profiled_step
from leyden.loops.emit import emit
from leyden.loops.loading import LoadedData, batch_transfer, load_data
from leyden.loops.optimize import takes_batch_idx
from leyden.loops.progress import Count, CountView
from leyden.loops.results import print_results

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["EvaluationLoop", "ModuleModes", "check_dataloader_idx", "no_grad_context"]


class EvaluationLoop:
    """Evaluates a module::

    load the data
    eval mode; on_{stage}_start, on_{stage}_epoch_start
    for loader in loaders:
        for batch in loader:
            move it to the device
            on_{stage}_batch_start
            {stage}_step
            on_{stage}_batch_end
            write step values to loggers
        reduce the loader's metrics
    on_{stage}_epoch_end
    write the epoch's values to loggers
    on_{stage}_end; train mode where it was
    """

    def __init__(self, trainer: Trainer, stage: RunningStage, verbose: bool = True, in_fit: bool = False) -> None:
        self.trainer = trainer
        self.verbose = verbose
        self.in_fit = in_fit
        self.data: LoadedData | None = None
        self.limits: list[int | float] = []  # batches of each loader; kept after a run, people read it then
        self.batches_done = 0  # of this run, over all loaders
        self.is_last_batch = False
        self._stage = stage
        self._word = "test" if stage is RunningStage.TESTING else "validation"
        self._reloaded_at = -1  # epoch
        self._seen: list[int] = []  # batches per loader over all runs: the x-axis of step values
        self._several = False
        self._even = True  # all ranks have the same number of batches
        self._empty = False  # no rank has any

    @property
    def max_batches(self) -> list[int | float]:
        """Batches to read of each loader; in the sanity check at most ``num_sanity_val_steps``."""
        if not self.trainer.sanity_checking:
            return self.limits
        return [min(self.trainer.num_sanity_val_steps, limit) for limit in self.limits]

    @property
    def batch_progress(self) -> CountView:
        count = Count(*[self.batches_done] * 4)
        return CountView(count, count, self.is_last_batch)

    # ---- data ------------------------------------------------------------------------------------------------------

    def setup_data(self) -> None:
        """Loads the data; inside fit only once, or every ``reload_dataloaders_every_n_epochs``."""
        trainer = self.trainer
        every = trainer.reload_dataloaders_every_n_epochs
        reload_due = bool(every) and trainer.current_epoch - self._reloaded_at >= every
        if self.data is not None and self.in_fit and not reload_due:
            return
        prefix = self._stage.dataloader_prefix
        if getattr(trainer, f"limit_{prefix}_batches") == 0:
            return
        if not module_overrides(f"{self._word}_step", trainer.lightning_module):
            return
        check_every = trainer.check_val_every_n_epoch
        if not trainer.sanity_checking or check_every is None or (trainer.current_epoch + 1) % check_every == 0:
            self._reloaded_at = trainer.current_epoch
        self.data = load_data(trainer, trainer.sources[prefix], self._stage)
        self.limits = self.data.limits
        self._seen = [0] * len(self.limits)
        comm = trainer.comm
        everywhere = [self.limits] if comm is None else comm.all_gather_object(self.limits)
        self._empty = not any(map(sum, everywhere))
        # A stream may have another length on each rank, also where it says one.
        self._even = all(limits == self.limits for limits in everywhere) and not self.data.has_streams

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> list[dict[str, float]]:
        """Evaluates once over all loaders.

        Returns:
            The epoch values, one dictionary per loader; empty when there is nothing to evaluate.
        """
        trainer = self.trainer
        self.setup_data()
        if self.data is None or self._empty:
            return []  # a rank without data goes along where others have some: they reduce metrics together
        with no_grad_context(trainer, inference=trainer.inference_mode and not self.in_fit):
            return self._run()

    def _run(self) -> list[dict[str, float]]:
        trainer, data, word = self.trainer, self.data, self._word
        assert data is not None
        metrics = trainer.metrics = trainer.new_metrics(training=False)
        calls = trainer.calls
        if self.in_fit:
            data.set_epoch(trainer.progress.epochs_processed)
        data.combined.limits = self.max_batches
        batches = data.combined.batches()
        self.batches_done = 0
        several = data.combined.mode == "sequential" and len(data.combined.flattened) > 1
        self._several = several
        hooks = (f"on_{word}_batch_start", f"{word}_step", f"on_{word}_batch_end")
        check_dataloader_idx(trainer.lightning_module, hooks, self._stage, several)
        metrics.sync_steps(self._even)

        modes = ModuleModes(trainer.lightning_module)
        getattr(trainer.lightning_module, f"on_{word}_model_eval")()
        calls.run(f"on_{word}_start", metrics)
        calls.run(f"on_{word}_epoch_start", metrics)
        outputs = self._evaluate_batches(batches, several)
        self._stop_if_asked()
        metrics.dataloader = None
        calls.run(f"on_{word}_epoch_end", metrics)
        metrics.close_epoch()
        outputs = self._finish_outputs(outputs, metrics.publish())
        if self.in_fit and not trainer.sanity_checking:
            trainer.progress.val_done = True  # for checkpoints that are written in the hook that follows
        calls.run(f"on_{word}_end", metrics)
        metrics.reset()
        self._restore_modes(modes)

        results = [to_scalars(output) for output in outputs]
        if self.verbose and trainer.is_global_zero:
            print_results(results, self._stage.value)
        return results

    def _evaluate_batches(self, batches: Any, several: bool) -> list[dict[str, Tensor]]:
        """All batches of all loaders; returns what was logged for each loader."""
        trainer, word, metrics, calls = self.trainer, self._word, self.trainer.metrics, self.trainer.calls
        step = profiled_step(trainer, f"{word}_step")
        with_index = takes_batch_idx(getattr(trainer.lightning_module, f"{word}_step"))
        to_device = batch_transfer(trainer, trainer.sources[self._stage.dataloader_prefix])
        on_start = getattr(calls, f"on_{word}_batch_start")
        on_end = getattr(calls, f"on_{word}_batch_end")
        start_name, step_name, end_name = f"on_{word}_batch_start", f"{word}_step", f"on_{word}_batch_end"
        log_steps = bool(trainer.loggers) and not trainer.sanity_checking
        limits, sequential = self.max_batches, self.data.combined.mode == "sequential"  # pyright: ignore[reportOptionalMemberAccess]
        # Modes other than sequential are one stream, and don't end at the limits by themselves.
        ends = limits if sequential else [self.data.combined.num_batches]  # pyright: ignore[reportOptionalMemberAccess]
        last_loader = max((i for i, end in enumerate(ends) if end), default=0)
        outputs: list[dict[str, Tensor]] = []

        name = f"[_EvaluationLoop].{self._stage.dataloader_prefix}_next"
        for batch, index, loader in profiled_reads(trainer, name, batches):
            if index >= ends[loader]:
                break
            while len(outputs) < loader:
                outputs.append(self._close_loader(len(outputs)))
            self.is_last_batch = loader == last_loader and index + 1 == ends[loader]
            batch = batch if to_device is None else to_device(batch, loader)
            metrics.start_batch(batch, loader if several else None)
            place = (index, loader) if several else (index,)
            if on_start:
                metrics.current_hook = start_name
                for call in on_start:
                    call(batch, *place)
            metrics.current_hook = step_name
            output = step(batch, *(place if with_index else place[1:]))
            if metrics.must_sync:
                metrics.close_step()
            if on_end:
                metrics.current_hook = end_name
                for call in on_end:
                    call(output, batch, *place)
            if metrics.must_sync:
                metrics.close_step(hooks=True)
            metrics.batch = None
            self.batches_done += 1
            if log_steps:
                emit(trainer, metrics.publish(), step=self._seen[loader])
                self._seen[loader] += 1
            if trainer.comm is None and trainer.received_sigterm and not self.is_last_batch:
                raise SIGTERMException
        while len(outputs) < len(ends):  # on every rank one reduction per loader, also where a loader was empty
            outputs.append(self._close_loader(len(outputs)))
        return outputs

    def _close_loader(self, index: int) -> dict[str, Tensor]:
        metrics = self.trainer.metrics
        metrics.dataloader = index if self._several else None
        if not self.trainer.sanity_checking:
            metrics.publish()  # the last step's values stay readable
        metrics.close_epoch()
        return {} if self.trainer.sanity_checking else metrics.publish()

    def _finish_outputs(self, outputs: list[dict[str, Tensor]], late: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Adds what the epoch's end hooks logged to every loader's values, and sends all to the loggers."""
        if self.trainer.sanity_checking:
            return outputs
        together: dict[str, Tensor] = {}
        for output in reversed(outputs):
            together.update(output)
        together.update(late)
        for output in outputs:
            output.update(late)
        emit(self.trainer, together)
        return outputs

    def _stop_if_asked(self) -> None:
        # Inside fit the training loop asks; several ranks must answer together, so they do it here, once.
        trainer = self.trainer
        if (
            trainer.comm is not None
            and not self.in_fit
            and trainer.strategy.reduce_boolean_decision(trainer.received_sigterm, all=False)
        ):
            raise SIGTERMException

    def _restore_modes(self, modes: ModuleModes) -> None:
        module, name = self.trainer.lightning_module, f"on_{self._word}_model_train"
        if module_overrides(name, module):
            getattr(module, name)()
        else:
            modes.restore()


class ModuleModes:
    """Remembers for each part of a module whether it was in training mode."""

    __slots__ = ("_training",)

    def __init__(self, module: torch.nn.Module) -> None:
        self._training = [(part, part.training) for part in module.modules()]

    def restore(self) -> None:
        for part, training in self._training:
            part.training = training


def check_dataloader_idx(module: Any, hooks: tuple[str, ...], stage: RunningStage, several: bool) -> None:
    """With several loaders, hooks must take ``dataloader_idx``; with one they may not require it.

    Raises:
        RuntimeError: A hook does otherwise.
    """
    for name in hooks:
        parameters = inspect.signature(getattr(module, name)).parameters
        takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
        own = parameters.get("dataloader_idx")
        where = f"{type(module).__name__}.{name}"
        if several and own is None and not takes_any:
            raise RuntimeError(
                f"there are several {stage.dataloader_prefix} loaders, but `{where}` does not take `dataloader_idx`: "
                "add `dataloader_idx=0` as its last parameter"
            )
        if not several and own is not None and own.default is inspect.Parameter.empty:
            raise RuntimeError(
                f"there is one {stage.dataloader_prefix} loader, but `{where}` requires `dataloader_idx`: "
                "give it a default, `dataloader_idx=0`, or drop it"
            )


def no_grad_context(trainer: Trainer, inference: bool) -> Any:
    """``torch.inference_mode`` where asked for and possible, else ``torch.no_grad``.

    Gloo can't communicate inference tensors.
    """
    gloo = trainer.comm is not None and torch.distributed.get_backend() == "gloo"
    return torch.inference_mode() if inference and not gloo else torch.no_grad()
