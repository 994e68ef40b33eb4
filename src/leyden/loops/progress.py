"""Where a run stands: the counters of the training loop, and their Lightning-shaped views."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Count", "CountView", "Progress"]


class Count(NamedTuple):
    """How often something was fetched, begun, run, and finished with all its hooks."""

    ready: int
    started: int
    processed: int
    completed: int


class CountView(NamedTuple):
    """Counts of the running epoch (or run) and of the whole fit."""

    current: Count
    total: Count
    is_last_batch: bool = False


@dataclass(slots=True)
class Progress:
    """The counters of one fit.

    Units: an *epoch* is a pass over the training data; a *batch* is one `training_step`; a *step* is one update by an
    optimizer. With accumulation several batches make one step; with two optimizers one batch may make two.
    """

    epoch: int = 0  # finished epochs, end hooks included: `trainer.current_epoch`
    epochs_started: int = 0
    epochs_processed: int = 0  # epochs whose batches are done; ahead of `epoch` while the end hooks run
    batch_ready: int = 0  # batches of the running epoch: fetched,
    batch: int = 0  # and trained
    batches_before: int = 0  # trained batches of all epochs before
    global_step: int = 0  # updates, summed over optimizers: `trainer.global_step`
    batches_that_stepped: int = 0  # batches that ended in an update: the x-axis of loggers
    batch_stepped: bool = True  # the last trained batch made an update, it did not only accumulate
    step_uncounted: bool = False  # ... and `batches_that_stepped` lacks it as yet
    is_last_batch: bool = False
    val_done: bool = False  # the validation that was due after the last trained batch has run
    in_start_hooks: bool = False  # of the batch that is ready; stays when they ended the epoch
    in_end_hooks: bool = False  # of the batch that was trained

    @property
    def total_batches(self) -> int:
        """Trained batches of all epochs."""
        return self.batches_before + self.batch

    def start_epoch(self) -> None:
        self.epochs_started = self.epochs_processed + 1  # not += 1: a fit before may have failed inside its epoch
        self.batches_before += self.batch
        self.batch_ready = self.batch = 0
        self.val_done = self.in_start_hooks = False

    def batch_trained(self, update: bool) -> None:
        """A batch went through training_step; ``update``: an optimizer stepped after it."""
        self.batch += 1
        self.val_done = False
        self.batch_stepped = self.step_uncounted = update

    def count_step(self) -> None:
        """All that follows the batch's update has run: the x-axis of loggers moves on."""
        self.batches_that_stepped += 1
        self.step_uncounted = False

    def epoch_view(self) -> CountView:
        count = Count(self.epochs_started, self.epochs_started, self.epochs_processed, self.epoch)
        return CountView(count, count)

    def batch_view(self) -> CountView:
        started = self.batch_ready - self.in_start_hooks
        current = Count(self.batch_ready, started, self.batch, self.batch - self.in_end_hooks)
        return CountView(current, Count(*(self.batches_before + n for n in current)), self.is_last_batch)
