"""When a checkpoint is due: whether validation is about to run."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["validation_follows"]


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
