"""What ``ckpt_path=`` means: "best", "last", "hpc", a path, a URL, or nothing."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from leyden.base import files
from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn
from leyden.base.states import TrainerFn
from leyden.callbacks.checkpoint import ModelCheckpoint
from leyden.callbacks.exception_checkpoint import OnExceptionCheckpoint
from leyden.dist.schedulers import SLURMEnvironment
from leyden.dist.worker import begin_fit
from leyden.trainer.worker_report import worker_checkpoint

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["hpc_save_path", "select_ckpt_path"]


def select_ckpt_path(trainer: Trainer, ckpt_path: Any, model_provided: bool) -> str | None:
    """Turns ``ckpt_path`` into a path or URL, or None where nothing is to be loaded.

    Args:
        trainer: Whose callbacks know the files.
        ckpt_path: As the user gave it.
        model_provided: Whether the user passed a model to this call; without one, the best checkpoint is meant.

    Raises:
        ValueError: The keyword names a file that doesn't exist.
        MisconfigurationException: A keyword that this version has not.
    """
    assert trainer.state.fn is not None
    method = trainer.state.fn.value
    on_exception = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]
    if trainer._ckpt_path_stays:
        if ckpt_path is None:
            ckpt_path = trainer.ckpt_path
        else:
            rank_zero_warn(
                f"trainer.{method}(ckpt_path={str(ckpt_path)!r}) takes the place of trainer.ckpt_path="
                f"{str(trainer.ckpt_path)!r}, which was set before and is forgotten"
            )
            trainer.ckpt_path = None
    if ckpt_path is None and SLURMEnvironment.detect() and _newest_hpc(trainer.default_root_dir):
        ckpt_path = "hpc"
    if trainer.state.fn is TrainerFn.FITTING:
        begin_fit()
        ckpt_path = worker_checkpoint() if ckpt_path is None else ckpt_path
    if ckpt_path is None and on_exception and trainer.state.fn is TrainerFn.FITTING:
        return _last(trainer, method, on_exception, asked_for=False)
    if ckpt_path is None:
        if model_provided:
            return None
        ckpt_path = "best"
        rank_zero_warn(
            f"trainer.{method}() without a model loads the best checkpoint of the last fit. Pass ckpt_path='best' to "
            "say so and silence this, ckpt_path='last' for the last, or the model itself for its present weights"
        )
    if ckpt_path == "best":
        return _best(trainer, method)
    if ckpt_path == "last":
        return _last(trainer, method, on_exception)
    if ckpt_path == "hpc":
        found = _newest_hpc(trainer.default_root_dir)
        if found is None:
            raise ValueError(
                f"trainer.{method}(ckpt_path='hpc'): there is no hpc_ckpt_*.ckpt in {trainer.default_root_dir!r}; "
                "pass the path of a checkpoint"
            )
        return found
    if str(ckpt_path).startswith("registry"):
        raise MisconfigurationException(
            f"trainer.{method}(ckpt_path={ckpt_path!r}): model registries are not supported; download the file and "
            "pass its path"
        )
    if not str(ckpt_path):
        raise ValueError(f"trainer.{method}(ckpt_path=''): pass the path of a checkpoint, 'best', 'last' or None")
    return str(ckpt_path)


def _best(trainer: Trainer, method: str) -> str:
    callbacks = trainer.checkpoint_callbacks
    if not callbacks:
        raise ValueError(
            f"trainer.{method}(ckpt_path='best'): there is no ModelCheckpoint; add one to Trainer(callbacks=...), or "
            "pass the path of a checkpoint"
        )
    if len(callbacks) > 1:
        rank_zero_warn(f"trainer.{method}(ckpt_path='best'): of {len(callbacks)} ModelCheckpoints the first decides")
    path = getattr(callbacks[0], "best_model_path", "")
    if not path:
        why = "fast_dev_run saves no checkpoint" if trainer.fast_dev_run else "it has not saved a best model"
        raise ValueError(
            f"trainer.{method}(ckpt_path='best'): {why}; run fit first, set its monitor and save_top_k, or pass the "
            "path of a checkpoint"
        )
    return path


def _last(
    trainer: Trainer, method: str, on_exception: list[OnExceptionCheckpoint], asked_for: bool = True
) -> str | None:
    candidates: set[str] = {c.ckpt_path for c in on_exception}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            candidates |= callback._find_last_checkpoints(trainer)
    newest = files.latest(*(path for path in candidates if path))
    if newest is None and asked_for:
        # No error: a script may always pass "last", also for its first run.
        rank_zero_warn(
            f"trainer.{method}(ckpt_path='last'): there is no last checkpoint, nothing is loaded. "
            "ModelCheckpoint(save_last=True) writes one"
        )
    return newest


def _hpc_files(folder: str) -> dict[int, str]:
    found = {}
    for name in files.list_dir(folder):
        match = re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", os.path.basename(name))
        if match:
            found[int(match.group(1))] = files.join(folder, match.group(0))
    return found


def _newest_hpc(folder: str) -> str | None:
    found = _hpc_files(folder)
    return found[max(found)] if found else None


def hpc_save_path(folder: str) -> str:
    """The next name for a checkpoint that is written before a job is queued again."""
    return files.join(folder, f"hpc_ckpt_{max(_hpc_files(folder), default=0) + 1}.ckpt")
