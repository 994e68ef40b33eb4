"""When a progress bar is drawn: by the clock, not by the batch; on a terminal, in a notebook, or as lines of text."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from leyden.callbacks.progress_bar import ProgressBar

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["Bar", "ClockedProgressBar"]


@dataclass(slots=True)
class Bar:
    """What is known of one bar.

    Attributes:
        kind: ``"train"``, ``"sanity"``, ``"val"``, ``"test"`` or ``"predict"``.
        description: Text before it.
        total: Batches; ``inf`` when unknown.
        done: Batches that are done.
        skipped: Of these, how many were done before this run: they took none of its time.
        began: `monotonic` time at which it appeared.
        since: `monotonic` time of its start, moved on by the time that a bar inside it took.
        drawn: ``done`` when it was last drawn; -1 before.
    """

    kind: str
    description: str
    total: float
    done: int = 0
    skipped: int = 0
    began: float = 0.0
    since: float = 0.0
    drawn: int = -1

    def rate(self, now: float) -> float:
        """Batches per second of this run, without the time of validation."""
        return (self.done - self.skipped) / max(now - self.since, 1e-9)

    def line(self, metrics: dict[str, Any] | None, now: float) -> str:
        """The bar as one line of text, for files and pipes."""
        seconds, rate = now - self.since, self.rate(now)
        if math.isfinite(self.total):
            percent = 100 * self.done / self.total if self.total else 100
            left = _clock((self.total - self.done) / rate) if rate else "?"
            head = f"{self.description.rstrip()}: {percent:3.0f}% {self.done}/{int(self.total)}"
        else:
            head, left = f"{self.description.rstrip()}: {self.done}/?", "?"
        shown = "".join(f", {name}={_short(value)}" for name, value in (metrics or {}).items())
        return f"{head} [{_clock(seconds)}<{left}, {rate:.2f}it/s{shown}]"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def _short(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ClockedProgressBar(ProgressBar, ABC):
    """A bar that is drawn by the clock: at most ten times a second, and never for more than 0.5 % of the time.

    A batch that ends costs one look at the clock while nothing is due; metrics are read, and so a device waited for,
    only when the bar is drawn. Where the output is no terminal (a file, a pipe, a cluster's log) it prints lines: one
    every five seconds, and one at the end of an epoch unless epochs end faster than once a second.

    A subclass draws: it implements `_open`, `_restart`, `_draw`, `_close` and `_stop`.
    """

    DRAWS_PER_SECOND = 10
    LARGEST_SHARE = 0.005
    SECONDS_PER_LINE = 5.0
    SECONDS_PER_EPOCH_LINE = 1.0

    _leave = False

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._plain = False
        self._bars: list[Bar] = []
        self._done = 0
        self._next_draw = math.inf
        self._first = True  # nothing was drawn in this run
        self._spent = 0.0
        self._began = 0.0
        self._last_line = -math.inf
        self._held_line: str | None = None

    # What a subclass does.

    @abstractmethod
    def _open(self, bar: Bar) -> None:
        """A bar appears."""

    @abstractmethod
    def _restart(self, bar: Bar) -> None:
        """A bar has a new description and total, and starts at zero."""

    @abstractmethod
    def _draw(self, bars: list[Bar], metrics: dict[str, Any] | None, now: float) -> None:
        """Puts all bars on the screen; ``metrics`` belong to the training bar, None: leave them as they are."""

    @abstractmethod
    def _close(self, bar: Bar) -> None:
        """A bar is done."""

    @abstractmethod
    def _stop(self) -> None:
        """The run is over, well or not: the terminal becomes as it was."""

    def _write_line(self, line: str) -> None:
        print(line, flush=True)

    # When it is done.

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """The opposite of `is_enabled`."""
        return not self.is_enabled

    def disable(self) -> None:
        """Shows nothing from here on."""
        self._enabled = False
        self._next_draw = math.inf

    def enable(self) -> None:
        """Shows the bar again, from the next batch on."""
        self._enabled = True
        if self._bars:
            self._next_draw = 0.0

    @property
    def _wake_up(self) -> float | None:
        """See `Callback._wake_up`; a subclass with its own hook wants to see every batch."""
        untouched = type(self).on_train_batch_end is ClockedProgressBar.on_train_batch_end
        return self._next_draw if untouched else None

    @property
    def _interval(self) -> float:
        return 1.0 / self.DRAWS_PER_SECOND

    def _push(self, kind: str, description: str, total: float) -> None:
        now = monotonic()
        if not self._bars:
            self._began, self._spent, self._first = now, 0.0, True
            self._last_line, self._held_line = now, None
        else:
            self._bars[-1].done = self._done
        bar = Bar(kind, description, total, began=now, since=now)
        self._bars.append(bar)
        self._done = 0
        self._open(bar)
        if self._first and self.is_enabled:
            self._next_draw = 0.0

    def _reset(self, description: str, total: float) -> None:
        bar = self._bars[-1]
        bar.description, bar.total = description, total
        bar.done = bar.skipped = self._done = 0
        bar.drawn = -1
        bar.since = monotonic()
        self._restart(bar)
        self._event()

    def _pop(self) -> None:
        """The innermost bar ends, and the one around it goes on."""
        if not self._bars:
            return
        bar = self._bars.pop()
        bar.done = self._done
        self._close(bar)
        if self._bars:
            outer = self._bars[-1]
            outer.since += monotonic() - bar.began
            self._done = outer.done
        else:
            self._next_draw = math.inf

    def _tick(self) -> None:
        """The clock says that something is due."""
        if not self._bars or self.is_disabled:
            self._next_draw = math.inf
            return
        bar = self._bars[-1]
        if self._first:
            # Only the first batch of a run always comes here: a run resumed inside an epoch starts above zero.
            self._first = False
            bar.skipped = self._done - 1
            if self._plain:
                self._next_draw = self._last_line + self.SECONDS_PER_LINE
                return
        bar.done = self._done
        if self._plain:
            self._line(bar)
        else:
            self._draw_now()

    def _event(self, always: bool = False) -> None:
        """Something worth showing happened between batches; shown unless drawing takes too large a share already."""
        if not self._bars or self.is_disabled or self._plain:
            return
        self._bars[-1].done = self._done
        if always or self._spent <= self.LARGEST_SHARE * (monotonic() - self._began) + self._interval:
            self._draw_now()

    def _draw_now(self) -> None:
        start = monotonic()
        self._draw(self._bars, self._metrics(), start)
        end = monotonic()
        for bar in self._bars:
            bar.drawn = bar.done
        self._spent += end - start
        self._next_draw = end + max(self._interval, (end - start) / self.LARGEST_SHARE)

    def _metrics(self) -> dict[str, Any] | None:
        trainer = self.trainer
        if not self._bars or self._bars[0].kind != "train":
            return None
        return self.get_metrics(trainer, trainer.lightning_module)

    def _line(self, bar: Bar) -> None:
        now = monotonic()
        self._write_line(bar.line(self._metrics() if bar.kind == "train" else None, now))
        self._last_line, self._held_line = now, None
        self._next_draw = now + self.SECONDS_PER_LINE

    def _last_of_bar(self) -> None:
        """The outermost bar is complete: its final state is shown, or at least held until it is."""
        if not self._bars or self.is_disabled:
            return
        bar = self._bars[-1]
        bar.done = self._done
        if not self._plain:
            self._event(always=self._leave)
        elif monotonic() - self._last_line >= self.SECONDS_PER_EPOCH_LINE:
            self._line(bar)
        else:
            self._held_line = bar.line(self._metrics() if bar.kind == "train" else None, monotonic())

    def _end_run(self) -> None:
        """The outermost bar ends with all that is known of it on the screen."""
        if self._bars and self.is_enabled:
            self._bars[-1].done = self._done
            if not self._plain:
                self._draw_now()
            elif self._held_line is not None:
                # Made anew: hooks that ran since it was held may have logged values of the last epoch.
                self._line(self._bars[-1])
        self._pop()

    def _train_text(self) -> str:
        last = self.trainer.max_epochs
        epoch = self.trainer.current_epoch
        return f"Epoch {epoch}/{last - 1}" if last is not None and last > 0 else f"Epoch {epoch}"

    def _eval_text(self, description: str) -> str:
        return description

    # The hooks.

    def on_sanity_check_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._push("sanity", self.sanity_check_description, math.inf)

    def on_sanity_check_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._pop()
        self.reset_dataloader_idx_tracker()

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._push("train", self._train_text(), self.total_train_batches)

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._reset(self._train_text(), self.total_train_batches)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done = batch_idx + 1
        if monotonic() >= self._next_draw:
            self._tick()

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._last_of_bar()

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._end_run()

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if not trainer.sanity_checking:
            self._push("val", self.validation_description, math.inf)

    def on_validation_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx != self._current_eval_dataloader_idx and self.has_dataloader_changed(dataloader_idx):
            text = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            self._reset(self._eval_text(text), self.total_val_batches_current_dataloader)

    def on_validation_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._done = batch_idx + 1
        if monotonic() >= self._next_draw:
            self._tick()

    # In tests and predictions it is the same.
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if trainer.sanity_checking:
            return
        self.reset_dataloader_idx_tracker()
        if len(self._bars) > 1:
            self._pop()
            self._event()  # the training bar shows what validation logged
        else:
            self._last_of_bar()
            self._end_run()

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._push("test", self.test_description, math.inf)

    def on_test_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx != self._current_eval_dataloader_idx and self.has_dataloader_changed(dataloader_idx):
            self._reset(self._eval_text(self.test_description), self.total_test_batches_current_dataloader)

    def on_test_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self.reset_dataloader_idx_tracker()
        self._last_of_bar()
        self._end_run()

    on_predict_end = on_test_end

    def on_predict_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self._push("predict", self.predict_description, math.inf)

    def on_predict_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx != self._current_eval_dataloader_idx and self.has_dataloader_changed(dataloader_idx):
            self._reset(self._eval_text(self.predict_description), self.total_predict_batches_current_dataloader)

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        self._abandon()

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        self._abandon()

    def _abandon(self) -> None:
        self.reset_dataloader_idx_tracker()
        while self._bars:
            self._pop()
        self._stop()
