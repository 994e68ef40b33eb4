"""Small callbacks: hooks from functions, a time limit, and accumulation that changes with the epoch."""

import re
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_info, rank_zero_warn
from leyden.base.registry import did_you_mean
from leyden.base.states import RunningStage
from leyden.callbacks.shared_clock import SharedClock
from leyden.core.callback import Callback
from leyden.core.hooks import HOOKS, is_overridden

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["GradientAccumulationScheduler", "Interval", "LambdaCallback", "Timer", "parse_duration"]


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        **hooks: Name of a callback hook -> a function with that hook's arguments; None leaves it out.

    Raises:
        TypeError: For a name that is no hook of callbacks, or a value that can't be called.

    Example:
        ``Trainer(callbacks=LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.current_epoch)))``
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = [name for name, hook in HOOKS.items() if hook.callback]
        for name, function in hooks.items():
            if name not in known:
                raise TypeError(f"LambdaCallback: {name!r} is no hook of callbacks; {did_you_mean(name, known)}")
            if function is None:
                continue
            if not callable(function):
                raise TypeError(f"LambdaCallback({name}=...) must be a function, not {type(function).__name__}")
            setattr(self, name, function)


class Interval(str, Enum):
    """When a `Timer` may stop a run."""

    step = "step"
    epoch = "epoch"


_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(duration: str | timedelta | dict[str, int] | None) -> timedelta | None:
    """A duration as a `timedelta`.

    Args:
        duration: ``"DD:HH:MM:SS"``, units as in ``"1d12h"``, ``"90m"`` or ``"1h 30m"``, a `timedelta`, or a dict of its
            arguments; None stays None.

    Raises:
        MisconfigurationException: For any other text.
    """
    if duration is None or isinstance(duration, timedelta):
        return duration
    if isinstance(duration, dict):
        return timedelta(**duration)
    text = re.sub(r"\s+", "", duration)
    match = _CLOCK.fullmatch(text) or (_UNITS.fullmatch(text) if text else None)
    if match is None:
        raise MisconfigurationException(
            f"{duration!r} is no duration: write 'DD:HH:MM:SS', or units as in '1h30m' or '90s'"
        )
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


class Timer(Callback):
    """Measures how long training, validation and testing take, and ends training when its time is over.

    The time of training includes the validation inside it, and what earlier runs took that were resumed. With
    ``interval="step"`` training ends after the batch in which time ran out, at the earliest.

    With several ranks, rank 0's clock decides for all. They ask for it about once a second (see `SharedClock`), so
    training may last longer by that.

    Args:
        duration: The limit, as `parse_duration` takes it; None for none.
        interval: ``"step"`` or ``"epoch"``: whether training may end inside an epoch.
        verbose: Whether to report that time ran out.

    Raises:
        MisconfigurationException: For another interval, or a duration that can't be read.

    Example:
        ``timer = Timer("00:12:00:00")``, and after training ``timer.time_elapsed("train")``.
    """

    limits_time = True  # the Trainer then needs no other limit, and adds no Timer of its own

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = Interval.step,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if interval not in list(Interval):
            raise MisconfigurationException(f"Timer(interval={interval!r}) must be 'step' or 'epoch'")
        limit = parse_duration(duration)
        self._duration = None if limit is None else limit.total_seconds()
        self._interval = Interval(interval)
        self._verbose = verbose
        self._start_time: dict[RunningStage, float | None] = dict.fromkeys(RunningStage)
        self._end_time: dict[RunningStage, float | None] = dict.fromkeys(RunningStage)
        self._offset = 0.0
        self._clock: SharedClock | None = None  # while training may end inside an epoch

    def start_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """When ``stage`` (``"train"``, ``"validate"``, ``"test"``) last began, on the monotonic clock; None: never."""
        return self._start_time[RunningStage(stage)]

    def end_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """When ``stage`` last ended, on the monotonic clock; None if it hasn't."""
        return self._end_time[RunningStage(stage)]

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """Seconds that ``stage`` has taken or takes so far."""
        start, end = self.start_time(stage), self.end_time(stage)
        before = self._offset if RunningStage(stage) is RunningStage.TRAINING else 0.0
        if start is None:
            return before
        return (monotonic() if end is None else end) - start + before

    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """Seconds left; None without a limit."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def _begin(self, stage: RunningStage) -> None:
        self._start_time[stage], self._end_time[stage] = monotonic(), None

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """A run that is resumed with no time left ends before its first batch."""
        self._start_time[RunningStage.TRAINING] = None
        self._stop_if_over(trainer)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Starts the clock of training."""
        self._begin(RunningStage.TRAINING)
        if self._duration is not None and self._interval is Interval.step:
            self._clock = SharedClock(self._duration - self._offset, trainer.strategy, monotonic)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Stops the clock of training."""
        self._end_time[RunningStage.TRAINING], self._clock = monotonic(), None

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Starts the clock of validation."""
        self._begin(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Stops the clock of validation."""
        self._end_time[RunningStage.VALIDATING] = monotonic()

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Starts the clock of testing."""
        self._begin(RunningStage.TESTING)

    def on_test_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Stops the clock of testing."""
        self._end_time[RunningStage.TESTING] = monotonic()

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends training if time is over; costs one look at the clock while it isn't."""
        if self._clock is not None and self._clock.due():
            self._clock = None  # said once; the trainer keeps it in mind until it may stop
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Ends training if time is over, with ``interval="epoch"``."""
        if self._interval is Interval.epoch:
            self._stop_if_over(trainer)

    def _stop_if_over(self, trainer: "Trainer") -> None:
        if self._duration is None:
            return
        over = self.time_elapsed() >= self._duration
        if trainer.world_size > 1:
            over = trainer.strategy.broadcast(over)
        if over:
            self._stop(trainer)

    def _stop(self, trainer: "Trainer") -> None:
        trainer.should_stop = True
        if self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            rank_zero_info("The time limit of training is reached after %s. Training stops.", elapsed)

    def state_dict(self) -> dict[str, Any]:
        """The seconds of each stage."""
        return {"time_elapsed": {stage.value: self.time_elapsed(stage) for stage in RunningStage}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the clock of training where it was saved."""
        self._offset = state_dict.get("time_elapsed", {}).get(RunningStage.TRAINING.value, 0.0)


class GradientAccumulationScheduler(Callback):
    """Changes ``accumulate_grad_batches`` at the start of given epochs.

    Args:
        scheduling: Epoch, from 0 -> the batches per optimizer step from this epoch on. Before the first of them it
            is 1.

    Raises:
        TypeError: If ``scheduling`` is empty.
        MisconfigurationException: For an epoch below 0 or a factor below 1.
        RuntimeError: At the start of training: with manual optimization, or a strategy that accumulates by itself.
        ValueError: At the start of training: if the Trainer's ``accumulate_grad_batches`` is set as well.

    Example:
        ``GradientAccumulationScheduler({4: 2})``: from the fifth epoch on, a step after every second batch.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        super().__init__()
        if not scheduling:
            raise TypeError("GradientAccumulationScheduler needs at least one entry, e.g. {4: 2}")
        for what, least, numbers in (("epoch", 0, scheduling), ("factor", 1, scheduling.values())):
            wrong = [number for number in numbers if not isinstance(number, int) or number < least]
            if wrong:
                raise MisconfigurationException(
                    f"GradientAccumulationScheduler: {what} {wrong[0]!r} must be an int of {least} or more"
                )
        self.scheduling = scheduling if 0 in scheduling else {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any factor is above 1."""
        return any(factor > 1 for factor in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """The factor in ``epoch``."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Refuses what can't work together."""
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                "GradientAccumulationScheduler has no effect with manual optimization, where the module steps its"
                " optimizers itself: remove the callback, or set automatic_optimization = True"
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise RuntimeError(
                f"{type(trainer.strategy).__name__} accumulates gradients by itself, with one factor for the whole"
                " run: remove GradientAccumulationScheduler"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} and GradientAccumulationScheduler exclude"
                " each other: remove one of them"
            )
        self._warn_of_overridden_hooks(pl_module)

    def _warn_of_overridden_hooks(self, pl_module: "LightningModule") -> None:
        replaced = [name for name in ("optimizer_step", "optimizer_zero_grad") if is_overridden(name, pl_module)]
        if replaced and self.going_to_accumulate_grad_batches():
            rank_zero_warn(
                f"{' and '.join(replaced)} of the module are called once per optimizer step, not once per batch,"
                " while gradients are accumulated"
            )

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Sets the factor of this epoch."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)
