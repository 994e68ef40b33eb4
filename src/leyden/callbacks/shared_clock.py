"""A clock that all ranks agree on."""

from collections.abc import Callable
from typing import Any

__all__ = ["SharedClock"]


class SharedClock:
    """Tells after which batch an interval has passed; by rank 0's clock, the same on all ranks.

    To ask rank 0, all ranks must stop at the same batch, so they do not ask at every one: rank 0 says, with each
    answer, after how many batches to ask again. That is at most a second later at the pace so far, at most twice as
    many as before, and at most 64: a pace is no promise, and batches may become much slower. The interval may last
    longer by that.

    Args:
        interval_s: Seconds between two times that it is due; 0 means after each batch.
        strategy: Has ``world_size`` and ``broadcast(obj)``.
        now: A monotonic clock, in seconds.
    """

    SECONDS_BETWEEN_ANSWERS = 1.0
    MOST_BATCHES_BETWEEN_ANSWERS = 64

    __slots__ = ("_asked_at", "_batches", "_interval_s", "_now", "_since", "_strategy", "_wait")

    def __init__(self, interval_s: float, strategy: Any, now: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._strategy = strategy if strategy.world_size > 1 else None
        self._now = now
        self._since = self._asked_at = now()
        self._wait = self._batches = 1

    def due(self) -> bool:
        """To be called after each batch, on all ranks; True once per interval."""
        if self._strategy is None:
            now = self._now()
            if now - self._since < self._interval_s:
                return False
            self._since = now
            return True
        self._wait -= 1
        return self._wait <= 0 and self._ask()

    def _ask(self) -> bool:
        assert self._strategy is not None
        now = self._now()
        elapsed = now - self._since
        due = elapsed >= self._interval_s
        remaining = self._interval_s if due else self._interval_s - elapsed
        per_batch = max((now - self._asked_at) / self._batches, 1e-6)
        wanted = int(min(remaining, self.SECONDS_BETWEEN_ANSWERS) / per_batch)
        wanted = max(1, min(wanted, 2 * self._batches, self.MOST_BATCHES_BETWEEN_ANSWERS))
        due, self._batches = self._strategy.broadcast((due, wanted))
        self._wait = self._batches
        self._asked_at = now
        if due:
            self._since = now
        return due
