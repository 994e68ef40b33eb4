"""`UserCallback`: code of the user's that runs in the driver, on every report and on failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.train.artifacts import Checkpoint
from leyden.train.config import RunConfig, ScalingConfig
from leyden.train.storage import Storage

__all__ = ["CallbackObserver", "TrainRunContext", "UserCallback"]


@dataclass(frozen=True)
class TrainRunContext:
    """What a callback may want to know of its run.

    Attributes:
        run_config: As given to the trainer, with the name of the run.
        scaling_config: As given to the trainer.
        train_loop_config: As given to the trainer.
    """

    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Mapping[str, Any] | None

    def get_run_config(self) -> RunConfig:
        """The same as ``run_config``."""
        return self.run_config


class UserCallback:
    """Subclass it and pass objects in ``RunConfig(callbacks=[...])``. An exception of a callback ends the run."""

    def after_report(
        self, run_context: TrainRunContext, metrics: list[Mapping[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """All ranks have made a report.

        Args:
            run_context: The run.
            metrics: Of every rank, by rank; ``{}`` for a rank that made no report of this number.
            checkpoint: The committed checkpoint of the report, if it has one.
        """

    def after_exception(self, run_context: TrainRunContext, worker_exceptions: Mapping[int, Exception]) -> None:
        """Ranks have failed; whether the run goes on is decided after it.

        Args:
            run_context: The run.
            worker_exceptions: Rank -> what it failed with, the first failure first.
        """


class CallbackObserver:
    """Passes on to all callbacks what the controller tells.

    Args:
        callbacks: Of the user.
        context: For their first argument.
        storage: Of the run.
    """

    def __init__(self, callbacks: Sequence[Any], context: TrainRunContext, storage: Storage) -> None:
        self._callbacks = callbacks
        self._context = context
        self._storage = storage
        self.wants_rounds = any(type(each).after_report is not UserCallback.after_report for each in callbacks)

    def after_report(self, metrics: Sequence[Mapping[str, Any]], folder: str | None) -> None:
        checkpoint = None
        if folder is not None:
            checkpoint = Checkpoint(self._storage.url_of(folder), storage_options=self._storage.options)
        for each in self._callbacks:
            each.after_report(self._context, list(metrics), checkpoint)

    def after_exception(self, exceptions: Mapping[int, Exception]) -> None:
        for each in self._callbacks:
            each.after_exception(self._context, dict(exceptions))
