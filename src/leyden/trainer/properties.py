"""What can be read from a `Trainer`: its place in the world, its data, its metrics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.base.states import RunningStage, TrainerFn
from leyden.core.callback import Checkpoint
from leyden.loops.calls import module_overrides

if TYPE_CHECKING:
    from leyden.callbacks.early_stopping import EarlyStopping
    from leyden.callbacks.progress_bar import ProgressBar
    from leyden.core.module import LightningModule
    from leyden.core.optim import LRSchedulerConfig
    from leyden.dist.devices import Accelerator
    from leyden.loggers.base import Logger
    from leyden.profilers import Profiler
    from leyden.strategies.base import Strategy
    from leyden.strategies.precision import Precision

__all__ = ["TrainerProperties"]


class TrainerProperties:
    """Read-only views; nothing here communicates or changes anything, save the setters that say so."""

    # set by Trainer
    strategy: Strategy
    callbacks: list
    loggers: list
    profiler: Profiler | None
    fit_loop: Any
    validate_loop: Any
    test_loop: Any
    predict_loop: Any
    progress: Any
    state: Any
    signals: Any
    spec: Any
    sources: dict
    _views: Any
    _metrics: Any
    _ckpt_path: str | None
    _ckpt_path_stays: bool

    # ---- model and hardware --------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module | None:
        """The module as the strategy wraps it; see `lightning_module` for the module itself."""
        return self.strategy.model

    @property
    def lightning_module(self) -> LightningModule:
        """The module of the current or last call; None before the first."""
        return self.strategy.lightning_module

    @property
    def accelerator(self) -> Accelerator:
        assert self.strategy.accelerator is not None
        return self.strategy.accelerator

    @property
    def precision_plugin(self) -> Precision:
        return self.strategy.precision_plugin

    @property
    def precision(self) -> str:
        return self.precision_plugin.precision

    @property
    def scaler(self) -> Any:
        """The gradient scaler of ``16-mixed``; None otherwise."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def comm(self) -> Any:
        """How ranks talk to each other; None for one process."""
        return self.strategy.comm if self.strategy.world_size > 1 else None

    @property
    def global_rank(self) -> int:
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        return self.strategy.node_rank

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    @property
    def num_nodes(self) -> int:
        return self.strategy.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices used on this node."""
        return len(self.strategy.parallel_devices)

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices used on this node."""
        return [i if d.index is None else d.index for i, d in enumerate(self.strategy.parallel_devices)]

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return self.strategy.distributed_sampler_kwargs

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self.strategy.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.strategy.lr_scheduler_configs

    @property
    def ckpt_path(self) -> str | None:
        """What the last call loaded. Once set, all later calls load it, till it is None or one passes another."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | None) -> None:
        self._ckpt_path = path
        self._ckpt_path_stays = bool(path)

    # ---- where it stands -----------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Finished epochs; inside an epoch its index, from 0."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps, summed over optimizers."""
        return self.progress.global_step

    @property
    def max_epochs(self) -> int | None:
        return self.fit_loop.max_epochs

    @property
    def min_epochs(self) -> int | None:
        return self.fit_loop.min_epochs

    @property
    def is_last_batch(self) -> bool:
        """Whether the running training batch is the last of its epoch."""
        return self.progress.is_last_batch

    @property
    def received_sigterm(self) -> bool:
        return self.signals.received_sigterm

    @property
    def interrupted(self) -> bool:
        return self.state.status == "interrupted"

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole training; infinity (or ``max_steps``) where the data has no length.

        Loads the training data if that has not happened yet.
        """
        if self.max_epochs == -1:
            return math.inf if self.fit_loop.max_steps == -1 else self.fit_loop.max_steps
        if not self.sources:
            raise RuntimeError(
                "trainer.estimated_stepping_batches depends on the training data, which is known from trainer.fit on: "
                "read it in configure_optimizers or in a later hook"
            )
        if self.fit_loop.data is None:
            self.fit_loop.setup_data()
        batches, max_steps = self.num_training_batches, self.fit_loop.max_steps
        if batches == math.inf:
            return max_steps
        assert self.max_epochs is not None
        steps = math.ceil(batches / self.accumulate_grad_batches) * max(self.max_epochs, 1)  # pyright: ignore[reportAttributeAccessIssue]
        return steps if max_steps == -1 else min(steps, max_steps)

    def _set_stage(self, stage: RunningStage, value: bool) -> None:
        if value:
            self.state.stage = stage
        elif self.state.stage is stage:
            self.state.stage = None

    @property
    def training(self) -> bool:
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self._set_stage(RunningStage.TRAINING, value)

    @property
    def validating(self) -> bool:
        return self.state.stage is RunningStage.VALIDATING

    @validating.setter
    def validating(self, value: bool) -> None:
        self._set_stage(RunningStage.VALIDATING, value)

    @property
    def testing(self) -> bool:
        return self.state.stage is RunningStage.TESTING

    @testing.setter
    def testing(self, value: bool) -> None:
        self._set_stage(RunningStage.TESTING, value)

    @property
    def predicting(self) -> bool:
        return self.state.stage is RunningStage.PREDICTING

    @predicting.setter
    def predicting(self, value: bool) -> None:
        self._set_stage(RunningStage.PREDICTING, value)

    @property
    def sanity_checking(self) -> bool:
        return self.state.stage is RunningStage.SANITY_CHECKING

    @sanity_checking.setter
    def sanity_checking(self, value: bool) -> None:
        self._set_stage(RunningStage.SANITY_CHECKING, value)

    @property
    def evaluating(self) -> bool:
        return self.state.stage is not None and self.state.stage.evaluating

    # ---- data ----------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loaders as the user nested them; None before they were asked for."""
        return _loaders(self.fit_loop)

    @property
    def val_dataloaders(self) -> Any:
        own = _loaders(self.fit_loop.epoch_loop.val_loop)
        return own if own is not None else _loaders(self.validate_loop)

    @property
    def test_dataloaders(self) -> Any:
        return _loaders(self.test_loop)

    @property
    def predict_dataloaders(self) -> Any:
        return _loaders(self.predict_loop)

    @property
    def num_training_batches(self) -> int | float:
        return self.fit_loop.max_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        alone = self.state.fn is TrainerFn.VALIDATING
        return (self.validate_loop if alone else self.fit_loop.epoch_loop.val_loop).limits

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        limits = self.fit_loop.epoch_loop.val_loop.limits
        return [min(self.num_sanity_val_steps, limit) for limit in limits]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def num_test_batches(self) -> list[int | float]:
        return self.test_loop.limits

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self.predict_loop.max_batches

    @property
    def enable_validation(self) -> bool:
        """Whether there are data, a step and a limit above 0 for validation."""
        source = self.sources.get("val")
        return (
            source is not None
            and source.is_defined()
            and module_overrides("validation_step", self.lightning_module)
            and self.limit_val_batches > 0  # pyright: ignore[reportAttributeAccessIssue]
        )

    # ---- metrics and loggers -------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All that was logged, by plain name; what callbacks monitor."""
        if self._metrics is not None:
            self._metrics.publish()
        return self._views.callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What was or will be sent to loggers."""
        if self._metrics is not None:
            self._metrics.publish()
        return self._views.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What was logged with ``prog_bar=True``, as Python numbers. Reading it waits for the device."""
        if self._metrics is not None:
            self._metrics.publish()
        return self._views.progress_bar_scalars()

    @property
    def should_update_logs(self) -> bool:
        """Whether loggers are due at this batch."""
        every = self.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if every == 0:
            return False
        stage = self.state.stage
        if stage is None:
            return True
        if stage is RunningStage.TRAINING:
            step = self.progress.batches_that_stepped + 1
        else:
            loops = {RunningStage.TESTING: self.test_loop, RunningStage.PREDICTING: self.predict_loop}
            fitting = self.state.fn is TrainerFn.FITTING
            step = loops.get(stage, self.fit_loop.epoch_loop.val_loop if fitting else self.validate_loop).batches_done
        return step % every == 0 or self.should_stop  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | Literal[False] | None) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """The first logger's folder, else ``default_root_dir``. Local: any rank may read it alone."""
        logger = self.logger
        if logger is None:
            return self.spec.default_root_dir
        return logger.log_dir if logger.log_dir is not None else logger.save_dir

    @property
    def active_profiler(self) -> Profiler | None:
        """The profiler, unless it is one that does nothing."""
        profiler = self.profiler
        return None if profiler is None or getattr(profiler, "does_nothing", False) else profiler

    # ---- callbacks -----------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        return [c for c in self.callbacks if isinstance(c, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first checkpoint callback."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        return [c for c in self.callbacks if getattr(c, "monitors_metric", False)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        from leyden.callbacks.progress_bar import ProgressBar

        return next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)


def _loaders(loop: Any) -> Any:
    return None if loop.data is None else loop.data.loaders
