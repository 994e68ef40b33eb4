"""Stops training when a metric has stopped improving."""

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.base.errors import MisconfigurationException
from leyden.base.log import log, rank_zero_warn
from leyden.base.states import TrainerFn
from leyden.core.callback import Callback

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["EarlyStopping", "EarlyStoppingReason"]


class EarlyStoppingReason(Enum):
    """Why an `EarlyStopping` stopped the training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Watches a logged metric and stops training when it no longer improves.

    Every check compares the newest value with the best one so far. When a check is made: at the end of a training
    epoch, or after a validation if `check_on_train_epoch_end` is False. Training stops on all ranks if the check on
    any rank says so; ``min_epochs`` and ``min_steps`` are still reached.

    Args:
        monitor: Name of the metric in ``trainer.callback_metrics``.
        min_delta: A change of at most this size is no improvement.
        patience: Checks (not epochs) without improvement after which training stops. With
            ``check_val_every_n_epoch=10`` and ``patience=3`` that is 30 epochs after the best one.
        verbose: Whether improvements, the reason for stopping, and a missing metric are reported.
        mode: ``"min"``: lower is better; ``"max"``: higher is better.
        strict: Whether a missing metric is an error.
        check_finite: Whether NaN or an infinite value stops training.
        stopping_threshold: A value better than this stops training: good enough.
        divergence_threshold: A value worse than this stops training: beyond hope.
        check_on_train_epoch_end: None: True if one validation runs at the end of every epoch, else False.
        log_rank_zero_only: Whether only rank 0 reports.

    Attributes:
        wait_count: Checks without improvement so far.
        stopped_epoch: The epoch in which training was stopped; 0 if it wasn't.
        best_score: The best value so far, a tensor.
        stopping_reason: An `EarlyStoppingReason`.
        stopping_reason_message: The reason as a sentence; None if training wasn't stopped.

    Raises:
        MisconfigurationException: If ``mode`` is neither ``"min"`` nor ``"max"``.
        RuntimeError: During training, if the metric is missing and ``strict`` is True.

    Example:
        ``Trainer(callbacks=EarlyStopping("val_loss", patience=5))``
    """

    mode_dict: dict[str, Callable[..., Tensor]] = {"min": torch.lt, "max": torch.gt}
    order_dict = {"min": "<", "max": ">"}
    # The loop calls what watches a metric after all that may still log it, the module's hook too.
    monitors_metric = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        if mode not in self.mode_dict:
            raise MisconfigurationException(f"EarlyStopping(mode={mode!r}) must be 'min' or 'max'")
        self.monitor = monitor
        # Signed, so that one comparison serves both directions.
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(-math.inf if mode == "max" else math.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def state_key(self) -> str:
        """Made of ``monitor`` and ``mode``: two that differ in one of them keep their states apart."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def monitor_op(self) -> Callable[..., Tensor]:
        """``op(a, b)`` is True where ``a`` is better than ``b``."""
        return self.mode_dict[self.mode]

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Decides when to check, if that was left open."""
        if self._check_on_train_epoch_end is None:
            # With several validations per epoch, or epochs without one, a check belongs to each validation.
            self._check_on_train_epoch_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Checks, if this is when to."""
        if self._check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Checks, if this is when to."""
        if not self._check_on_train_epoch_end:
            self._check(trainer)

    def _check(self, trainer: "Trainer") -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or trainer.fast_dev_run:
            return
        current = self._current(trainer.callback_metrics)
        if current is None:
            return
        stop, text = self._evaluate_stopping_criteria(current)
        # Ranks may have different values of a metric that wasn't synchronised; they must not disagree on the end.
        stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        trainer.should_stop = trainer.should_stop or stop
        if stop:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = text
        if text and self.verbose:
            self._report(trainer, text)

    def _current(self, metrics: Mapping[str, Tensor]) -> Tensor | None:
        value = metrics.get(self.monitor)
        if value is not None:
            return torch.as_tensor(value).squeeze()
        known = ", ".join(map(repr, metrics)) or "none: call self.log"
        text = f"EarlyStopping(monitor={self.monitor!r}): no such metric was logged; available: {known}"
        if self.strict:
            raise RuntimeError(text + ". Pass strict=False to go on without it")
        if self.verbose:
            rank_zero_warn(text, category=RuntimeWarning)
        return None

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Whether to stop, and a sentence to report, if any."""
        better, order = self.monitor_op, self.order_dict[self.mode]
        if self.check_finite and not torch.isfinite(current):
            self.stopping_reason = EarlyStoppingReason.NON_FINITE_METRIC
            return True, (
                f"{self.monitor} = {current} is not finite; the best value was {self.best_score:.3f}. Training stops."
            )
        if self.stopping_threshold is not None and better(current, self.stopping_threshold):
            self.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
            return True, (
                f"{self.monitor} = {current} {order} {self.stopping_threshold}: the stopping threshold is reached."
                " Training stops."
            )
        if self.divergence_threshold is not None and better(-current, -self.divergence_threshold):
            self.stopping_reason = EarlyStoppingReason.DIVERGENCE_THRESHOLD
            return True, (
                f"{self.monitor} = {current} is worse than the divergence threshold {self.divergence_threshold}."
                " Training stops."
            )
        best = self.best_score.to(current.device)
        if better(current - self.min_delta, best):
            text = f"{self.monitor} improved to {current:.3f}"
            if torch.isfinite(best):
                text += f", by {abs(best - current):.3f} (min_delta = {abs(self.min_delta)})"
            self.best_score, self.wait_count = current, 0
            return False, text
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
        return True, (
            f"{self.monitor} has not improved in {self.wait_count} checks; the best value is {self.best_score:.3f}."
            " Training stops."
        )

    def _report(self, trainer: "Trainer", text: str) -> None:
        if trainer.world_size == 1:
            log.info(text)
        elif trainer.global_rank == 0 or not self.log_rank_zero_only:
            log.info("[rank: %d] %s", trainer.global_rank, text)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to stop where an uninterrupted one would."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a saved state, also one from before reasons were saved."""
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"]
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
