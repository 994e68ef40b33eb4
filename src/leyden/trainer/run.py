"""One run: attach, set up, restore, loop, tear down; and what happens when that is interrupted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from leyden.base.errors import MisconfigurationException, PossibleUserWarning, SIGTERMException, raise_all
from leyden.base.log import log, rank_zero_info, rank_zero_warn
from leyden.base.seed import isolate_rng
from leyden.base.states import RunningStage, TrainerFn, TrainerStatus
from leyden.core.callback import Callback, Checkpoint
from leyden.core.datamodule import LightningDataModule
from leyden.core.hooks import check_removed_hooks, is_overridden, refuse_foreign
from leyden.dist.comm import NoComm
from leyden.loops.calls import module_overrides
from leyden.loops.data import DataSource
from leyden.trainer import checkpointing
from leyden.trainer.hparams import log_hyperparams
from leyden.trainer.parse import as_list, loop_limits

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.strategies.base import Strategy
    from leyden.trainer.trainer import Trainer

__all__ = ["attach", "call_and_handle_interrupt", "order_callbacks", "run"]


def call_and_handle_interrupt(trainer: Trainer, fn: Callable, *args: Any) -> Any:
    """Calls ``fn(*args)`` in all processes of the run; whatever goes wrong, everyone is told and nothing stays open.

    Ctrl-C ends the process with exit code 130, SIGTERM with 143, errors are raised again.
    """
    try:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            return launcher.launch(fn, *args, trainer=trainer)
        return fn(*args)
    except KeyboardInterrupt as interrupt:
        rank_zero_info("\nCtrl-C: ending the run. Callbacks and loggers close now; pressing it again changes nothing.")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            _interrupt(trainer, interrupt)
            launcher = trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(signal.SIGKILL)
        finally:
            signal.signal(signal.SIGINT, before)
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        _interrupt(trainer, error)
        raise


def _interrupt(trainer: Trainer, error: BaseException) -> None:
    """Order: callbacks, datamodule, strategy, loggers, then the trainer's own teardown.

    Nothing that fails here hides the error, or keeps what comes after from being told.
    """
    trainer.state.status = TrainerStatus.INTERRUPTED
    module = trainer.lightning_module
    steps: list[Callable[[], Any]] = [partial(c.on_exception, trainer, module, error) for c in trainer.callbacks]
    if trainer.datamodule is not None:
        steps.append(partial(trainer.datamodule.on_exception, error))
    steps.append(partial(trainer.strategy.on_exception, error))
    steps += [partial(logger.finalize, "failed") for logger in trainer.loggers]
    steps.append(partial(_teardown, trainer))
    # SIGTERM was agreed on, all ranks are here. After anything else the others may be gone, or wait for a gradient.
    together = isinstance(error, SIGTERMException)
    with nullcontext() if together else _alone(trainer.strategy):
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("while the run ended because of %s, this failed too:", type(error).__name__)
    trainer.state.stage = None


@contextmanager
def _alone(strategy: Strategy) -> Iterator[None]:
    """Inside, this rank waits for no other: barriers and broadcasts do nothing."""
    comm, strategy.comm = strategy.comm, NoComm()
    try:
        yield
    finally:
        strategy.comm = comm


def attach(trainer: Trainer, module: LightningModule, datamodule: Any = None, **loaders: Any) -> None:
    """Connects a module and its data to the trainer.

    Args:
        trainer: The trainer.
        module: Gets ``module.trainer``.
        datamodule: Has the loaders. None: the one of the call before stays, its hooks run, and where neither the user
            nor the module gives a loader, it does.
        **loaders: ``train=``, ``val=``, ``test=``, ``predict=``: loaders the user passed, or None.
    """
    for given in (datamodule, *loaders.values()):
        _check_datamodule(given)
    trainer.strategy.connect(module)
    if datamodule is not None:
        trainer.datamodule = datamodule
        datamodule.trainer = trainer
    for stage in ("train", "val", "test", "predict"):
        name = f"{stage}_dataloader"
        source = DataSource.pick(loaders.get(stage), datamodule, module, name)
        if not source.is_defined() and trainer.datamodule is not None:
            source = DataSource(None, trainer.datamodule, name)
        trainer.sources[stage] = source
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop):
        loop.data = None
    trainer.test_loop.data = trainer.predict_loop.data = None
    module.trainer = trainer


def _check_datamodule(given: Any) -> None:
    if isinstance(given, type) and issubclass(given, LightningDataModule):
        raise TypeError(f"the class {given.__name__} was passed as data: pass an instance, {given.__name__}(...)")
    if hasattr(given, "prepare_data_per_node") and not isinstance(given, LightningDataModule):
        refuse_foreign(given)


def run(trainer: Trainer, module: LightningModule, ckpt_path: str | None, weights_only: bool | None) -> Any:
    """One call of fit, validate, test or predict, from the first hook to the last."""
    fitting = trainer.state.fn is TrainerFn.FITTING
    strategy = trainer.strategy
    if fitting:
        loop = trainer.fit_loop
        loop.min_epochs, loop.max_epochs = loop_limits(
            max_epochs=loop.max_epochs,
            min_epochs=loop.min_epochs,
            max_steps=trainer.max_steps,
            min_steps=trainer.min_steps,
            has_timer=any(getattr(c, "limits_time", False) for c in trainer.callbacks),
        )
    _attach_module_callbacks(trainer, module)
    _check_module(trainer, module)
    strategy.setup_environment()
    _set_up_profiler(trainer)
    trainer.metrics = trainer.new_metrics(training=False)  # so that logging too early, or too late, names the hook

    # data and hooks before the model is on its device
    _prepare_data(trainer, module)
    _call_setup(trainer, module)
    _configure_model(trainer, module)
    checkpoint = None if ckpt_path is None else checkpointing.load(trainer, ckpt_path, weights_only)
    trainer._ckpt_path = ckpt_path
    if checkpoint is not None and not strategy.restore_checkpoint_after_setup:
        checkpointing.restore_model(trainer, checkpoint)

    # the model on its device, with its optimizers
    trainer.reset_metrics()
    trainer.metrics = outside = trainer.new_metrics(training=False)
    outside.current_hook = "configure_optimizers"
    strategy.setup(trainer)
    trainer.wrap_optimizers()
    trainer.recompile()
    if fitting:
        trainer.calls.run("on_fit_start", trainer.metrics)
    if trainer.enable_autolog_hparams:
        log_hyperparams(trainer)
    if checkpoint is not None:
        if strategy.restore_checkpoint_after_setup:
            checkpointing.restore_model(trainer, checkpoint)
        checkpointing.restore_training_state(trainer, checkpoint, str(ckpt_path))
        rank_zero_info(
            f"{'Restored all states' if fitting else 'Loaded model weights'} from the checkpoint at {ckpt_path}"
        )
    # A sanity check inside an epoch would come between what was, and what will be, logged and monitored.
    sanity = checkpoint is None or not trainer.fit_loop.resumes_inside_epoch
    checkpoint = None  # its memory is needed from here on
    trainer.signals.register(trainer)

    results = _run_stage(trainer, sanity)

    _teardown(trainer)
    trainer.metrics = outside
    if fitting:
        trainer.calls.run("on_fit_end", outside)
    _call_teardown(trainer, module)
    trainer.metrics = None
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None
    return results


def _run_stage(trainer: Trainer, sanity: bool) -> Any:
    trainer.strategy.barrier("run-stage")
    trainer.lightning_module.zero_grad()
    if trainer.state.fn is TrainerFn.PREDICTING:
        trainer.metrics = None  # a prediction has no metrics: `self.log` explains itself
        return trainer.predict_loop.run()
    if trainer.state.fn is not TrainerFn.FITTING:
        loop = trainer.validate_loop if trainer.state.fn is TrainerFn.VALIDATING else trainer.test_loop
        return loop.run()
    if sanity:
        with isolate_rng():
            _sanity_check(trainer)
    torch.set_grad_enabled(True)
    with torch.autograd.set_detect_anomaly(trainer.detect_anomaly):
        trainer.metrics = trainer.new_metrics(training=True)
        trainer.fit_loop.run()
    return None


def _sanity_check(trainer: Trainer) -> None:
    """A few validation batches before training, so that a broken validation_step is found now and not hours later."""
    if not (trainer.enable_validation and trainer.num_sanity_val_steps > 0):
        return
    trainer.state.stage = RunningStage.SANITY_CHECKING
    trainer.reset_metrics()
    trainer.calls.run("on_sanity_check_start", None)
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.calls.run("on_sanity_check_end", None)
    trainer.reset_metrics()
    trainer.fit_loop.epoch_loop.val_loop.batches_done = 0
    trainer.state.stage = RunningStage.TRAINING


# ---- the steps of run, in order ------------------------------------------------------------------------------------


def _attach_module_callbacks(trainer: Trainer, module: LightningModule) -> None:
    """Adds what ``configure_callbacks`` returns; each replaces the trainer's callbacks of its own or a base type."""
    added = module.configure_callbacks()
    if added:
        added = as_list(added, Callback, f"what {type(module).__name__}.configure_callbacks returned")
        present = {type(c) for c in trainer.callbacks} - {Callback}
        replaced = {old for old in present if any(issubclass(type(new), old) for new in added)}
        if replaced:
            names = ", ".join(sorted(t.__name__ for t in replaced))
            rank_zero_info(
                f"{type(module).__name__}.configure_callbacks replaces these callbacks of the Trainer: {names}"
            )
        kept = [c for c in trainer.callbacks if type(c) not in replaced]
        trainer.callbacks = order_callbacks(kept + added)
    for callback in trainer.callbacks:
        callback.log = module.log  # pyright: ignore[reportAttributeAccessIssue]
        callback.log_dict = module.log_dict  # pyright: ignore[reportAttributeAccessIssue]


def order_callbacks(callbacks: list[Callback]) -> list[Callback]:
    """Tuners first, since they change what the others see; checkpoints last, since they save what the others did.

    After them comes only what reports the files that they saved.
    """
    first = [c for c in callbacks if getattr(c, "runs_first", False)]
    last = [c for c in callbacks if isinstance(c, Checkpoint)]
    last += [c for c in callbacks if getattr(c, "runs_last", False)]
    return first + [c for c in callbacks if c not in first and c not in last] + last


def _check_module(trainer: Trainer, module: LightningModule) -> None:
    """Finds out before any work whether the module can do what was asked for."""
    check_removed_hooks(module)
    name, fn = type(module).__name__, trainer.state.fn
    if fn is TrainerFn.FITTING:
        _check_fit(trainer, module)
    elif fn is TrainerFn.PREDICTING:
        if not (module_overrides("predict_step", module) or module_overrides("forward", module)):
            raise MisconfigurationException(f"{name} has no `forward` and no `predict_step`: trainer.predict needs one")
        if not trainer.sources["predict"].is_defined():
            raise MisconfigurationException(_no_data(name, "predict"))
    else:
        step = "test_step" if fn is TrainerFn.TESTING else "validation_step"
        problems = []
        if not module_overrides(step, module):
            problems.append(f"{name} defines no `{step}()` method, which trainer.{fn} needs")
        stage = "test" if fn is TrainerFn.TESTING else "val"
        if not trainer.sources[stage].is_defined():
            problems.append(_no_data(name, stage))
        raise_all(problems, f"trainer.{fn}")
    if module_overrides("configure_model", module) and module_overrides("configure_sharded_model", module):
        raise RuntimeError(f"{name} defines `configure_model` and `configure_sharded_model`: keep the former only")


def _no_data(name: str, stage: str) -> str:
    return (
        f"there is no `{stage}_dataloader`: pass loaders to the call, or a datamodule, or define "
        f"`def {stage}_dataloader(self)` in {name}"
    )


def _check_fit(trainer: Trainer, module: LightningModule) -> None:
    name = type(module).__name__
    problems = [
        f"{name} defines no `{method}()` method, which trainer.fit needs"
        for method in ("training_step", "configure_optimizers")
        if not module_overrides(method, module)
    ]
    if not trainer.sources["train"].is_defined() and trainer.limit_train_batches != 0:
        problems.append(_no_data(name, "train"))
    raise_all(problems, "trainer.fit")
    has_loader = trainer.sources["val"].is_defined()
    has_step = module_overrides("validation_step", module)
    if has_loader and not has_step:
        rank_zero_warn(f"there is validation data, but {name} has no `validation_step`: no validation will run")
    if has_step and not has_loader:
        rank_zero_warn(
            f"{name} has a `validation_step`, but there is no validation data, so no validation will run: pass it, "
            "trainer.fit(model, train_loader, val_loader), or define `val_dataloader`",
            category=PossibleUserWarning,
        )
    if module.automatic_optimization:
        return
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0:
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) has no effect with manual optimization: call "
            "self.clip_gradients(optimizer, ...) before optimizer.step(), and drop the argument"
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) has no effect with manual "
            "optimization: step the optimizer every n-th batch in training_step, and drop the argument"
        )


def _prepare_data(trainer: Trainer, module: LightningModule) -> None:
    """Calls ``prepare_data`` on one rank per node (or one in all), the others wait."""
    datamodule = trainer.datamodule
    for owner, base in ((datamodule, LightningDataModule), (module, type(module))):
        if owner is None:
            continue
        per_node = owner.prepare_data_per_node
        mine = trainer.local_rank == 0 and (per_node or trainer.node_rank == 0)
        defined = (
            module_overrides("prepare_data", owner) if owner is module else is_overridden("prepare_data", owner, base)
        )
        if mine and defined:
            owner.prepare_data()
    trainer.strategy.barrier("prepare_data")


def _call_setup(trainer: Trainer, module: LightningModule) -> None:
    """``setup`` of datamodule, callbacks, module. Loggers exist before, on the same version on every rank."""
    assert trainer.state.fn is not None
    stage = trainer.state.fn.value
    for part in module.modules():
        if hasattr(part, "_device"):
            part.__dict__["_device"] = trainer.strategy.root_device  # so that setup() sees where the model will be
    _open_loggers(trainer)
    trainer.strategy.barrier("pre_setup")
    trainer.metrics.current_hook = "setup"
    if trainer.datamodule is not None:
        trainer.datamodule.setup(stage=stage)
    for callback in trainer.callbacks:
        callback.setup(trainer, module, stage=stage)
    module.setup(stage=stage)
    trainer.strategy.barrier("post_setup")


def _set_up_profiler(trainer: Trainer) -> None:
    if trainer.active_profiler is not None:
        rank = trainer.local_rank if trainer.world_size > 1 else None
        if hasattr(trainer.active_profiler, "_lightning_module"):
            trainer.active_profiler._lightning_module = trainer.lightning_module  # pyright: ignore[reportAttributeAccessIssue]
        trainer.active_profiler.setup(stage=trainer.state.fn, local_rank=rank, log_dir=trainer.log_dir)


def _open_loggers(trainer: Trainer) -> None:
    """Starts the loggers' experiments, with rank zero's version on every rank."""
    for logger in trainer.loggers:
        if trainer.world_size > 1 and hasattr(logger, "_version"):
            logger._version = trainer.strategy.broadcast(logger.version)  # pyright: ignore[reportAttributeAccessIssue]
        _ = getattr(logger, "experiment", None)


def _configure_model(trainer: Trainer, module: LightningModule) -> None:
    strategy = trainer.strategy
    for hook in ("configure_sharded_model", "configure_model"):
        if module_overrides(hook, module):
            trainer.metrics.current_hook = hook
            with (
                strategy.tensor_init_context(),
                strategy.model_sharded_context(),
                trainer.precision_plugin.module_init_context(),
            ):
                getattr(module, hook)()


def _call_teardown(trainer: Trainer, module: LightningModule) -> None:
    """``teardown`` of datamodule, callbacks, module; then loggers and profiler close."""
    assert trainer.state.fn is not None
    stage = trainer.state.fn.value
    trainer.metrics.current_hook = "teardown"
    if trainer.datamodule is not None:
        trainer.datamodule.teardown(stage=stage)
    for callback in trainer.callbacks:
        callback.teardown(trainer, module, stage=stage)
    module.teardown(stage=stage)
    for logger in trainer.loggers:
        logger.finalize("success")
    if trainer.active_profiler is not None:
        trainer.active_profiler.describe()


def _teardown(trainer: Trainer) -> None:
    """The trainer's own end of a run: the model back on the CPU, loaders and handlers let go."""
    trainer.strategy.teardown()
    trainer.fit_loop.teardown()
    trainer.close_metrics()
    trainer.signals.restore()
