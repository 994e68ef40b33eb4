"""What a trainer adds by itself: loggers, callbacks, a profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.base.errors import MisconfigurationException
from leyden.core.callback import Callback, Checkpoint
from leyden.core.hooks import is_overridden
from leyden.dist.worker import current
from leyden.trainer.run import order_callbacks
from leyden.trainer.worker_report import WorkerReport, WorkerSigns

if TYPE_CHECKING:
    from leyden.trainer.spec import TrainerSpec

__all__ = ["default_callbacks", "default_loggers", "make_profiler"]


def default_loggers(spec: TrainerSpec) -> list[Any]:
    """The user's loggers; TensorBoard where they left it open; a dummy for each in a development run."""
    if spec.logger == "default":
        if spec.fast_dev_run:
            return _dummies(1)
        from leyden.dist.schedulers import SLURMEnvironment
        from leyden.loggers.tensorboard import TensorBoardLogger

        worker = current()
        # A restart of the workers goes on in the folder of the run, where its checkpoints are.
        version = SLURMEnvironment.job_id() if worker is None else worker.run_name or None
        return [TensorBoardLogger(spec.default_root_dir, version=version)]
    loggers = list(spec.logger)
    return _dummies(len(loggers)) if spec.fast_dev_run and loggers else loggers


def _dummies(count: int) -> list[Any]:
    from leyden.loggers.base import DummyLogger

    return [DummyLogger() for _ in range(count)]


def default_callbacks(spec: TrainerSpec) -> list[Callback]:
    """The user's callbacks and those that the ``enable_*`` switches stand for, in the order they are called.

    Raises:
        RuntimeError: Two callbacks would save their state under one key.
    """
    callbacks = list(spec.callbacks)
    if spec.enable_checkpointing and not any(isinstance(c, Checkpoint) for c in callbacks):
        from leyden.callbacks.checkpoint import ModelCheckpoint

        callbacks.append(ModelCheckpoint())
    if spec.max_time is not None and not any(getattr(c, "limits_time", False) for c in callbacks):
        from leyden.callbacks.small import Timer

        callbacks.append(Timer(duration=spec.max_time, interval="step"))
    if spec.enable_progress_bar:
        from leyden.callbacks.progress_bar import ProgressBar
        from leyden.callbacks.progress_rich import RichProgressBar

        if not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RichProgressBar())
    if spec.enable_model_summary:
        from leyden.callbacks.summary import ModelSummary, RichModelSummary

        if not any(isinstance(c, ModelSummary) for c in callbacks):
            callbacks.append(RichModelSummary())
    if current() is not None and not spec.barebones:
        callbacks.append(WorkerSigns())
        if not _reports_by_script(spec):
            callbacks.append(WorkerReport())
    _check_state_keys(callbacks)
    return order_callbacks(callbacks)


def _reports_by_script(spec: TrainerSpec) -> bool:
    """Whether the script was written for Ray Train, and so says itself what is reported and when."""
    parts = (*spec.callbacks, spec.strategy, spec.cluster_environment)
    return any(getattr(part, "reports_by_script", False) for part in parts)


def _check_state_keys(callbacks: list[Callback]) -> None:
    seen: set[str] = set()
    for callback in callbacks:
        if is_overridden("state_dict", callback, Callback):
            if callback.state_key in seen:
                raise RuntimeError(
                    f"two callbacks {type(callback).__name__} would save their state under the same key "
                    f"{callback.state_key!r}: give them different arguments, or override `state_key` in your class"
                )
            seen.add(callback.state_key)


def make_profiler(spec: TrainerSpec) -> Any:
    """The profiler that a name stands for; one that does nothing where none was asked for."""
    from leyden import profilers

    if spec.profiler is None:
        return profilers.PassThroughProfiler()  # so that `with self.trainer.profiler.profile(...)` always works
    if not isinstance(spec.profiler, str):
        return spec.profiler

    known = {
        "simple": profilers.SimpleProfiler,
        "advanced": profilers.AdvancedProfiler,
        "pytorch": profilers.PyTorchProfiler,
    }
    if spec.profiler not in known:
        raise MisconfigurationException(f"profiler={spec.profiler!r} is unknown; use one of {sorted(known)}")
    return known[spec.profiler]()
