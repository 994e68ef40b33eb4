"""The methods of LightningModule by which values leave it: log, log_dict, print, all_gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.base.errors import MisconfigurationException
from leyden.base.log import warn_once
from leyden.base.tree import apply_to_collection, to_tensors

__all__ = ["LogMethods"]


class LogMethods:
    """What a module says: to loggers and bars, to the terminal, to the other ranks."""

    if TYPE_CHECKING:
        _trainer: Any
        trainer: Any
        device: Any

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Records a value, for the loggers, the progress bar, and whoever monitors it.

        Never waits for the device and never communicates.

        Args:
            name: The metric's name; ``{name}_step`` and ``{name}_epoch`` where both are on.
            value: A number, a tensor with one element, or a torchmetrics ``Metric`` that this module has as attribute.
            prog_bar: Show it in the progress bar.
            logger: Send it to the loggers. Default: True.
            on_step: Record this step's value. Default: by the hook, see below.
            on_epoch: Record the epoch's value, reduced over steps. Default: by the hook: in hooks of a training step,
                the step's value only; in evaluation and in hooks around epochs, the epoch's only.
            reduce_fx: How steps become an epoch's value: "mean" (weighted by batch size), "sum", "min", "max", or a
                function over the stacked values.
            enable_graph: Keep the autograd graph of the value.
            sync_dist: Reduce over all ranks.
            sync_dist_group: The ranks to reduce over. Default: all.
            add_dataloader_idx: With several evaluation loaders, add ``/dataloader_idx_N`` to the name.
            batch_size: The weight in a mean. Default: read from the batch.
            metric_attribute: Where a torchmetrics metric is found in this module. Default: looked up.
            rank_zero_only: The value exists on rank 0 only; it can't be monitored then.

        Raises:
            MisconfigurationException: Logging is not possible in the running hook, or not with these arguments.
            ValueError: ``value`` is none of the above.
        """
        trainer = self._trainer
        if trainer is None or trainer._metrics is None:
            return self._log_nowhere(name)
        return trainer._metrics.log(
            name,
            value,
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            sync_dist,
            sync_dist_group,
            add_dataloader_idx,
            batch_size,
            metric_attribute,
            rank_zero_only,
        )

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Records several values: `log` for each item of ``dictionary``, a mapping or a ``MetricCollection``."""
        trainer = self._trainer
        if trainer is None or trainer._metrics is None:
            return self._log_nowhere(", ".join(map(str, dictionary)))
        log = trainer._metrics.log
        for name, value in dictionary.items() if type(dictionary) is dict else _metric_items(dictionary):
            log(
                name,
                value,
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduce_fx,
                enable_graph,
                sync_dist,
                sync_dist_group,
                add_dataloader_idx,
                batch_size,
                None,
                rank_zero_only,
            )
        return None

    def _log_nowhere(self, name: str) -> None:
        """Explains why there is nothing to log to: an error only where the value would be missed."""
        if self._trainer is None:
            warn_once(
                f"`self.log({name!r}, ...)` did nothing: the module isn't attached to a trainer. "
                "That happens when a step is called by hand, or when the module inside a wrapper is called: "
                "log from the module that was passed to the Trainer.",
                key="log without trainer",
            )
        elif self._trainer.barebones:
            warn_once(
                f"`self.log({name!r}, ...)` does nothing under `Trainer(barebones=True)`.", key="log while barebones"
            )
        else:
            raise MisconfigurationException(
                f"`self.log({name!r}, ...)` where the trainer collects no metrics: outside of fit, validate and test, "
                "or in a hook of predict. Write to the logger itself, `self.logger.log_metrics({...})`."
            )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on rank 0 only, without breaking a progress bar. Arguments are those of ``print``."""
        trainer = self.trainer
        if trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            if bar is not None and getattr(bar, "is_enabled", True):  # a bar of the user's may lack it
                bar.print(*args, **kwargs)
            else:
                print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Collects ``data`` from all ranks; every rank must call it.

        Args:
            data: A tensor, or a nested container of tensors, numbers and arrays, alike on all ranks.
            group: The process group. Default: all ranks.
            sync_grads: Let gradients flow back to the rank that each part came from.

        Returns:
            The same structure; each tensor of shape ``(*)`` becomes ``(world_size, *)``, and stays ``(*)`` on one rank.
        """
        gather = self.trainer.strategy.all_gather
        data = to_tensors(data, self.device)
        return apply_to_collection(data, Tensor, gather, group=group, sync_grads=sync_grads)


def _metric_items(metrics: Any) -> Any:
    """Items of a mapping; of a torchmetrics ``MetricCollection`` with the names that it gives its results."""
    if hasattr(metrics, "compute_groups"):
        # Copies of shared states would be other objects than the metrics that this module has as attributes.
        return metrics.items(keep_base=False, copy_state=False)
    return metrics.items()
