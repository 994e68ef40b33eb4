import contextlib
import io
import itertools
import logging
import pickle
import re
import sys
from types import SimpleNamespace

import pytest
from fake_run import FakeTrainer

from leyden.callbacks import ProgressBar, RichProgressBar, RichProgressBarTheme, TQDMProgressBar, progress_clock
from leyden.callbacks.progress_clock import Bar

LOGGERS = [SimpleNamespace(version=3)]
BOTH = pytest.mark.parametrize("cls", [RichProgressBar, TQDMProgressBar])


class FakeClock:
    now = 1000.0

    def __call__(self):
        return self.now

    def step(self, seconds):
        def after(trainer):
            self.now += seconds

        return after


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(progress_clock, "monotonic", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def run(self, function, *args, **kwargs):
        with contextlib.redirect_stdout(self):
            return function(*args, **kwargs)


@pytest.fixture
def terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return screen


# Where there is no terminal.


@BOTH
def test_lines_at_most_every_five_seconds(cls, clock, capsys):
    trainer = FakeTrainer(cls(), epochs=2, train=100, val=(5,), loggers=LOGGERS)
    trainer.fit(after_step=clock.step(0.2))
    lines = capsys.readouterr().out.splitlines()
    assert 8 <= len(lines) <= 9  # twenty seconds per epoch
    assert re.fullmatch(
        r"Epoch 0(/1)?:  2[5-6]% 2[5-6]/100 \[00:05<00:1[0-9], \d\.\d\dit/s, v_num=3, train_loss=0\.0\d+\]", lines[0]
    )
    assert re.fullmatch(
        r"Epoch 1(/1)?: 100% 100/100 \[00:20<00:00, 5\.00it/s, v_num=3, train_loss=0\.005, val_acc=0\.9\]", lines[-1]
    )
    assert not any("\r" in line or "\x1b" in line for line in lines)


@BOTH
def test_short_epochs_do_not_flood(cls, clock, capsys):
    trainer = FakeTrainer(cls(), epochs=500, train=2, val=())
    trainer.fit(after_step=clock.step(0.01))
    lines = capsys.readouterr().out.splitlines()
    assert 5 <= len(lines) <= 11  # ten seconds
    assert "Epoch 499" in lines[-1]
    assert "2/2" in lines[-1]


@BOTH
def test_eval_runs_end_with_a_line(cls, clock, capsys):
    trainer = FakeTrainer(cls(), val=(2,), test=(3,), predict=(4,))
    for kind in ("test", "validation", "predict"):
        trainer.evaluate(kind)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split()[0] for line in lines] == ["Testing", "Validation", "Predicting"]
    assert ["3/3" in lines[0], "2/2" in lines[1], "4/4" in lines[2]] == [True] * 3


@BOTH
def test_unknown_totals(cls, clock, capsys):
    trainer = FakeTrainer(cls(), epochs=1, train=30, val=())
    bar = trainer.callbacks[0]
    trainer.max_epochs = 1
    type(trainer.callbacks[0]).total_train_batches, before = float("inf"), type(bar).total_train_batches
    try:
        trainer.fit(after_step=clock.step(1.0))
    finally:
        del type(bar).total_train_batches
    assert "30/? [00:30<?, 1.00it/s" in capsys.readouterr().out
    assert type(bar).total_train_batches is before


@BOTH
def test_resumed_run_has_an_honest_rate(cls, clock, capsys):
    trainer = FakeTrainer(cls(), epochs=1, train=100, val=())
    trainer.fit(sanity=False, start_batch=80, after_step=clock.step(1.0))
    assert "100/100 [00:20<00:00, 1.00it/s" in capsys.readouterr().out


@BOTH
def test_time_of_validation_is_not_time_of_training(cls, clock, capsys):
    class Slow(cls):
        def on_validation_batch_end(self, *args):
            clock.now += 10
            super().on_validation_batch_end(*args)

    trainer = FakeTrainer(Slow(), epochs=1, train=10, val=(3,))
    trainer.fit(sanity=False, after_step=clock.step(1.0))
    out = capsys.readouterr().out
    assert "Validation" in out
    assert re.search(r"Epoch 0.*10/10 \[00:10<00:00, 1\.00it/s", out)


# What it costs.


class Counting(FakeTrainer):
    reads = 0

    @property
    def progress_bar_metrics(self):
        type(self).reads += 1
        return self._shown

    @progress_bar_metrics.setter
    def progress_bar_metrics(self, value):
        self._shown = value


@BOTH
@pytest.mark.parametrize("screen", [True, False])
def test_metrics_are_read_only_to_draw(cls, screen, clock, request):
    run = request.getfixturevalue("terminal").run if screen else lambda function, **kwargs: function(**kwargs)
    Counting.reads = 0
    trainer = Counting(cls(), epochs=1, train=1000, val=())
    trainer._shown = {}
    run(trainer.fit, after_step=clock.step(0.001))
    # The fake trainer reads them once per step, to change them.
    assert 1 <= Counting.reads - 1000 <= 14


@BOTH
def test_a_batch_end_is_one_call_when_nothing_is_due(cls, clock):
    bar = cls()
    trainer = FakeTrainer(bar, train=10**6, val=())
    for hook in ("on_train_start", "on_train_epoch_start"):
        bar.setup(trainer, None, "fit")
        getattr(bar, hook)(trainer, trainer.lightning_module)
    bar.on_train_batch_end(trainer, None, None, None, 0)
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    bar.on_train_batch_end(trainer, None, None, None, 1)
    sys.setprofile(None)
    assert [name for name in calls if name != "__call__"] == ["on_train_batch_end"]


@BOTH
def test_draws_ten_times_a_second_at_most(cls, clock, terminal, monkeypatch):
    draws = []
    original = cls._draw
    monkeypatch.setattr(cls, "_draw", lambda self, *a: draws.append(clock.now) or original(self, *a))
    terminal.run(FakeTrainer(cls(), epochs=1, train=2000, val=()).fit, after_step=clock.step(0.001))
    between = [b - a for a, b in itertools.pairwise(draws[2:])]
    assert 15 <= len(draws) <= 24
    assert min(between[:-2]) >= 0.099


@BOTH
def test_slow_drawing_is_done_less_often(cls, clock, terminal, monkeypatch):
    original = cls._draw
    draws = []

    def slow(self, *args):
        clock.now += 0.05
        draws.append(clock.now)
        original(self, *args)

    monkeypatch.setattr(cls, "_draw", slow)
    start = clock.now
    terminal.run(FakeTrainer(cls(), epochs=100, train=100, val=()).fit, after_step=clock.step(0.01))
    assert 0.05 * len(draws) <= 0.03 * (clock.now - start)


@BOTH
def test_a_disabled_bar_draws_nothing(cls, clock, capsys):
    bar = cls()
    trainer = FakeTrainer(bar, epochs=1, train=50)
    trainer.is_global_zero = False
    trainer.fit(after_step=clock.step(1.0))
    assert capsys.readouterr().out == ""
    assert bar.is_disabled
    bar.enable()
    assert bar.is_enabled
    trainer = FakeTrainer(cls(refresh_rate=0), epochs=1, train=50)
    trainer.fit(after_step=clock.step(1.0))
    assert capsys.readouterr().out == ""


# On a terminal.


@BOTH
@pytest.mark.parametrize("leave", [False, True])
def test_shows_all_on_a_terminal(cls, leave, clock, terminal):
    bar = cls(leave=leave)
    trainer = FakeTrainer(bar, epochs=2, train=30, val=(10, 5), loggers=LOGGERS)
    terminal.run(trainer.fit, after_step=clock.step(0.05))
    terminal.run(trainer.evaluate, "test")
    shown = terminal.getvalue()
    for text in ("Sanity Checking", "Epoch 0", "Epoch 1", "Validation", "30/30", "0/10", "Testing", "3/3", "val_acc"):
        assert text in shown, text
    assert "v_num" in shown
    assert bar._bars == []


def test_rich_leaves_the_terminal_as_it_was(clock, terminal):
    bar = RichProgressBar()
    trainer = FakeTrainer(bar, epochs=1, train=3, val=())

    def fail(trainer):
        clock.now += 1
        assert bar.progress is not None
        assert sys.stdout is not terminal  # prints go above the bar
        assert bar.train_progress_bar.total == 3
        if trainer.global_step == 2:
            raise ValueError("the model is wrong")

    with contextlib.redirect_stdout(terminal):
        with pytest.raises(ValueError, match="wrong"):
            trainer.fit(after_step=fail)
        trainer.call("on_exception", ValueError())
        assert sys.stdout is terminal
    assert bar.progress is None
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h")  # the cursor
    with pytest.raises(RuntimeError, match="not on the screen"):
        _ = bar.train_progress_bar


def test_log_messages_appear_above_the_rich_bar(clock, terminal, monkeypatch):
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("test.of.bars")
    monkeypatch.setattr(logger, "handlers", [handler])

    def say(trainer):
        clock.now += 1
        logger.warning("step %d", trainer.global_step)
        assert handler.stream is sys.stdout

    terminal.run(FakeTrainer(RichProgressBar(), epochs=1, train=2, val=()).fit, after_step=say)
    assert handler.stream is terminal
    assert "\x1b[2Kstep 1\n" in terminal.getvalue()


def test_rich_starts_no_thread(clock, terminal):
    import threading

    before = set(threading.enumerate())
    seen = set()
    terminal.run(
        FakeTrainer(RichProgressBar(), epochs=1, train=5).fit,
        after_step=lambda trainer: clock.step(1)(trainer) or seen.update(threading.enumerate()),
    )
    assert terminal.getvalue()
    assert seen <= before


def test_rich_theme_columns_and_overridden_metrics(clock, terminal):
    from rich.progress import TextColumn

    class Mine(RichProgressBar):
        def configure_columns(self, trainer):
            return [TextColumn("my column"), *super().configure_columns(trainer)]

        def get_metrics(self, trainer, pl_module):
            metrics = super().get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            return {**metrics, "mine": 1.23456}

    theme = RichProgressBarTheme(description="green", metrics_text_delimiter=" | ", metrics_format=".1e")
    terminal.run(
        FakeTrainer(Mine(theme=theme), epochs=1, train=5, val=(), loggers=LOGGERS).fit, after_step=clock.step(1)
    )
    shown = terminal.getvalue()
    assert "my column" in shown
    assert "mine: 1.2e+00" in shown
    assert " | " in shown
    assert "v_num" not in shown


def test_rich_metrics_go_below_when_the_line_is_short(clock, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    trainer = FakeTrainer(RichProgressBar(), epochs=1, train=5, val=(), loggers=LOGGERS)
    terminal.run(trainer.fit, after_step=clock.step(1))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    last = ("Epoch" + plain.rsplit("Epoch", 1)[1]).rstrip("\n").split("\n")
    assert last[0].rstrip().endswith("it/s")
    assert last[1].startswith("v_num: 3 train_loss: 0.200")
    assert all(len(line) <= 60 for line in last)


def test_tqdm_bars_can_be_replaced(clock, capsys):
    from tqdm import tqdm

    target = io.StringIO()

    class Mine(TQDMProgressBar):
        def init_train_tqdm(self):
            return tqdm(desc="mine", file=target, bar_format="{desc}|{n}/{total}|{postfix}")

        def init_validation_tqdm(self):
            bar = super().init_validation_tqdm()
            bar.set_description("checking")
            return bar

    bar = Mine()
    trainer = FakeTrainer(bar, epochs=1, train=5, val=(2,))
    with pytest.raises(TypeError, match="train_progress_bar is not there yet"):
        _ = bar.train_progress_bar
    trainer.fit(after_step=clock.step(1))
    assert "Epoch 0: |5/5|, train_loss=0.2, val_acc=0.9" in target.getvalue()
    assert bar.train_progress_bar.n == 5
    assert capsys.readouterr().out == ""


def test_tqdm_refresh_rate_counts_batches(clock, terminal, monkeypatch):
    terminal.run(
        FakeTrainer(TQDMProgressBar(refresh_rate=20), epochs=1, train=50, val=()).fit, after_step=clock.step(1)
    )
    assert {int(n) for n in re.findall(r"(\d+)/50", terminal.getvalue())} <= {0, 1, 21, 41, 50}
    monkeypatch.setenv("TQDM_MINITERS", "7")
    assert TQDMProgressBar().refresh_rate == 7
    assert TQDMProgressBar(refresh_rate=0).is_disabled


def test_tqdm_prints_above_the_bar(clock, terminal):
    bar = TQDMProgressBar()

    def say(trainer):
        clock.now += 1
        bar.print("hello", trainer.global_step, sep="-")

    terminal.run(FakeTrainer(bar, epochs=1, train=2, val=()).fit, after_step=say)
    assert "hello-1\n" in terminal.getvalue()
    terminal.run(bar.print, "after")
    assert terminal.getvalue().endswith("after\n")


@pytest.mark.parametrize("n", [1, 1.0, 0.5, 12.3456, 1e-7, "12", "abc", "1.25"])
def test_tqdm_numbers_are_lightnings(n):
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm as Theirs

    from leyden.callbacks.progress_tqdm import Tqdm

    assert Tqdm.format_num(n) == Theirs.format_num(n)


# In a notebook.


def test_notebook_without_widgets_overwrites_one_line(clock, capsys, monkeypatch):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("leyden.callbacks.progress_rich._has_widgets", lambda: False)
    trainer = FakeTrainer(RichProgressBar(), epochs=2, train=20, val=())
    trainer.fit(after_step=clock.step(0.2))
    out = capsys.readouterr().out
    assert out.count("\r") > 10
    assert out.count("\n") <= 2
    assert "20/20" in out.split("\r")[-1]


# What subclasses and other code use.


def test_base_class():
    class Mine(ProgressBar):
        pass

    bar = Mine()
    with pytest.raises(TypeError, match="has no trainer yet"):
        _ = bar.trainer
    trainer = FakeTrainer(bar, train=7, val=(2, 3), test=(4,), predict=(5, 6))
    bar.setup(trainer, None, "fit")
    assert bar.trainer is trainer
    assert bar.total_train_batches == 7
    assert bar.total_val_batches == 5
    trainer.check_val_every_n_epoch = 2
    assert bar.total_val_batches == 0
    trainer.max_epochs, trainer.max_steps, trainer.global_step = -1, 10, 6
    assert bar.total_train_batches == 4
    assert bar.has_dataloader_changed(1)
    assert not bar.has_dataloader_changed(1)
    assert bar.total_val_batches_current_dataloader == 3
    assert bar.total_predict_batches_current_dataloader == 6
    bar.reset_dataloader_idx_tracker()
    assert bar.total_test_batches_current_dataloader == 4
    trainer.is_global_zero = False
    with pytest.raises(NotImplementedError, match="must implement `disable`"):
        bar.setup(trainer, None, "fit")


@pytest.mark.parametrize(
    ("versions", "shown"),
    [
        ([], {}),
        ([3], {"v_num": 3}),
        (["abcdef"], {"v_num": "cdef"}),
        ([1, 2], {"v_num": "1_2"}),
        ([1, 1], {"v_num": "1"}),
        ([""], {}),
        ([0], {"v_num": 0}),
    ],
    ids=str,
)
def test_v_num_is_lightnings(versions, shown):
    from lightning.pytorch.callbacks.progress.progress_bar import get_standard_metrics as theirs

    from leyden.callbacks.progress_bar import get_standard_metrics

    trainer = SimpleNamespace(loggers=[SimpleNamespace(version=version) for version in versions])
    assert get_standard_metrics(trainer) == shown == theirs(trainer)


def test_a_metric_that_hides_v_num_warns():
    trainer = FakeTrainer(loggers=LOGGERS)
    trainer.progress_bar_metrics = {"v_num": 9}
    with pytest.warns(UserWarning, match="shows v_num by itself"):
        assert RichProgressBar().get_metrics(trainer, None) == {"v_num": 9}


@BOTH
def test_pickle(cls, clock, terminal):
    bar = cls()
    pickled = []

    def copy(trainer):
        clock.now += 1
        bar._trainer = None
        pickled.append(pickle.dumps(bar))
        bar._trainer = trainer

    terminal.run(FakeTrainer(bar, epochs=1, train=2, val=()).fit, after_step=copy)
    assert pickle.loads(pickled[0])._bars == []


def test_line():
    bar = Bar("train", "Epoch 1", total=0, since=0.0)
    assert bar.line({}, 1.0) == "Epoch 1: 100% 0/0 [00:01<?, 0.00it/s]"
    bar = Bar("train", "Epoch 1", total=10**6, done=1, since=0.0)
    assert bar.line({"a": 1.0, "b": "x", "c": 3}, 4000.0).startswith("Epoch 1:   0% 1/1000000 [1:06:40<")
