"""From the metric views to the loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from leyden.base.tree import to_scalars

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["emit"]


def emit(trainer: Trainer, metrics: dict[str, Tensor], step: int | None = None) -> None:
    """Sends one dictionary to all loggers; the only place where logged values leave their device.

    Args:
        trainer: Whose loggers, epoch and step axis are used.
        metrics: Name to 0-d tensor; nothing is sent when empty.
        step: The x-axis value. None: a metric named "step" if there is one, else the number of batches that ended in
            an optimizer step.
    """
    if not metrics or not trainer.loggers:
        return
    scalars = to_scalars(metrics)
    if step is None:
        chosen = scalars.pop("step", None)
        if chosen is not None:
            step = int(chosen)
        else:
            scalars.setdefault("epoch", trainer.current_epoch)
            step = trainer.progress.batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(metrics=scalars, step=step)
        logger.save()
