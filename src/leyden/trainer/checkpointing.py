"""The checkpoint as a dictionary: built from a trainer, and put back into one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_info, rank_zero_warn
from leyden.base.states import TrainerFn
from leyden.checkpoint import schema
from leyden.checkpoint.schema import Position
from leyden.core.callback import Callback
from leyden.core.hooks import is_overridden

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["dump_checkpoint", "restore_model", "restore_training_state"]

_METRICS = "leyden_metrics"  # beside the position, where Lightning does not look


def dump_checkpoint(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """Everything that a run needs to go on, under Lightning's keys.

    Args:
        trainer: The running trainer. All ranks call this together.
        weights_only: Leave out optimizers, schedulers, precision and callbacks.
    """
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    checkpoint: dict[str, Any] = {
        schema.EPOCH: trainer.current_epoch,
        schema.GLOBAL_STEP: trainer.global_step,
        schema.VERSION: schema.WRITTEN_VERSION,
        schema.STATE_DICT: strategy.lightning_module_state_dict(),
        schema.LOOPS: schema.loops_from_position(current_position(trainer), _loader_states(trainer)),
    }
    if not weights_only:
        checkpoint[schema.CALLBACKS] = _callback_states(trainer.callbacks)
        checkpoint[schema.OPTIMIZER_STATES] = [strategy.optimizer_state(o) for o in trainer.optimizers]
        checkpoint[schema.LR_SCHEDULERS] = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
        if state := precision.state_dict():
            checkpoint[type(precision).__qualname__] = state
        # What a plateau scheduler or an EarlyStopping is going to look at may have been logged before, and once.
        metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        checkpoint[schema.LOOPS]["fit_loop"]["state_dict"][_METRICS] = metrics
    for owner in (module, trainer.datamodule):
        _add_hparams(checkpoint, owner)
    datamodule = trainer.datamodule
    if datamodule is not None and (state := datamodule.state_dict()):
        checkpoint[type(datamodule).__qualname__] = state
    if not weights_only:
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def current_position(trainer: Trainer) -> Position:
    """Where the run stands, as a checkpoint written now has to say it."""
    progress = trainer.progress
    inside = progress.epochs_started > progress.epochs_processed
    module = trainer.lightning_module
    return Position(
        epoch=progress.epochs_processed,
        batch=progress.batch if inside else 0,
        global_step=progress.global_step,
        batches_that_stepped=progress.batches_that_stepped + progress.step_uncounted,
        total_batches=progress.total_batches,
        val_done=progress.val_done,
        in_epoch_end=not inside and progress.epoch < progress.epochs_processed,
        is_last_batch=progress.is_last_batch and progress.batch_ready == progress.batch,
        manual=not module.automatic_optimization,
        stepped=progress.step_uncounted or progress.batch_stepped,
        previous_batches=0 if inside else progress.batch,
    )


def _loader_states(trainer: Trainer) -> list[dict[str, Any]] | None:
    data = trainer.fit_loop.data
    if data is None:
        return None
    stateful = [x for x in data.combined.flattened if hasattr(x, "state_dict") and hasattr(x, "load_state_dict")]
    return [loader.state_dict() for loader in stateful] or None


def _callback_states(callbacks: list[Callback]) -> dict[str, Any]:
    states = {}
    for callback in callbacks:
        if state := callback.state_dict():
            states[callback.state_key] = state
    return states


def _add_hparams(checkpoint: dict[str, Any], owner: Any) -> None:
    if owner is None or not owner.hparams:
        return
    if hasattr(owner, "_hparams_name"):
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
    hparams = owner.hparams
    if type(hparams).__module__.startswith("omegaconf"):
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = hparams
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    else:
        checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = {name: _plain(value) for name, value in hparams.items()}


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python number: a file that holds one is refused when it is loaded safely."""
    scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if scalar else value


def restore_model(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Loads weights, datamodule and callbacks.

    Order: the module's ``on_load_checkpoint``, its weights, the datamodule, then the callbacks.
    """
    module, datamodule = trainer.lightning_module, trainer.datamodule
    module.on_load_checkpoint(checkpoint)
    try:
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    except RuntimeError as error:
        raise RuntimeError(
            f"the checkpoint does not fit {type(module).__name__}, which must be built as it was when the file was "
            f"written; to leave out missing and unknown names, set its strict_loading = False\n{error}"
        ) from error
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])
    states = checkpoint.get(schema.CALLBACKS)
    if states is None:
        return
    stateful = {c.state_key for c in trainer.callbacks if is_overridden("state_dict", c, Callback)}
    if missing := sorted(map(str, set(states) - stateful)):
        rank_zero_warn(f"the checkpoint holds states of callbacks that this trainer has not: {', '.join(missing)}")
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    for callback in trainer.callbacks:
        if state := states.get(callback.state_key):
            callback.load_state_dict(copy.deepcopy(state))


def restore_training_state(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> None:
    """Loads precision, loop position and, when fitting, optimizers and schedulers."""
    precision = trainer.precision_plugin
    if (state := checkpoint.get(type(precision).__qualname__)) is not None:
        precision.load_state_dict(state)
    if trainer.state.fn is not TrainerFn.FITTING:
        return
    schema.require_training_state(checkpoint, path)
    _restore_position(trainer, checkpoint)
    if trainer.strategy.lightning_restore_optimizer:
        trainer.strategy.load_optimizer_state_dict(checkpoint)
    states, configs = checkpoint[schema.LR_SCHEDULERS], trainer.lr_scheduler_configs
    if len(states) != len(configs):
        raise MisconfigurationException(
            f"the checkpoint {path!r} holds {len(states)} learning-rate schedulers, configure_optimizers returned "
            f"{len(configs)}: return the schedulers the run was started with, or load the weights only, by "
            "load_from_checkpoint"
        )
    for config, state in zip(configs, states, strict=True):
        config.scheduler.load_state_dict(state)


def _restore_position(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    loops = checkpoint.get(schema.LOOPS) or {}
    position = schema.position_from_loops(loops, checkpoint.get(schema.EPOCH, 0), checkpoint.get(schema.GLOBAL_STEP, 0))
    progress = trainer.progress
    progress.epoch = progress.epochs_processed = progress.epochs_started = position.epoch
    progress.batch = position.batch or position.previous_batches
    progress.batch_ready = progress.batch
    progress.global_step = position.global_step
    progress.batches_that_stepped = position.batches_that_stepped
    progress.batches_before = position.total_batches - progress.batch
    progress.is_last_batch = position.is_last_batch
    progress.val_done = position.val_done
    progress.step_uncounted = False
    progress.batch_stepped = position.stepped
    if position.batch:
        progress.epochs_started += 1
    metrics = loops.get("fit_loop", {}).get("state_dict", {}).get(_METRICS, {})
    trainer.fit_loop.resume(schema.loader_states(loops), metrics, position.in_epoch_end)
    max_epochs = trainer.max_epochs
    if max_epochs not in (None, -1) and position.epoch > max_epochs:  # pyright: ignore[reportOperatorIssue]
        raise MisconfigurationException(
            f"the checkpoint is from epoch {position.epoch}, past Trainer(max_epochs={max_epochs}): raise max_epochs"
        )


def load(trainer: Trainer, path: str, weights_only: bool | None) -> dict[str, Any]:
    """Reads a checkpoint, checks that it is one, and brings old forms up to date."""
    rank_zero_info(f"reading the checkpoint {path}")
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=weights_only)
    return schema.migrate(schema.check(checkpoint, path))
