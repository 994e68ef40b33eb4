"""A progress bar drawn by the tqdm package."""

import math
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from leyden.callbacks.progress_bar import in_notebook
from leyden.callbacks.progress_clock import Bar, ClockedProgressBar

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["TQDMProgressBar", "convert_inf"]

_NUMBER_WIDTH = 5


@lru_cache(maxsize=1)
def _tqdm_class() -> "type[tqdm]":
    from importlib.util import find_spec

    # `tqdm.auto` warns on every import in a notebook that has no widgets.
    if find_spec("ipywidgets") is not None:
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm

    class Tqdm(tqdm):  # pyright: ignore[reportGeneralTypeIssues]
        """A tqdm whose numbers keep their width, so that what follows them doesn't jump."""

        # Without this, tqdm starts a thread that watches bars which are not drawn for long; these have a clock.
        monitor_interval = 0

        @staticmethod
        def format_num(n: Any) -> str:
            text = n if isinstance(n, str) else tqdm.format_num(n)
            if not isinstance(n, (float, str)) or "e" in text:
                return text
            if "." not in text and len(text) < _NUMBER_WIDTH:
                try:
                    float(text)
                except ValueError:
                    return text
                text += "."
            return text.ljust(_NUMBER_WIDTH, "0")

    return Tqdm


def __getattr__(name: str) -> Any:
    # The class derives from one of a package that is not imported before a bar is made.
    if name == "Tqdm":
        return _tqdm_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def convert_inf(x: float | None) -> float | None:
    """None for an infinite or undefined total, which is tqdm's way to say so."""
    return None if x is None or not math.isfinite(x) else x


class TQDMProgressBar(ClockedProgressBar):
    """Progress bars of tqdm: one for training, test or prediction, and one below it while validation runs.

    To change a bar, override the method that makes it (`init_train_tqdm` and the others) and change what the
    original returns. Where the output is no terminal it prints a line of text now and then; see
    `ClockedProgressBar`.

    Args:
        refresh_rate: Batches between two draws, at least; 0 shows nothing. The environment variable TQDM_MINITERS
            raises it.
        process_position: Lines to leave free above, for bars of your own.
        leave: Whether the bar of each epoch stays on the screen.

    Example:
        ```
        class Mine(TQDMProgressBar):
            def init_train_tqdm(self):
                bar = super().init_train_tqdm()
                bar.colour = "green"
                return bar
        ```
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        if "TQDM_MINITERS" in os.environ and refresh_rate > 0:
            refresh_rate = max(int(os.environ["TQDM_MINITERS"]), refresh_rate)
        self._refresh_rate = refresh_rate
        self._process_position = process_position
        self._leave = leave
        self._no_screen = False
        self._train_progress_bar: tqdm | None = None
        self._val_progress_bar: tqdm | None = None
        self._test_progress_bar: tqdm | None = None
        self._predict_progress_bar: tqdm | None = None

    @property
    def refresh_rate(self) -> int:
        """Batches between two draws, at least."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """As given."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything."""
        return self._enabled and self._refresh_rate > 0

    # The bars themselves.

    def _made(self, name: str) -> "tqdm":
        bar = getattr(self, f"_{name}_progress_bar")
        if bar is None:
            raise TypeError(
                f"{type(self).__name__}.{name}_progress_bar is not there yet: it is made when that stage starts"
            )
        return bar

    @property
    def train_progress_bar(self) -> "tqdm":
        """The bar of training; a `TypeError` before it was made."""
        return self._made("train")

    @train_progress_bar.setter
    def train_progress_bar(self, bar: "tqdm") -> None:
        self._train_progress_bar = bar

    @property
    def val_progress_bar(self) -> "tqdm":
        """The bar of validation or of the sanity check; a `TypeError` before it was made."""
        return self._made("val")

    @val_progress_bar.setter
    def val_progress_bar(self, bar: "tqdm") -> None:
        self._val_progress_bar = bar

    @property
    def test_progress_bar(self) -> "tqdm":
        """The bar of testing; a `TypeError` before it was made."""
        return self._made("test")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: "tqdm") -> None:
        self._test_progress_bar = bar

    @property
    def predict_progress_bar(self) -> "tqdm":
        """The bar of prediction; a `TypeError` before it was made."""
        return self._made("predict")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: "tqdm") -> None:
        self._predict_progress_bar = bar

    def _new(self, description: str, leave: bool, below: bool = False, **kwargs: Any) -> "tqdm":
        return _tqdm_class()(
            desc=description,
            position=2 * self._process_position + below,
            disable=self.is_disabled or self._no_screen,
            leave=leave,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **kwargs,
        )

    def init_sanity_tqdm(self) -> "tqdm":
        """Makes the bar of the sanity check."""
        return self._new(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> "tqdm":
        """Makes the bar of training."""
        return self._new(self.train_description, leave=True, smoothing=0)

    def init_predict_tqdm(self) -> "tqdm":
        """Makes the bar of prediction."""
        return self._new(self.predict_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> "tqdm":
        """Makes the bar of validation: below the training bar inside ``fit``, alone otherwise."""
        alone = self.trainer.state.fn == "validate"
        return self._new(self.validation_description, leave=alone, below=not alone)

    def init_test_tqdm(self) -> "tqdm":
        """Makes the bar of testing."""
        return self._new(self.test_description, leave=True)

    # Drawing.

    def _tqdm_of(self, bar: Bar) -> "tqdm | None":
        return getattr(self, f"_{'val' if bar.kind == 'sanity' else bar.kind}_progress_bar")

    def _open(self, bar: Bar) -> None:
        self._no_screen = not (in_notebook() or sys.stdout.isatty())
        if bar.kind == "sanity":
            self.val_progress_bar = made = self.init_sanity_tqdm()
        elif bar.kind == "val":
            self.val_progress_bar = made = self.init_validation_tqdm()
        elif bar.kind == "train":
            self.train_progress_bar = made = self.init_train_tqdm()
        elif bar.kind == "test":
            self.test_progress_bar = made = self.init_test_tqdm()
        else:
            self.predict_progress_bar = made = self.init_predict_tqdm()
        if len(self._bars) == 1:
            # A bar that the user made to write elsewhere is drawn there.
            self._plain = self._no_screen and bool(made.disable)

    def _restart(self, bar: Bar) -> None:
        shown = self._tqdm_of(bar)
        if shown is None or shown.disable:
            return
        if self._leave and bar.kind == "train" and shown.n > 0:
            shown.close()
            self.train_progress_bar = shown = self.init_train_tqdm()
        # Not `reset`, which draws.
        shown.n = 0
        shown.total = convert_inf(bar.total)  # pyright: ignore[reportAttributeAccessIssue]
        shown.set_description(bar.description, refresh=False)

    def _draw(self, bars: list[Bar], metrics: dict[str, Any] | None, now: float) -> None:
        for bar in bars:
            shown = self._tqdm_of(bar)
            if shown is None or shown.disable:
                continue
            ahead = bar.done - bar.drawn
            if bar.drawn >= 0 and 0 < ahead < self._refresh_rate and bar.done != bar.total:
                continue
            shown.n, shown.initial = bar.done, bar.skipped
            # `last_print_t` tells `close` that there is something on the screen.
            shown.last_print_t = shown._time()  # pyright: ignore[reportAttributeAccessIssue]
            shown.start_t = shown.last_print_t - (now - bar.since)  # pyright: ignore[reportAttributeAccessIssue]
            if bar.kind == "train" and metrics is not None:
                shown.set_postfix(metrics, refresh=False)
            shown.refresh()

    def _close(self, bar: Bar) -> None:
        shown = self._tqdm_of(bar)
        if shown is not None:
            shown.close()

    def _stop(self) -> None:
        """Every bar was closed when it ended."""

    def _train_text(self) -> str:
        return f"Epoch {self.trainer.current_epoch}"

    def _eval_text(self, description: str) -> str:
        return f"{description} DataLoader {self._current_eval_dataloader_idx}"

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Prints above the bars; arguments of the builtin ``print``, without ``flush``."""
        for bar in reversed(self._bars):
            shown = self._tqdm_of(bar)
            if shown is not None and not shown.disable:
                shown.write(sep.join(map(str, args)), **kwargs)
                return
        print(*args, sep=sep, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        bars = {name: None for name in self.__dict__ if name.endswith("_progress_bar")}
        return {**self.__dict__, **bars, "_bars": []}
