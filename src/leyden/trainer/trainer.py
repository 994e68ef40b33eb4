"""`Trainer`: what users call. The work is done in `run` and in the loops."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_info
from leyden.base.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from leyden.core.compile import unwrap_module
from leyden.core.datamodule import LightningDataModule
from leyden.core.module import LightningModule
from leyden.core.optim import LightningOptimizer, configure_optimizers
from leyden.loops.calls import Calls, compile_calls
from leyden.loops.evaluate import EvaluationLoop
from leyden.loops.fit import FitLoop
from leyden.loops.metrics import BarebonesLog, MetricLog, MetricViews
from leyden.loops.predict import PredictionLoop
from leyden.loops.progress import Progress
from leyden.trainer import checkpointing
from leyden.trainer.ckpt_path import hpc_save_path, select_ckpt_path
from leyden.trainer.defaults import default_callbacks, default_loggers, make_profiler
from leyden.trainer.parse import env_defaults
from leyden.trainer.properties import TrainerProperties
from leyden.trainer.run import attach, call_and_handle_interrupt, run
from leyden.trainer.signals import Signals, requeue_job
from leyden.trainer.spec import TrainerSpec

if TYPE_CHECKING:
    from leyden.core.callback import Callback
    from leyden.dist.devices import Accelerator
    from leyden.loggers.base import Logger
    from leyden.profilers import Profiler
    from leyden.strategies.base import Strategy

__all__ = ["Trainer"]


class Trainer(TrainerProperties):
    """Trains, validates, tests and predicts with a `LightningModule`.

    All arguments are checked together, before any work; one error lists everything that is wrong.

    Args:
        accelerator: ``"cpu"``, ``"cuda"``, ``"mps"``, ``"gpu"`` (CUDA or MPS), ``"auto"``, or an `Accelerator`.
        strategy: A registered name (``"ddp"``, ...), a `Strategy`, or ``"auto"``: one device, or ``ddp`` for several.
        devices: A count, -1 for all, a list of indices, a string of either, or ``"auto"``.
        num_nodes: Number of machines.
        precision: ``"32-true"`` (default), ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``,
            ``"64-true"`` and their short forms (``"bf16"``, ``16``, ...).
        logger: True (TensorBoard), False, a `Logger` or several.
        callbacks: A `Callback` or a list of them.
        fast_dev_run: True or n: one epoch of 1 or n batches of everything, without loggers and checkpoints.
        max_epochs: Epochs to train at most; -1: no limit. Default: 1000 unless another limit is set.
        min_epochs: Epochs to train at least, whoever asks to stop.
        max_steps: Optimizer steps to train at most; -1: no limit.
        min_steps: Optimizer steps to train at least.
        max_time: Time to train at most: ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its arguments.
        limit_train_batches: Batches of an epoch: an int counts, a float is a fraction of the data. Per process.
        limit_val_batches: The same for validation; 0 turns it off.
        limit_test_batches: The same for test.
        limit_predict_batches: The same for prediction.
        overfit_batches: Train and validate on the same few batches each epoch, unshuffled: an int or a fraction.
        val_check_interval: When to validate inside an epoch: a fraction, a number of batches, or a time.
        check_val_every_n_epoch: Validate in every n-th epoch; None: count batches across epochs.
        num_sanity_val_steps: Validation batches to try before training; -1: all. Default: 2.
        log_every_n_steps: Optimizer steps between writing step values to loggers; 0: never. Default: 50.
        enable_checkpointing: Add a `ModelCheckpoint` where there is none. Default: True.
        enable_progress_bar: Add a progress bar where there is none. Default: True.
        enable_model_summary: Print a summary of the model. Default: True.
        accumulate_grad_batches: Batches per optimizer step.
        gradient_clip_val: Clip gradients to this norm or value.
        gradient_clip_algorithm: ``"norm"`` (default) or ``"value"``.
        deterministic: True: deterministic algorithms, or an error; ``"warn"``: or a warning.
        benchmark: ``torch.backends.cudnn.benchmark``.
        inference_mode: Validate, test and predict under ``torch.inference_mode`` instead of ``no_grad``.
        use_distributed_sampler: Split data over processes by adding a sampler where there is none.
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"``, or a `Profiler`.
        detect_anomaly: Run the training under autograd's anomaly detection.
        barebones: Turn everything off that costs time; for measuring.
        plugins: Precision, checkpoint IO, cluster environment, layer sync: at most one of each.
        sync_batchnorm: Synchronise batch norm over processes.
        reload_dataloaders_every_n_epochs: Ask for the loaders again every n epochs; 0: never.
        default_root_dir: Where logs and checkpoints go by default; a path or an fsspec URL. Default: here.
        enable_autolog_hparams: Send saved hyper-parameters to the loggers.
        model_registry: Not supported; only None.

    Raises:
        MisconfigurationException: Some arguments are wrong, or don't go together.
    """

    @env_defaults
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.spec = spec = TrainerSpec.resolve(**arguments)
        spec.apply_torch_flags()
        self.state = TrainerState()
        self.strategy = spec.strategy
        self.signals = Signals()
        self.progress = Progress()
        self.datamodule: LightningDataModule | None = None
        self.sources: dict[str, Any] = {}
        self.calls: Calls = Calls()
        self.should_stop = False
        self.ckpt_path = None
        self.profiler: Profiler | None = make_profiler(spec)
        self.loggers = default_loggers(spec)
        self.callbacks = default_callbacks(spec)
        self.fit_loop = FitLoop(self, min_epochs=spec.min_epochs, max_epochs=spec.max_epochs)
        self.validate_loop = EvaluationLoop(self, RunningStage.VALIDATING)
        self.test_loop = EvaluationLoop(self, RunningStage.TESTING)
        self.predict_loop = PredictionLoop(self)
        self._views = MetricViews()
        self._metrics: Any = None
        self._lightning_optimizers: list[LightningOptimizer] = []
        self._manual_backward: Any = None
        self._take_settings(spec)

    def _take_settings(self, spec: TrainerSpec) -> None:
        """The settings that users and callbacks may change between, or during, runs."""
        self.accumulate_grad_batches = spec.accumulate_grad_batches
        self.barebones = spec.barebones
        self.check_val_every_n_epoch = spec.check_val_every_n_epoch
        self.default_root_dir = spec.default_root_dir
        self.detect_anomaly = spec.detect_anomaly
        self.enable_autolog_hparams = spec.enable_autolog_hparams
        self.fast_dev_run = spec.fast_dev_run
        self.gradient_clip_algorithm = spec.gradient_clip_algorithm
        self.gradient_clip_val = spec.gradient_clip_val
        self.inference_mode = spec.inference_mode
        self.limit_predict_batches = spec.limit_predict_batches
        self.limit_test_batches = spec.limit_test_batches
        self.limit_train_batches = spec.limit_train_batches
        self.limit_val_batches = spec.limit_val_batches
        self.log_every_n_steps = spec.log_every_n_steps
        self.max_steps = spec.max_steps
        self.min_steps = spec.min_steps
        self.num_sanity_val_steps = spec.num_sanity_val_steps
        self.overfit_batches = spec.overfit_batches
        self.reload_dataloaders_every_n_epochs = spec.reload_dataloaders_every_n_epochs
        self.use_distributed_sampler = spec.use_distributed_sampler
        self.val_check_batch: int | float | None = None
        self.val_check_interval = spec.val_check_interval
        self.val_check_time = spec.val_check_time

    # ---- the four calls ------------------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains the model.

        Args:
            model: What to train.
            train_dataloaders: An iterable of batches, or a nested collection of them; or a LightningDataModule.
            val_dataloaders: The same for validation.
            datamodule: Has the loaders as methods. Not together with loaders.
            ckpt_path: Go on from this checkpoint: a path or URL, ``"last"``, ``"best"``, ``"hpc"``.
            weights_only: False trusts the checkpoint file to run code while it is loaded.

        Raises:
            MisconfigurationException: Model, data and settings don't go together.
        """
        module = self._module_for(model, TrainerFn.FITTING, RunningStage.TRAINING)
        self.should_stop = False
        call_and_handle_interrupt(
            self, self._fit, module, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only
        )

    def _fit(
        self, module: LightningModule, train: Any, val: Any, datamodule: Any, ckpt_path: Any, weights_only: Any
    ) -> None:
        if isinstance(train, LightningDataModule):
            train, datamodule = None, train
        if datamodule is not None and (train is not None or val is not None):
            raise MisconfigurationException(
                "trainer.fit got loaders and a datamodule: pass train_dataloaders and val_dataloaders, or datamodule"
            )
        attach(self, module, datamodule, train=train, val=val)
        run(self, module, select_ckpt_path(self, ckpt_path, model_provided=True), weights_only)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Runs one evaluation over the validation data.

        Args:
            model: What to evaluate; None: the module of the call before, by default with its best checkpoint.
            dataloaders: An iterable of batches, or a nested collection of them; or a LightningDataModule.
            ckpt_path: Load this checkpoint first: a path or URL, ``"best"``, ``"last"``, ``"hpc"``.
            verbose: Print the results.
            datamodule: Has the loaders as methods. Not together with loaders.
            weights_only: False trusts the checkpoint file to run code while it is loaded.

        Returns:
            What was logged with ``on_epoch``: one dictionary per loader.
        """
        return self._evaluate(
            TrainerFn.VALIDATING, model, dataloaders, datamodule, ckpt_path, weights_only, verbose=verbose
        )

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Runs one evaluation over the test data; arguments and result as for `validate`."""
        return self._evaluate(
            TrainerFn.TESTING, model, dataloaders, datamodule, ckpt_path, weights_only, verbose=verbose
        )

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Runs ``predict_step`` over data.

        Args:
            model: What to predict with; None: the module of the call before.
            dataloaders: An iterable of batches, or a nested collection of them; or a LightningDataModule.
            datamodule: Has the loaders as methods. Not together with loaders.
            return_predictions: Whether to keep all predictions and return them. Default: True where possible.
            ckpt_path: Load this checkpoint first: a path or URL, ``"best"``, ``"last"``, ``"hpc"``.
            weights_only: False trusts the checkpoint file to run code while it is loaded.

        Returns:
            This process's predictions, on the CPU: one per batch; with several loaders a list of that per loader.
        """
        return self._evaluate(
            TrainerFn.PREDICTING, model, dataloaders, datamodule, ckpt_path, weights_only, keep=return_predictions
        )

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        loaders: Any,
        datamodule: LightningDataModule | None,
        ckpt_path: Any,
        weights_only: bool | None,
        verbose: bool = True,
        keep: bool | None = None,
    ) -> Any:
        module = self._module_for(model, fn, RunningStage(fn.value))
        if fn is TrainerFn.PREDICTING:
            self.predict_loop.return_predictions = keep
        else:
            (self.test_loop if fn is TrainerFn.TESTING else self.validate_loop).verbose = verbose
        return call_and_handle_interrupt(
            self, self._evaluate_attached, module, model is not None, loaders, datamodule, ckpt_path, weights_only
        )

    def _evaluate_attached(
        self, module: LightningModule, provided: bool, loaders: Any, datamodule: Any, ckpt_path: Any, weights_only: Any
    ) -> Any:
        assert self.state.fn is not None
        if isinstance(loaders, LightningDataModule):
            loaders, datamodule = None, loaders
        if datamodule is not None and loaders is not None:
            raise MisconfigurationException(
                f"trainer.{self.state.fn} got loaders and a datamodule: pass dataloaders or datamodule"
            )
        stage = RunningStage(self.state.fn.value).dataloader_prefix
        attach(self, module, datamodule, **{stage: loaders})
        return run(self, module, select_ckpt_path(self, ckpt_path, model_provided=provided), weights_only)

    def _module_for(self, model: Any, fn: TrainerFn, stage: RunningStage) -> LightningModule:
        """The module of this call, and the state that says what runs."""
        if model is None:
            model = self.lightning_module
            if model is None:
                raise TypeError(f"trainer.{fn}() needs a LightningModule: none was passed, now or in a call before")
        module = unwrap_module(model)
        self.strategy.connect(module)  # before launching: results of other processes come back into this module
        self.state.fn = fn
        self.state.status = TrainerStatus.RUNNING
        self.state.stage = stage
        return module

    # ---- other public methods ------------------------------------------------------------------------------------

    def save_checkpoint(
        self, filepath: str | os.PathLike, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint. All processes call it together; one writes.

        Args:
            filepath: A path or an fsspec URL; existing files are replaced, whole, at the end.
            weights_only: Leave out what only training needs (optimizers, schedulers, callbacks).
            storage_options: Passed to the checkpoint IO.

        Raises:
            AttributeError: No model was attached by a call of fit, validate, test or predict.
        """
        if self.lightning_module is None:
            raise AttributeError(
                "trainer.save_checkpoint() has nothing to save yet: call fit, validate, test or predict with a model"
            )
        checkpoint = checkpointing.dump_checkpoint(self, bool(weights_only))
        self.strategy.save_checkpoint(checkpoint, os.fspath(filepath), storage_options=storage_options)
        if self.state.status is not TrainerStatus.INTERRUPTED:  # after a failure the other ranks may never come
            self.strategy.barrier("Trainer.save_checkpoint")

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which parameters are created on the trainer's device, with its precision.

        Args:
            empty_init: Leave the memory of parameters as it is, for weights that are loaded afterwards.
        """
        with (
            self.strategy.tensor_init_context(empty_init=empty_init),
            self.strategy.model_sharded_context(),
            self.precision_plugin.module_init_context(),
        ):
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def requeue(self) -> None:
        """Saves ``hpc_ckpt_N.ckpt`` and has the scheduler start this job again; training goes on till it is ended."""
        rank_zero_info("the scheduler announced the end of this job: saving and queueing it again")
        for logger in self.loggers:
            logger.finalize("finished")
        self.save_checkpoint(hpc_save_path(str(self.default_root_dir)))
        if self.is_global_zero:
            requeue_job()

    # ---- what run and the loops need ------------------------------------------------------------------------------

    def init_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Calls the module's ``configure_optimizers``; strategies use it in `Strategy.setup_optimizers`."""
        return configure_optimizers(self.lightning_module)

    def wrap_optimizers(self) -> None:
        """Makes the optimizers that ``self.optimizers()`` returns in a module."""
        self._lightning_optimizers = [LightningOptimizer(o, self.strategy) for o in self.optimizers]

    def recompile(self) -> None:
        """Looks up hooks again: callbacks may have come or gone."""
        self.calls = compile_calls(self)

    @property
    def metrics(self) -> Any:
        """The `MetricLog` of the loop that runs."""
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        self._metrics = metrics

    def new_metrics(self, training: bool) -> Any:
        """A log for one loop, publishing into this trainer's views."""
        if self.barebones:
            return BarebonesLog()
        return MetricLog(self.lightning_module, self._views, training, self.comm, self.strategy.root_device)

    def reset_metrics(self) -> None:
        """Empties the views, at the start of a run and around the sanity check."""
        self._metrics = None
        self._views.clear()

    def close_metrics(self) -> None:
        """Ends logging; the views keep their values, on the CPU."""
        if self._metrics is not None:
            self._metrics.publish()
            self._metrics = None
        self._views.to_cpu()
