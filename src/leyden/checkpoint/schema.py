"""The dictionary in a checkpoint: its keys, and where in the training a run continues from it.

Leyden keeps one small `Position`; Lightning keeps some forty counters under ``loops``. Both are written, so that a
file goes either way: Lightning's counters are made from the position, and a file without a position has one worked
out from its counters.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from leyden.base.errors import CheckpointError
from leyden.base.log import rank_zero_warn

__all__ = [
    "CALLBACKS",
    "EPOCH",
    "GLOBAL_STEP",
    "HPARAMS",
    "HPARAMS_NAME",
    "LOOPS",
    "LR_SCHEDULERS",
    "OPTIMIZER_STATES",
    "STATE_DICT",
    "VERSION",
    "WRITTEN_VERSION",
    "Position",
    "check",
    "loader_states",
    "loops_from_position",
    "migrate",
    "position_from_loops",
    "require_training_state",
]

EPOCH = "epoch"
GLOBAL_STEP = "global_step"
VERSION = "pytorch-lightning_version"
STATE_DICT = "state_dict"
LOOPS = "loops"
CALLBACKS = "callbacks"
OPTIMIZER_STATES = "optimizer_states"
LR_SCHEDULERS = "lr_schedulers"
HPARAMS = "hyper_parameters"
HPARAMS_NAME = "hparams_name"

WRITTEN_VERSION = "2.6.6"
"""The Lightning release whose layout is written; under `VERSION`, so that Lightning knows how to read the file."""

_POSITION = "leyden_position"
_LOADERS = "combined_loader"
_AUTOMATIC = "epoch_loop.automatic_optimization"
_MANUAL = "epoch_loop.manual_optimization"

Counters = dict[str, int]
Loops = dict[str, Any]


@dataclass(slots=True)
class Position:
    """Where a run stands; with it a run continues at the next batch, validation or epoch that has not been run.

    Attributes:
        epoch: The epoch to go on with, from 0. Between epochs: the next one.
        batch: How many batches of that epoch are trained.
        global_step: Optimizer steps so far, over all optimizers.
        batches_that_stepped: Batches so far that ended in an optimizer step, the last trained one included: the x-axis
            of loggers.
        total_batches: Batches trained so far, over all epochs.
        val_done: A validation has run to its end since batch ``batch`` of this epoch was trained. If it has not, and
            one is due there, it is still to be run.
        in_epoch_end: The end-of-epoch hooks of epoch ``epoch - 1`` are running, and ``current_epoch`` is still
            ``epoch - 1``.
        is_last_batch: The batch trained last was the last one of its epoch.
        manual: The module optimizes by itself.
        stepped: The batch trained last ended in an optimizer step (it did not just accumulate).
        previous_batches: When ``batch`` is 0: how many batches the epoch before was trained for; else 0.
    """

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    batches_that_stepped: int = 0
    total_batches: int = 0
    val_done: bool = False
    in_epoch_end: bool = False
    is_last_batch: bool = False
    manual: bool = False
    stepped: bool = True
    previous_batches: int = 0

    @property
    def current_epoch(self) -> int:
        """What ``trainer.current_epoch`` is at this position: the ``epoch`` key of the file."""
        return self.epoch - self.in_epoch_end

    @property
    def cut(self) -> bool:
        """The epoch before was ended early (``max_steps``, ``should_stop``), after ``previous_batches`` batches."""
        return self.batch == 0 and self.previous_batches > 0 and not self.is_last_batch


def _counters(ready: int, started: int, processed: int, completed: int) -> Counters:
    return {"ready": ready, "completed": completed, "started": started, "processed": processed}


def _even(count: int, started: bool = False) -> Counters:
    """The counters of something that is between two events."""
    counters = {"ready": count, "completed": count}
    return {**counters, "started": count} if started else counters


def _evaluation(done: bool = False, flagged: bool = True) -> Loops:
    # Of how many batches a validation had, Lightning only looks at whether they were all run: one stands for all.
    batches = int(done)
    progress: Loops = {name: _counters(batches, batches, batches, batches) for name in ("total", "current")}
    return {**progress, "is_last_batch": done} if flagged else progress


def _epoch_progress(position: Position) -> Loops:
    done = position.epoch
    if position.in_epoch_end:
        counters = _counters(done, done, done, done - 1)
    elif position.batch:
        counters = _counters(done + 1, done + 1, done, done)
    else:
        counters = _counters(done, done, done, done)
    return {"total": dict(counters), "current": counters}


def _batch_progress(position: Position) -> Loops:
    total = position.total_batches
    # Lightning tells a file written in `on_train_batch_end` from one written later by `completed` lagging behind.
    lag = 1 if position.batch and not position.val_done else 0
    if position.in_epoch_end:
        current, last = position.previous_batches, position.is_last_batch
    else:
        # Between epochs Lightning itself leaves the last epoch's counts here. Where `max_steps` is set it then takes
        # the next epoch for one that is already done, and skips it; with zeros it trains it.
        current, last = position.batch, bool(position.batch) and position.is_last_batch
    return {
        "total": _counters(total, total, total, total - lag),
        "current": _counters(current, current, current, current - lag),
        "is_last_batch": last,
    }


def _optimizer_progress(position: Position) -> Loops:
    steps = 0 if position.manual else position.global_step
    return {
        "optimizer": {
            "step": {"total": _even(steps), "current": _even(0)},
            "zero_grad": {"total": _even(steps, started=True), "current": _even(0, started=True)},
        }
    }


def loops_from_position(position: Position, combined_loader: list[dict[str, Any]] | None = None) -> Loops:
    """The ``loops`` entry of a checkpoint, in Lightning 2.6's structure.

    Lightning resumes from it in ``fit``, ``validate``, ``test`` and ``predict``. The position itself is in it as well,
    where Lightning does not look.

    Args:
        position: Where the run stands.
        combined_loader: States of the train loaders that have a ``state_dict``, in order.
    """
    # Lightning counts the step of the batch in hand only when everything that follows the batch has run, and adds it
    # by itself when it resumes from such a file.
    pending = position.batch > 0 and position.stepped
    steps = position.global_step if position.manual else 0
    return {
        "fit_loop": {
            "state_dict": {_POSITION: asdict(position), **({_LOADERS: combined_loader} if combined_loader else {})},
            "epoch_loop.state_dict": {"_batches_that_stepped": max(0, position.batches_that_stepped - pending)},
            "epoch_loop.batch_progress": _batch_progress(position),
            "epoch_loop.scheduler_progress": {"total": _even(0), "current": _even(0)},
            f"{_AUTOMATIC}.state_dict": {},
            f"{_AUTOMATIC}.optim_progress": _optimizer_progress(position),
            f"{_MANUAL}.state_dict": {},
            f"{_MANUAL}.optim_step_progress": {"total": _even(steps), "current": _even(0)},
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": _evaluation(done=position.val_done),
            "epoch_progress": _epoch_progress(position),
        },
        "validate_loop": {"state_dict": {}, "batch_progress": _evaluation()},
        "test_loop": {"state_dict": {}, "batch_progress": _evaluation()},
        "predict_loop": {"state_dict": {}, "batch_progress": _evaluation(flagged=False)},
    }


def loader_states(loops: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of the train loaders that `loops_from_position`, or Lightning, put into ``loops``."""
    return loops.get("fit_loop", {}).get("state_dict", {}).get(_LOADERS, [])


def position_from_loops(loops: Mapping[str, Any], epoch: int = 0, global_step: int = 0) -> Position:
    """Where to go on from a file, written by Leyden or by Lightning in any of its hooks.

    Args:
        loops: The file's ``loops`` entry; ``{}`` when it has none.
        epoch: The file's ``epoch`` key; used only when the counters are missing.
        global_step: The file's ``global_step`` key; used only when the counters are missing.

    Raises:
        CheckpointError: If the counters are there but make no sense.
    """
    fit = loops.get("fit_loop") or {}
    own = (fit.get("state_dict") or {}).get(_POSITION)
    try:
        if own is not None:
            return _checked(Position(**{each.name: own[each.name] for each in fields(Position) if each.name in own}))
        if "epoch_progress" not in fit or "epoch_loop.batch_progress" not in fit:
            return Position(epoch=epoch, global_step=global_step, batches_that_stepped=global_step)
        return _checked(_from_counters(fit))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's `loops` can't be understood ({type(error).__name__}: {error}); to go on from its "
            "weights only, load them with `load_from_checkpoint` and call `fit` without ckpt_path"
        ) from error


def _checked(position: Position) -> Position:
    wrong = [each.name for each in fields(position) if int(getattr(position, each.name)) < 0]
    if wrong:
        raise CheckpointError(f"the checkpoint's position has negative {', '.join(wrong)}: {position}")
    return position


def _from_counters(fit: Mapping[str, Any]) -> Position:
    epochs: Counters = fit["epoch_progress"]["current"]
    batches: Counters = fit["epoch_loop.batch_progress"]["current"]
    total: int = fit["epoch_loop.batch_progress"]["total"]["processed"]
    automatic_steps: int = fit[f"{_AUTOMATIC}.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    manual_steps: int = fit[f"{_MANUAL}.optim_step_progress"]["total"]["completed"]
    manual = manual_steps > 0 and automatic_steps == 0
    steps = manual_steps if manual else automatic_steps
    # In a file from inside an epoch the batch in hand isn't counted yet; but then the optimizer has counted it.
    counted = max(fit["epoch_loop.state_dict"].get("_batches_that_stepped", 0), total if manual else steps)
    position = Position(
        epoch=epochs["processed"],
        global_step=steps,
        batches_that_stepped=counted,
        total_batches=total,
        manual=manual,
    )
    trained: int = batches["processed"]
    next_begun = batches["ready"] > trained
    position.is_last_batch = bool(fit["epoch_loop.batch_progress"]["is_last_batch"]) and not next_begun
    inside = epochs["started"] > epochs["processed"]
    if not inside:
        position.in_epoch_end = epochs["completed"] < epochs["processed"]
        position.previous_batches = trained
        return position
    position.batch = trained
    position.val_done = trained > 0 and batches["completed"] == trained and _validated(fit)
    # Not stored by itself. With the batch in hand uncounted, it stepped if the optimizer is ahead of the count.
    stored = fit["epoch_loop.state_dict"].get("_batches_that_stepped", 0)
    position.stepped = next_begun or stored < counted
    return position


def _validated(fit: Mapping[str, Any]) -> bool:
    """Whether a validation was run in this epoch, and the last one to its end."""
    progress = fit.get("epoch_loop.val_loop.batch_progress")
    if progress is None or not progress["total"]["ready"]:
        return False
    current: Counters = progress["current"]
    return bool(progress["is_last_batch"]) and current["ready"] == current["completed"]


def check(checkpoint: Any, path: str = "") -> dict[str, Any]:
    """Says clearly what is wrong with something that was loaded as a checkpoint; returns it when nothing is.

    Raises:
        CheckpointError: If it isn't a dictionary with a ``state_dict``.
    """
    named = f"checkpoint {path!r}" if path else "the checkpoint"
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{named} holds a {type(checkpoint).__name__}, not a dictionary: not a checkpoint file")
    if STATE_DICT not in checkpoint:
        held = ", ".join(map(repr, list(checkpoint)[:8])) or "nothing"
        raise CheckpointError(
            f"{named} has no {STATE_DICT!r} (it holds {held}): a checkpoint of a Trainer has one; bare weights are "
            "loaded with `module.load_state_dict(torch.load(path))`"
        )
    _warn_if_newer(checkpoint.get(VERSION), named)
    return checkpoint


def _warn_if_newer(version: Any, named: str) -> None:
    if isinstance(version, str) and (match := re.match(r"(\d+)\.(\d+)", version)):
        known = tuple(int(part) for part in WRITTEN_VERSION.split(".")[:2])
        if (int(match[1]), int(match[2])) > known:
            rank_zero_warn(
                f"{named} was written by Lightning {version}, newer than the {WRITTEN_VERSION} whose layout this "
                "version knows; what was added since is ignored"
            )


def require_training_state(checkpoint: Mapping[str, Any], path: str = "") -> None:
    """Refuses a weights-only checkpoint where a training is to be continued.

    Raises:
        CheckpointError: Naming what is missing, and how to use the weights alone.
    """
    missing = [key for key in (OPTIMIZER_STATES, LR_SCHEDULERS) if key not in checkpoint]
    if missing:
        named = f"checkpoint {path!r}" if path else "the checkpoint"
        raise CheckpointError(
            f"{named} has no {' and no '.join(missing)}: it was saved with `save_weights_only=True`, so a training "
            "can't go on from it; to start a new one from its weights, use "
            "`Model.load_from_checkpoint(path)` and call `fit` without ckpt_path"
        )


_OLD_LOOP_KEYS = {
    "epoch_loop.batch_loop.optimizer_loop.optim_progress": f"{_AUTOMATIC}.optim_progress",
    "epoch_loop.batch_loop.optimizer_loop.state_dict": f"{_AUTOMATIC}.state_dict",
    "epoch_loop.batch_loop.manual_loop.optim_step_progress": f"{_MANUAL}.optim_step_progress",
    "epoch_loop.batch_loop.manual_loop.state_dict": f"{_MANUAL}.state_dict",
    "epoch_loop.optimizer_loop.optim_progress": f"{_AUTOMATIC}.optim_progress",
    "epoch_loop.optimizer_loop.state_dict": f"{_AUTOMATIC}.state_dict",
    "epoch_loop.manual_loop.optim_step_progress": f"{_MANUAL}.optim_step_progress",
    "epoch_loop.manual_loop.state_dict": f"{_MANUAL}.state_dict",
    "epoch_loop.val_loop.epoch_loop.batch_progress": "epoch_loop.val_loop.batch_progress",
}
_OLD_HPARAMS_KEYS = ("hparams", "module_arguments")
_OLD_TRIGGER = re.compile(r", 'save_on_train_epoch_end': (None|True|False)")


def migrate(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Renames, in place, what files of Lightning before 2.0 call otherwise; returns ``checkpoint``."""
    fit = (checkpoint.get(LOOPS) or {}).get("fit_loop")
    if fit:
        for old, new in _OLD_LOOP_KEYS.items():
            if old in fit:
                fit.setdefault(new, fit.pop(old))
    if "native_amp_scaling_state" in checkpoint:
        checkpoint.setdefault("MixedPrecision", checkpoint.pop("native_amp_scaling_state"))
    for old in _OLD_HPARAMS_KEYS:
        if old in checkpoint and HPARAMS not in checkpoint:
            checkpoint[HPARAMS] = checkpoint.pop(old)
    callbacks = checkpoint.get(CALLBACKS)
    if callbacks:
        renamed = {
            _OLD_TRIGGER.sub("", key) if isinstance(key, str) and key.startswith("ModelCheckpoint") else key: state
            for key, state in callbacks.items()
        }
        if len(renamed) == len(callbacks):  # else two old callbacks would get one state; neither gets any
            checkpoint[CALLBACKS] = renamed
    return checkpoint
