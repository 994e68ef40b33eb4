"""The parts of a `RichProgressBar` that are rich's own types; this module is imported only to draw."""

import logging
import math
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from leyden.callbacks.progress_rich import RichProgressBarTheme

__all__ = ["BatchesColumn", "Display", "SpeedColumn", "TimeColumn", "default_columns", "display"]

_BAR_WIDTH = 40
_NARROWEST_BAR = 10


class _StyledColumn(ProgressColumn):
    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__(table_column=Column(no_wrap=True))


class BatchesColumn(_StyledColumn):
    """``25/100``, or ``25/--`` when the total is unknown."""

    def render(self, task: Task) -> Text:
        total = "--" if task.total is None or not math.isfinite(task.total) else int(task.total)
        return Text(f"{int(task.completed)}/{total}", style=self.style)


class TimeColumn(_StyledColumn):
    """Elapsed and remaining time, without the time of validation."""

    max_refresh = 0.5  # twice a second: the remaining time jitters

    def render(self, task: Task) -> Text:
        speed = task.fields.get("speed")
        left = None if task.total is None or not speed else (task.total - task.completed) / speed
        return Text(f"{_hours(task.fields.get('elapsed'))} \u2022 {_hours(left)}", style=self.style)


class SpeedColumn(_StyledColumn):
    """Batches per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields.get('speed', 0.0):.2f}it/s", style=self.style)


def _hours(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))


def default_columns(theme: "RichProgressBarTheme") -> list[ProgressColumn]:
    """Description, bar, batches, time, speed."""
    return [
        TextColumn("[progress.description]{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(
            bar_width=None,
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
            table_column=Column(ratio=1, min_width=_NARROWEST_BAR, max_width=_BAR_WIDTH),
        ),
        BatchesColumn(theme.batch_progress),
        TimeColumn(theme.time),
        SpeedColumn(theme.processing_speed),
    ]


class Display(Progress):
    """Rich's display with the metrics behind the bars, or below them where the line is too short.

    Rich redraws at every change of a bar; this one only in `draw`.
    """

    metrics: Text = Text()
    _handlers: "list[tuple[logging.StreamHandler, TextIO]]" = []

    def start(self) -> None:
        """Opens the display; from here on, what is printed or logged to the terminal appears above it."""
        before = (sys.stdout, sys.stderr)
        super().start()
        self._handlers = []
        for handler in _stream_handlers():
            for old, new in zip(before, (sys.stdout, sys.stderr), strict=True):
                # A handler made earlier holds the stream itself, and would write into the bar.
                if handler.stream is old and new is not old:
                    handler.setStream(new)
                    self._handlers.append((handler, old))

    def stop(self) -> None:
        """Closes the display and gives back the streams."""
        super().stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []

    def refresh(self) -> None:
        """Does nothing: see `draw`."""

    def draw(self) -> None:
        """Puts the bars on the screen as they are now."""
        super().refresh()

    def get_renderables(self) -> Iterable[RenderableType]:
        bars = [column.get_table_column() for column in self.columns if isinstance(column, BarColumn)]
        for column in bars:
            column.max_width = _BAR_WIDTH
        table = self.make_tasks_table(self.tasks)
        if not self.metrics:
            yield table
            return
        # Measured without the screen's limit, which would hide how much is missing.
        unlimited = self.console.options.update(max_width=10_000)
        widest = self.console.measure(table, options=unlimited).maximum
        missing = widest + 1 + self.metrics.cell_len - self.console.width
        if missing > len(bars) * (_BAR_WIDTH - _NARROWEST_BAR):
            yield table
            yield self.metrics
            return
        if missing > 0:
            for column in bars:
                column.max_width = _BAR_WIDTH - math.ceil(missing / len(bars))
            table = self.make_tasks_table(self.tasks)
        line = Table.grid(padding=(0, 1), pad_edge=False)
        line.add_row(table, self.metrics)
        yield line


def _stream_handlers() -> "Iterator[logging.StreamHandler]":
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a name that is only a prefix of others has none
            if isinstance(handler, logging.StreamHandler):
                yield handler


def display(columns: list[ProgressColumn], console: Console) -> Display:
    """A display that is drawn only when it is told to."""
    # A stream that goes elsewhere than to this screen must stay what it is.
    return Display(
        *columns,
        console=console,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty() or console.is_jupyter,
        redirect_stderr=sys.stderr.isatty() or console.is_jupyter,
    )
