"""THE prediction loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.base.errors import MisconfigurationException, SIGTERMException
from leyden.base.log import warn_once
from leyden.base.states import RunningStage
from leyden.base.tree import move_to_device
from leyden.loops.calls import profiled_step
from leyden.loops.data import batch_indices
from leyden.loops.evaluate import ModuleModes, check_dataloader_idx, no_grad_context
from leyden.loops.loading import LoadedData, batch_transfer, load_data
from leyden.loops.optimize import takes_batch_idx
from leyden.loops.progress import Count, CountView

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["PredictionLoop"]


class PredictionLoop:
    """Runs ``predict_step`` over the data of this rank and collects what it returns, on the CPU.

    Attributes:
        epoch_batch_indices: Per loader and batch, the dataset indices that were read, where they are known.
        current_batch_indices: The same for the running batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.data: LoadedData | None = None
        self.max_batches: list[int | float] = []
        self.batches_done = 0
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.current_batch_indices: list[int] = []
        self._return_predictions = True
        self._predictions: list[list[Any]] = []  # loader, batch

    @property
    def return_predictions(self) -> bool:
        return self._return_predictions

    @return_predictions.setter
    def return_predictions(self, wanted: bool | None) -> None:
        launcher = self.trainer.strategy.launcher
        possible = launcher is None or not getattr(launcher, "runs_in_children", False)
        if wanted and not possible:
            raise MisconfigurationException(
                f"return_predictions={wanted}: predictions made in spawned or forked processes are not sent back. "
                "Pass return_predictions=False and write them in on_predict_batch_end, or use strategy='ddp'"
            )
        self._return_predictions = possible if wanted is None else wanted

    @property
    def batch_progress(self) -> CountView:
        count = Count(*[self.batches_done] * 4)
        return CountView(count, count)

    @property
    def predictions(self) -> list[Any]:
        """Per batch; with several loaders, a list of that per loader."""
        return self._predictions[0] if len(self._predictions) == 1 else self._predictions

    def run(self) -> list[Any] | None:
        """Predicts once over all loaders."""
        trainer = self.trainer
        if trainer.limit_predict_batches == 0:
            return None
        self.data = load_data(trainer, trainer.sources["predict"], RunningStage.PREDICTING)
        self.max_batches = self.data.limits
        if sum(self.max_batches) == 0:
            return None
        with no_grad_context(trainer, inference=trainer.inference_mode):
            return self._run()

    def _run(self) -> list[Any] | None:
        trainer, data = self.trainer, self.data
        assert data is not None
        module, calls = trainer.lightning_module, trainer.calls
        count = len(data.combined.flattened)
        self.batches_done = 0
        self._predictions = [[] for _ in range(count)]
        self.epoch_batch_indices = [[] for _ in range(count)]
        batches = data.combined.batches()
        hooks = ("on_predict_batch_start", "predict_step", "on_predict_batch_end")
        check_dataloader_idx(module, hooks, RunningStage.PREDICTING, count > 1)
        modes = ModuleModes(module)
        module.on_predict_model_eval()
        calls.run("on_predict_start", None)
        calls.run("on_predict_epoch_start", None)
        self._predict_batches(batches, several=count > 1)
        calls.run("on_predict_epoch_end", None)
        predictions = self.predictions if self._return_predictions else None
        calls.run("on_predict_end", None)
        modes.restore()
        return predictions

    def _predict_batches(self, batches: Any, several: bool) -> None:
        trainer, calls = self.trainer, self.trainer.calls
        assert self.data is not None
        step = profiled_step(trainer, "predict_step")
        with_index = takes_batch_idx(trainer.lightning_module.predict_step)
        to_device = batch_transfer(trainer, trainer.sources["predict"])
        loaders = self.data.combined.flattened
        # Callbacks that write predictions at the epoch's end need them kept even when they are not returned.
        keep = self._return_predictions or any(getattr(c, "needs_epoch_predictions", False) for c in trainer.callbacks)
        for batch, index, loader in batches:
            batch = batch if to_device is None else to_device(batch, loader)
            self.current_batch_indices = batch_indices(loaders[loader], index) or []
            if self.current_batch_indices:
                self.epoch_batch_indices[loader].append(self.current_batch_indices)
            place = (index, loader) if several else (index,)
            for call in calls.on_predict_batch_start:
                call(batch, *place)
            prediction = step(batch, *(place if with_index else place[1:]))
            if prediction is None:
                warn_once("predict_step returned None; if that is not on purpose, return the predictions")
            for call in calls.on_predict_batch_end:
                call(prediction, batch, *place)
            self.batches_done += 1
            if keep:
                self._predictions[loader].append(move_to_device(prediction, "cpu"))
            if trainer.comm is None and trainer.received_sigterm:
                raise SIGTERMException
