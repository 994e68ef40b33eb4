"""The default progress bar, drawn by the rich package."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leyden.callbacks.progress_bar import in_notebook
from leyden.callbacks.progress_clock import Bar, ClockedProgressBar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, Task, TaskID
    from rich.style import Style
    from rich.text import Text

    from leyden.callbacks.rich_columns import Display
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["RichProgressBar", "RichProgressBarTheme"]

# In a notebook without widgets a line of text overwrites itself, so it may come more often than in a file.
_NOTEBOOK_LINE_S = 0.5


@dataclass
class RichProgressBarTheme:
    """Styles of the parts of a `RichProgressBar`, in rich's notation: ``"bold red"``, ``"#E0A106"``.

    Attributes:
        description: The text before the bar.
        progress_bar: The done part of the bar.
        progress_bar_finished: The bar when it is full.
        progress_bar_pulse: The bar when the total is unknown.
        batch_progress: The number of batches.
        time: Elapsed and remaining time.
        processing_speed: Batches per second.
        metrics: The metrics.
        metrics_text_delimiter: What stands between two metrics.
        metrics_format: Format of a metric that is a float.
    """

    description: "str | Style" = ""
    progress_bar: "str | Style" = "#E0A106"
    progress_bar_finished: "str | Style" = "#3FA34D"
    progress_bar_pulse: "str | Style" = "#E0A106"
    batch_progress: "str | Style" = ""
    time: "str | Style" = "dim"
    processing_speed: "str | Style" = "dim underline"
    metrics: "str | Style" = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(ClockedProgressBar):
    """A progress bar with colours, drawn by rich without a thread of its own.

    While it is on the screen, ``print`` and warnings appear above it. Where the output is no terminal it prints a
    line of text now and then; see `ClockedProgressBar`.

    Args:
        refresh_rate: Draws per second, at most 10; 0 shows nothing.
        leave: Whether the bar of each epoch stays on the screen.
        theme: The styles.
        console_kwargs: For `rich.console.Console`, such as ``{"stderr": True}``.

    Example:
        ``Trainer(callbacks=RichProgressBar(theme=RichProgressBarTheme(progress_bar="green")))``
    """

    def __init__(
        self,
        refresh_rate: float = ClockedProgressBar.DRAWS_PER_SECOND,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._refresh_rate = refresh_rate
        self._leave = leave
        self.theme = RichProgressBarTheme() if theme is None else theme
        self._console_kwargs = console_kwargs or {}
        self._console: Console | None = None
        self.progress: Display | None = None
        self._ids: dict[str, TaskID] = {}
        self._overwrites = False
        self._line_width = 0

    @property
    def refresh_rate(self) -> float:
        """As given."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything."""
        return self._enabled and self._refresh_rate > 0

    @property
    def _interval(self) -> float:
        return 1.0 / min(self._refresh_rate, self.DRAWS_PER_SECOND) if self._refresh_rate > 0 else math.inf

    @property
    def train_progress_bar_id(self) -> "TaskID | None":
        """Rich's id of the training bar, while it is on the screen."""
        return self._ids.get("train")

    @property
    def train_progress_bar(self) -> "Task":
        """Rich's task of the training bar.

        Raises:
            RuntimeError: When it isn't on the screen.
        """
        if self.progress is None or "train" not in self._ids:
            raise RuntimeError("the training bar is not on the screen: no training is running, or no terminal is there")
        return self.progress.tasks[self.progress.task_ids.index(self._ids["train"])]

    def configure_columns(self, trainer: "Trainer") -> list["ProgressColumn"]:
        """The columns before the metrics; override to choose others from `rich.progress`."""
        from leyden.callbacks.rich_columns import default_columns

        return default_columns(self.theme)

    def refresh(self) -> None:
        """Draws now."""
        if self.progress is not None:
            self.progress.draw()

    # Where to draw.

    def _start(self) -> None:
        """Finds out what the output is, and opens the display if it can hold one."""
        if self._console is None:
            from rich.console import Console

            # A console of its own: the display must not collide with one that the user has on the shared console.
            self._console = Console(**self._console_kwargs)
        notebook = in_notebook()
        self._overwrites = notebook and not _has_widgets()
        if self._overwrites:
            self.SECONDS_PER_LINE = self.SECONDS_PER_EPOCH_LINE = _NOTEBOOK_LINE_S
        self._plain = self._overwrites or not (notebook or _is_screen(self._console))
        if not self._plain and self.progress is None:
            from leyden.callbacks.rich_columns import display

            self.progress = display(self.configure_columns(self.trainer), self._console)
            self.progress.start()

    def _open(self, bar: Bar) -> None:
        if len(self._bars) == 1 and self.is_enabled:
            self._start()
        if self.progress is not None:
            # A bar whose total isn't known yet would flash as one without end.
            visible = bar.kind in ("train", "test", "predict")
            self._ids[bar.kind] = self.progress.add_task(self._styled(bar.description), total=None, visible=visible)

    def _restart(self, bar: Bar) -> None:
        if self.progress is None or bar.kind not in self._ids:
            return
        if self._leave and bar.kind == "train" and self.train_progress_bar.completed > 0:
            self._stop()
            self._open(bar)
        total = bar.total if math.isfinite(bar.total) else None
        task = self._ids[bar.kind]
        text = self._styled(bar.description)
        if self.progress is not None:
            self.progress.reset(task, total=total, description=text, visible=True)
            # `reset` takes None for "as before".
            self.progress.tasks[self.progress.task_ids.index(task)].total = total

    def _close(self, bar: Bar) -> None:
        task = self._ids.pop(bar.kind, None)
        if self.progress is None or task is None:
            return
        if self._bars or bar.kind == "sanity":
            self.progress.remove_task(task)
        if not self._bars:
            self._stop()

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.progress = None
        self._ids.clear()

    # Drawing.

    def _train_text(self) -> str:
        # As wide as what comes below it, so that nothing moves when validation starts.
        width = len(self.validation_description) if self.trainer.enable_validation else 0
        return super()._train_text().ljust(width)

    def _eval_text(self, description: str) -> str:
        trainer = self.trainer
        kind = self._bars[-1].kind
        counts = getattr(trainer, "num_sanity_val_batches" if kind == "sanity" else f"num_{kind}_batches")
        several = isinstance(counts, list) and len(counts) > 1
        return f"{description} {self._current_eval_dataloader_idx}" if several else description

    def _draw(self, bars: list[Bar], metrics: dict[str, Any] | None, now: float) -> None:
        if self.progress is None:
            return
        for bar in bars:
            if bar.kind in self._ids:
                fields: dict[str, Any] = {"elapsed": now - bar.since, "speed": bar.rate(now)}
                self.progress.update(self._ids[bar.kind], completed=bar.done, **fields)
        if metrics is not None:
            texts = [f"{name}: {self._formatted(value)}" for name, value in metrics.items()]
            self.progress.metrics = self._metrics_text(texts)
        self.progress.draw()

    def _styled(self, description: str) -> str:
        return f"[{self.theme.description}]{description}" if self.theme.description else description

    def _formatted(self, value: Any) -> str:
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, float):
            return format(value, self.theme.metrics_format)
        return str(value)

    def _metrics_text(self, texts: list[str]) -> "Text":
        from rich.text import Text

        return Text(self.theme.metrics_text_delimiter.join(texts), style=self.theme.metrics)

    def _write_line(self, line: str) -> None:
        console = self._console
        file = None if console is None else console.file
        if not self._overwrites:
            print(line, file=file, flush=True)
            return
        print("\r" + line.ljust(self._line_width), end="", file=file, flush=True)
        self._line_width = len(line)

    def get_metrics(
        self, trainer: "Trainer", pl_module: "LightningModule"
    ) -> dict[str, int | str | float | dict[str, float]]:
        """As `ProgressBar.get_metrics`, with tensors as numbers."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}  # pyright: ignore[reportAttributeAccessIssue]

    def __getstate__(self) -> dict[str, Any]:
        # The display holds locks; in another process it is made anew.
        return {**self.__dict__, "progress": None, "_console": None, "_ids": {}, "_bars": []}


def _is_screen(console: "Console") -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _has_widgets() -> bool:
    from importlib.util import find_spec

    return find_spec("ipywidgets") is not None
