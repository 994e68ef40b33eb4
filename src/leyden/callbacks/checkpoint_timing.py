"""When a checkpoint is due: a clock that all ranks agree on, and whether validation is about to run."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["SharedClock", "validation_follows"]


class SharedClock:
    """Tells after which batch an interval has passed; by rank 0's clock, the same on all ranks.

    Asking rank 0 costs a broadcast. So the answer says as well for how many batches there is no need to ask again:
    for half of the time that remains, at the pace so far. An interval of a thousand batches takes some ten questions.

    Args:
        interval_s: Seconds between two times that it is due; 0 means after each batch.
        strategy: Has ``world_size``, ``is_global_zero`` and ``broadcast(obj)``.
        now: A monotonic clock, in seconds.
    """

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
        due, self._batches = self._strategy.broadcast((due, max(1, int(remaining / per_batch / 2))))
        self._wait = self._batches
        self._asked_at = now
        if due:
            self._since = now
        return due


def validation_follows(trainer: "Trainer", batch_idx: int) -> bool:
    """Whether validation runs right after the training batch that just ended.

    Validation by time (``val_check_interval="00:15:00"``) can't be foreseen: the answer is then no.
    """
    if not trainer.enable_validation or sum(trainer.num_val_batches) == 0:
        return False
    every_n_epoch = trainer.check_val_every_n_epoch
    if every_n_epoch is not None and (trainer.current_epoch + 1) % every_n_epoch != 0:
        return False
    every_n_batches = trainer.val_check_batch
    if every_n_batches is None:
        return False
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if every_n_batches == math.inf:  # the loader has no length: at its end, or at its limit
        limit = trainer.limit_train_batches
        return progress.is_last_batch or (isinstance(limit, int) and (batch_idx + 1) % limit == 0)
    index = progress.total.ready - 1 if every_n_epoch is None else batch_idx
    return (index + 1) % every_n_batches == 0
