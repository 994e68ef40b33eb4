"""Callbacks that log what is not a metric of the model: learning rates."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn
from leyden.core.callback import Callback

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["LearningRateMonitor"]


@dataclass(slots=True)
class _Watched:
    """An optimizer, the interval at which its scheduler steps (None: it has none), and a name per parameter group."""

    optimizer: Optimizer
    interval: str | None
    names: list[str]


class LearningRateMonitor(Callback):
    """Logs the learning rates of all optimizers, and on request momentum and weight decay.

    A rate is named after its scheduler's ``"name"``, else ``lr-`` and the optimizer's class: ``lr-Adam``, a second
    one ``lr-Adam-1``, the groups of one with several ``lr-Adam/pg1`` or ``lr-Adam/NAME`` for a group with a
    ``"name"``. It is also in ``trainer.callback_metrics``, so that other callbacks can monitor it.

    Args:
        logging_interval: ``"step"``: at each logged step; ``"epoch"``: at the start of each epoch; None: at the
            interval of each scheduler, and both for an optimizer without one.
        log_momentum: Whether to log momentum (the first of the betas) as ``NAME-momentum``.
        log_weight_decay: Whether to log weight decay as ``NAME-weight_decay``.
        log_key_prefix: Put before each name, as it is.

    Attributes:
        lrs: Name -> all values logged.
        last_momentum_values: Name -> the last value.
        last_weight_decay_values: Name -> the last value.

    Raises:
        MisconfigurationException: For another ``logging_interval``, for a trainer without a logger, or for parameter
            groups of one optimizer that share a name.

    Example:
        ``Trainer(callbacks=LearningRateMonitor("step"))``
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationException(
                f"LearningRateMonitor(logging_interval={logging_interval!r}) must be 'step', 'epoch' or None"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, Any] = {}
        self.last_weight_decay_values: dict[str, Any] = {}
        self._watched: list[_Watched] = []
        self._groups: list[int] = []

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Gives every rate its name."""
        if not trainer.loggers:
            raise MisconfigurationException(
                "LearningRateMonitor needs a logger, and the Trainer has logger=False: pass one, or remove the callback"
            )
        self._name_all(trainer)
        if self.log_momentum and any(
            "momentum" not in watched.optimizer.defaults and "betas" not in watched.optimizer.defaults
            for watched in self._watched
        ):
            rank_zero_warn(
                "LearningRateMonitor(log_momentum=True): an optimizer has neither momentum nor betas;"
                " its momentum is logged as 0",
                category=RuntimeWarning,
            )
        names = [name for watched in self._watched for name in watched.names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Logs the rates that this step is trained with, if a logger is due."""
        if self.logging_interval != "epoch" and trainer.should_update_logs:
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Logs the rates that this epoch starts with."""
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: "Trainer", interval: str) -> None:
        if self._groups != [len(watched.optimizer.param_groups) for watched in self._watched]:
            self._name_all(trainer)  # a group was added while training, as in fine-tuning
        values: dict[str, float] = {}
        for watched in self._watched:
            if self.logging_interval is None and watched.interval not in (interval, None):
                continue
            for name, group in zip(watched.names, watched.optimizer.param_groups, strict=True):
                values.update(self._values(name, group))
        if not values:
            return
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        # On the CPU, where they come from: a copy to a device would make the host wait for it.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def _values(self, name: str, group: dict[str, Any]) -> Iterator[tuple[str, float]]:
        rate = float(group["lr"])
        self.lrs.setdefault(name, []).append(rate)
        yield name, rate
        if self.log_momentum:
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
            self.last_momentum_values[f"{name}-momentum"] = momentum
            yield f"{name}-momentum", momentum
        if self.log_weight_decay:
            decay = group.get("weight_decay", 0)
            self.last_weight_decay_values[f"{name}-weight_decay"] = decay
            yield f"{name}-weight_decay", decay

    def _name_all(self, trainer: "Trainer") -> None:
        """Names in order: optimizers with a scheduler, in the order of schedulers, then the others."""
        seen: Counter[type[Optimizer]] = Counter()
        watched: list[_Watched] = []
        for config in trainer.lr_scheduler_configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            if optimizer is None:  # a scheduler of another kind; its optimizer is among those below
                continue
            names = _names(optimizer, config.name, seen)
            watched.append(_Watched(optimizer, config.interval, names))
        scheduled = {id(one.optimizer) for one in watched}
        for optimizer in trainer.optimizers:
            optimizer = getattr(optimizer, "optimizer", optimizer)  # one that wraps torch's
            if id(optimizer) not in scheduled:
                watched.append(_Watched(optimizer, None, _names(optimizer, None, seen)))
        for one in watched:
            one.names = [self.log_key_prefix + name for name in one.names]
            # What was the only group of its optimizer is now the first of several.
            for name in one.names:
                before = name.removesuffix("/pg1")
                if before != name and before in self.lrs and name not in self.lrs:
                    self.lrs[name] = self.lrs.pop(before)
        self._watched = watched
        self._groups = [len(one.optimizer.param_groups) for one in watched]


def _names(optimizer: Optimizer, given: str | None, seen: "Counter[type[Optimizer]]") -> list[str]:
    """One name per parameter group; ``seen`` counts the optimizers of each class that are named after it."""
    kind = type(optimizer)
    if given is None:
        seen[kind] += 1
    base = f"lr-{kind.__name__}" if given is None else given
    if seen[kind] > 1:
        base = f"{base}-{seen[kind] - 1}"
    groups = optimizer.param_groups
    parts = [group.get("name", f"pg{number}") for number, group in enumerate(groups, 1)]
    twice = {part for part in parts if parts.count(part) > 1}
    if twice:
        raise MisconfigurationException(
            f"two parameter groups of one {kind.__name__} are named {', '.join(map(repr, sorted(twice)))}:"
            " give each group another `name`, so that their learning rates can be told apart"
        )
    if len(groups) == 1 and not groups[0].get("name"):
        return [base]
    return [f"{base}/{part}" for part in parts]
