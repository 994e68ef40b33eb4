"""What the controller talks to besides its workers: the time, the run folder, and those who look on."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from leyden.train.messages import Metrics
from leyden.train.records import Record

__all__ = ["Clock", "Journal", "Observer"]


@dataclass(frozen=True)
class Clock:
    """The time, for the controller; a simulated group brings its own."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Journal(Protocol):
    """The run folder, as the controller uses it."""

    def latest(self) -> Record | None:
        """The last committed checkpoint."""
        ...

    def next_attempt(self) -> int:
        """One more than the highest attempt on record; 0 for a run that never started."""
        ...

    def event(self, name: str, **fields: Any) -> None: ...

    def metrics(self, message: Metrics) -> None: ...

    def commit(self, record: Record) -> None:
        """Makes the checkpoint whole and known; returns when a crash can't undo it."""
        ...

    def sweep(self) -> object:
        """Removes what unfinished uploads left; no rank runs."""
        ...

    def status(self, status: str) -> None:
        """ "running", "finished", "errored" or "aborted"."""
        ...


class Observer(Protocol):
    """Who is told of reports and failures as they come: the user's callbacks, a progress line."""

    wants_rounds: bool  # whether ``after_report`` does anything

    def after_report(self, metrics: Sequence[Mapping[str, Any]], folder: str | None) -> None: ...

    def after_exception(self, exceptions: Mapping[int, Exception]) -> None: ...
