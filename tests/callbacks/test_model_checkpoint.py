"""ModelCheckpoint and its parts, with a small trainer that only saves: what Lightning can't be asked for."""

import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leyden.base import files, log
from leyden.base.errors import MisconfigurationException
from leyden.base.states import TrainerFn
from leyden.callbacks import checkpoint_names as names
from leyden.callbacks.checkpoint import ModelCheckpoint
from leyden.callbacks.checkpoint_timing import validation_follows
from leyden.callbacks.exception_checkpoint import OnExceptionCheckpoint
from leyden.callbacks.shared_clock import SharedClock
from leyden.checkpoint import io


class FakeStrategy:
    world_size = 1

    def __init__(self) -> None:
        self.reduced: list[tuple[bool, bool]] = []

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def barrier(self, name: str | None = None) -> None:
        pass

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self.reduced.append((decision, all))
        return decision

    def remove_checkpoint(self, path: str) -> None:
        io.TorchCheckpointIO().remove_checkpoint(path)


class FakeTrainer:
    """What ModelCheckpoint looks at. `train` runs one batch and calls the hooks that are due."""

    fast_dev_run: int | bool = False
    sanity_checking = False
    is_global_zero = True
    check_val_every_n_epoch: int | None = 1
    val_check_interval = 1.0
    val_check_time = None
    val_check_batch: int | float | None = 2
    limit_train_batches = 1.0
    enable_validation = True
    ckpt_path: str | None = None

    def __init__(self, root: Path, callback: Any, **attributes: Any) -> None:
        self.default_root_dir = str(root)
        self.callback = callback
        self.strategy = FakeStrategy()
        self.state = SimpleNamespace(fn=TrainerFn.FITTING)
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.num_val_batches = [1]
        self.current_epoch = 0
        self.global_step = 0
        self.progress = SimpleNamespace(is_last_batch=False, total=SimpleNamespace(ready=0))
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=self.progress))
        self.save_error: BaseException | None = None
        self.saved: list[str] = []
        for name, value in attributes.items():
            setattr(self, name, value)
        callback.setup(self, None, "fit")

    def save_checkpoint(self, path: str, weights_only: bool | None = None, storage_options: Any = None) -> None:
        if self.save_error is not None:
            raise self.save_error
        io.save({"state": self.callback.state_dict(), "step": self.global_step, "weights_only": weights_only}, path)
        self.saved.append(os.path.basename(path))

    def train(self, batch_idx: int = 0, steps: int = 1, **metrics: float) -> None:
        self.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        self.global_step += steps
        self.progress.total.ready += 1
        self.callback.on_train_batch_end(self, None, {}, None, batch_idx)

    def end_epoch(self, **metrics: float) -> None:
        self.train(**metrics)
        self.callback.on_train_epoch_end(self, None)
        self.current_epoch += 1


def make(root: Path, attributes: dict | None = None, **options: Any) -> tuple[ModelCheckpoint, FakeTrainer]:
    callback = ModelCheckpoint(**{"dirpath": root / "saved", **options})
    trainer = FakeTrainer(root, callback, **(attributes or {}))
    callback.on_train_start(trainer, None)
    return callback, trainer


def saved(root: Path) -> list[str]:
    return sorted(os.listdir(root / "saved"))


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(log, "_said", set())


# ---------------------------------------------------------------------------- arguments


def test_all_wrong_arguments_are_named_at_once():
    with pytest.raises(MisconfigurationException) as caught:
        ModelCheckpoint(mode="best", save_top_k=-2, every_n_train_steps=-1, every_n_epochs=-1, save_last="lnk")
    text = str(caught.value)
    for part in ("mode='best'", "save_top_k=-2", "every_n_train_steps=-1", "every_n_epochs=-1", "save_last='lnk'"):
        assert part in text
    assert "5 problems" in text


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_train_steps": 2, "every_n_epochs": 1},
        {"every_n_train_steps": 2, "train_time_interval": timedelta(hours=1)},
        {"every_n_epochs": 2, "train_time_interval": timedelta(hours=1)},
    ],
)
def test_triggers_exclude_each_other(options):
    with pytest.raises(MisconfigurationException, match="mutually exclusive: use one ModelCheckpoint for each"):
        ModelCheckpoint(**options)


def test_several_best_ones_need_a_monitor():
    with pytest.raises(MisconfigurationException, match=r"save_top_k=3 needs a metric.*monitor="):
        ModelCheckpoint(save_top_k=3)


def test_switched_off_triggers_are_no_conflict():
    callback = ModelCheckpoint(every_n_train_steps=0, every_n_epochs=2)
    assert callback.every_n_epochs == 2


def test_two_callbacks_that_differ_in_a_trigger_have_different_keys():
    made = [ModelCheckpoint(), ModelCheckpoint(every_n_train_steps=5), ModelCheckpoint(monitor="x")]
    assert len({each.state_key for each in made}) == 3


# ---------------------------------------------------------------------------- where


def test_the_folder_comes_from_the_logger(tmp_path):
    logger = SimpleNamespace(save_dir=str(tmp_path / "logs"), name="run", version=3)
    callback = ModelCheckpoint()
    FakeTrainer(tmp_path, callback, loggers=[logger])
    assert callback.dirpath == str(tmp_path / "logs" / "run" / "version_3" / "checkpoints")


@pytest.mark.parametrize(("version", "folder"), [("abc", "abc"), (None, "version_None")])
def test_a_version_that_is_text_is_taken_as_it_is(tmp_path, version, folder):
    logger = SimpleNamespace(save_dir=None, name="run", version=version)
    callback = ModelCheckpoint()
    FakeTrainer(tmp_path, callback, loggers=[logger])
    assert callback.dirpath == str(tmp_path / "run" / folder / "checkpoints")


def test_without_a_logger_it_is_in_the_root(tmp_path):
    callback = ModelCheckpoint()
    FakeTrainer(tmp_path, callback)
    assert callback.dirpath == str(tmp_path / "checkpoints")


def test_a_folder_with_something_in_it_is_warned_about(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "old.ckpt").write_text("")
    with pytest.warns(UserWarning, match="already has files in it"):
        make(tmp_path)


def test_what_a_killed_run_left_is_swept(tmp_path):
    rest = tmp_path / "saved" / ".a.ckpt.123.unfinished"
    rest.parent.mkdir()
    rest.write_text("half")
    os.utime(rest, (1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path)
    assert saved(tmp_path) == []


def test_a_link_needs_a_local_folder(tmp_path):
    with pytest.raises(ValueError, match=r"memory://x.*pass save_last=True"):
        make(tmp_path, dirpath="memory://x", save_last="link")


def test_remote_folder(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    callback, trainer = make(tmp_path, dirpath="memory://mc-test/run", save_last=True)
    for _ in range(2):
        trainer.end_epoch()
    found = [path.rsplit("/", 1)[1] for path in files.list_dir("memory://mc-test/run")]
    assert found == ["epoch=1-step=2.ckpt", "last.ckpt"]
    assert callback.best_model_path == "memory://mc-test/run/epoch=1-step=2.ckpt"
    assert io.load(callback.best_model_path)["step"] == 2
    trainer.ckpt_path = callback.best_model_path  # a training that goes on from a file keeps it, as it does a local one
    trainer.end_epoch()
    assert callback.best_model_path == "memory://mc-test/run/epoch=2-step=3.ckpt"
    assert files.exists(trainer.ckpt_path)
    callback.best_model_path = elsewhere = "memory://mc-test/runs/other.ckpt"
    io.save({"state_dict": {}}, elsewhere)
    trainer.end_epoch()
    assert files.exists(elsewhere), "a file outside of dirpath is not this callback's to remove"
    fsspec.filesystem("memory").rm("/mc-test", recursive=True)


# ---------------------------------------------------------------------------- faults


def test_a_failed_save_leaves_the_record_and_the_files_as_they_were(tmp_path):
    callback, trainer = make(tmp_path, monitor="loss", save_last=True)
    trainer.end_epoch(loss=1.0)
    before, listing = dict(callback.state_dict()), saved(tmp_path)
    trainer.save_error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        trainer.end_epoch(loss=0.5)
    assert callback.state_dict() == before
    assert saved(tmp_path) == listing == ["epoch=0-step=1.ckpt", "last.ckpt"]

    trainer.save_error = None
    trainer.end_epoch(loss=0.25)
    assert float(callback.best_model_score) == 0.25
    assert saved(tmp_path) == ["epoch=1-step=3.ckpt", "last.ckpt"]


def test_the_new_file_is_there_before_the_old_one_goes(tmp_path, monkeypatch):
    _, trainer = make(tmp_path, monitor="loss")
    trainer.end_epoch(loss=1.0)
    seen = []
    monkeypatch.setattr(FakeStrategy, "remove_checkpoint", lambda self, path: seen.append((path, saved(tmp_path))))
    trainer.end_epoch(loss=0.5)
    [(removed, there)] = seen
    assert os.path.basename(removed) == "epoch=0-step=1.ckpt"
    assert there == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"]


def test_an_old_file_that_can_not_be_removed_does_not_end_the_training(tmp_path, monkeypatch):
    callback, trainer = make(tmp_path)
    trainer.end_epoch()

    def fail(self, path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(FakeStrategy, "remove_checkpoint", fail)
    with pytest.warns(UserWarning, match=r"could not remove.*step=1.ckpt.*Permission denied"):
        trainer.end_epoch()
    assert os.path.basename(callback.best_model_path) == "epoch=1-step=2.ckpt"


def test_the_file_that_was_resumed_from_stays(tmp_path):
    callback, trainer = make(tmp_path)
    trainer.end_epoch()
    trainer.ckpt_path = callback.best_model_path
    trainer.end_epoch()
    trainer.end_epoch()
    assert saved(tmp_path) == ["epoch=0-step=1.ckpt", "epoch=2-step=3.ckpt"]


def test_a_file_outside_the_folder_stays(tmp_path):
    callback, trainer = make(tmp_path)
    other = tmp_path / "other.ckpt"
    other.write_text("mine")
    callback.best_model_path = str(other)
    trainer.end_epoch()
    assert other.read_text() == "mine"


def test_on_exception_the_first_error_stays_the_one_to_be_seen(tmp_path):
    callback, trainer = make(tmp_path, save_on_exception=True)
    trainer.train()
    trainer.save_error = OSError(28, "No space left on device")
    with pytest.warns(UserWarning, match=r"could not save a checkpoint after ValueError.*No space"):
        callback.on_exception(trainer, None, ValueError("first"))
    trainer.save_error = None
    callback.on_exception(trainer, None, KeyboardInterrupt())
    assert saved(tmp_path) == ["epoch=0-step=1.ckpt"]
    callback.on_exception(trainer, None, KeyboardInterrupt())
    assert trainer.saved == ["epoch=0-step=1.ckpt"]  # this step is saved already


def test_nothing_is_saved_outside_of_fit(tmp_path):
    for attributes in ({"fast_dev_run": 1}, {"sanity_checking": True}):
        callback, trainer = make(tmp_path, attributes, save_on_exception=True, save_last=True)
        trainer.end_epoch()
        callback.on_exception(trainer, None, ValueError())
        assert trainer.saved == []
    trainer.state.fn = TrainerFn.VALIDATING
    callback.on_validation_end(trainer, None)
    assert trainer.saved == []


# ---------------------------------------------------------------------------- metrics


def test_a_metric_that_never_comes_is_an_error_that_names_the_ones_there_are(tmp_path):
    callback, trainer = make(tmp_path, monitor="val_loss", save_on_train_epoch_end=True)
    with pytest.warns(UserWarning, match=r"monitor='val_loss'.*'train_loss'"):
        trainer.end_epoch(train_loss=1.0)
    callback.on_validation_end(trainer, None)
    with pytest.raises(MisconfigurationException, match=r"self.log\('val_loss', value\)"):
        trainer.end_epoch()


def test_a_metric_that_the_name_lacks_is_said_once(tmp_path):
    _, trainer = make(tmp_path, filename="{epoch}-{typo:.2f}")
    with pytest.warns(UserWarning, match="'typo' was not logged"):
        trainer.end_epoch(loss=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.end_epoch(loss=1.0)
    assert saved(tmp_path) == ["epoch=1-typo=0.00.ckpt"]


def test_not_a_number_is_never_the_best(tmp_path):
    callback, trainer = make(tmp_path, monitor="loss")
    trainer.end_epoch(loss=math.nan)
    assert float(callback.best_model_score) == math.inf
    trainer.end_epoch(loss=5.0)
    trainer.end_epoch(loss=math.nan)
    assert float(callback.best_model_score) == 5.0
    assert saved(tmp_path) == ["epoch=1-step=2.ckpt"]


def test_numbers_that_are_not_tensors_do_as_well(tmp_path):
    callback, trainer = make(tmp_path, monitor="loss", filename="{loss:.1f}")
    trainer.callback_metrics["loss"] = 1.5
    trainer.end_epoch()
    assert saved(tmp_path) == ["loss=1.5.ckpt"]
    assert float(callback.best_model_score) == 1.5


def test_ranks_that_disagree_do_not_save(tmp_path, monkeypatch):
    callback, trainer = make(tmp_path, monitor="loss")
    trainer.end_epoch(loss=1.0)
    monkeypatch.setattr(FakeStrategy, "reduce_boolean_decision", lambda self, decision, all=True: decision and not all)
    trainer.end_epoch(loss=0.5)
    assert saved(tmp_path) == ["epoch=0-step=1.ckpt"]
    assert float(callback.best_model_score) == 1.0


def test_a_saved_score_does_not_change_with_the_metric(tmp_path):
    callback, trainer = make(tmp_path, monitor="loss")
    metric = torch.tensor(1.0)
    trainer.callback_metrics["loss"] = metric
    trainer.end_epoch()
    metric.fill_(9.0)
    assert float(callback.best_model_score) == 1.0


# ---------------------------------------------------------------------------- triggers


def test_two_optimizers_do_not_step_over_a_save(tmp_path):
    _, trainer = make(tmp_path, every_n_train_steps=3, save_top_k=-1)
    for _ in range(5):
        trainer.train(steps=2)
    assert trainer.saved == ["epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt", "epoch=0-step=10.ckpt"]


def test_by_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("leyden.callbacks.checkpoint.time.monotonic", lambda: now[0])
    _, trainer = make(tmp_path, train_time_interval=timedelta(seconds=10), save_top_k=-1)
    for _ in range(8):
        now[0] += 4
        trainer.train()
    assert trainer.saved == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]


def test_a_step_save_waits_for_the_metric_and_is_not_lost(tmp_path):
    callback, trainer = make(tmp_path, monitor="val_loss", every_n_train_steps=1, save_top_k=-1)
    trainer.train(batch_idx=0)
    assert trainer.saved == []
    trainer.callback_metrics["val_loss"] = torch.tensor(1.0)
    callback.on_validation_end(trainer, None)
    assert trainer.saved == ["epoch=0-step=1.ckpt"]
    trainer.train(batch_idx=1)  # validation follows this one: the score is about to change
    assert trainer.saved == ["epoch=0-step=1.ckpt"]
    callback.on_validation_end(trainer, None)
    assert trainer.saved[1:] == ["epoch=0-step=2.ckpt"]


def calls_of(function, *args) -> int:
    count = 0

    def profiler(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profiler)
    function(*args)
    sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "options", [{}, {"every_n_train_steps": 1000}, {"train_time_interval": timedelta(hours=1)}, {"every_n_epochs": 3}]
)
def test_a_batch_that_saves_nothing_costs_next_to_nothing(tmp_path, options):
    callback, trainer = make(tmp_path, **options)
    trainer.global_step = 7
    assert calls_of(callback.on_train_batch_end, trainer, None, {}, None, 3) <= 2


# ---------------------------------------------------------------------------- the clock


class SharedStrategy:
    world_size = 2

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def broadcast(self, value: Any, src: int = 0) -> Any:
        self.answers.append(value)
        return value


def due_after(seconds: float, pace: Callable[[float], float]) -> tuple[list[float], int]:
    """When a clock of 100 seconds is due within ``seconds``, and how often rank 0 was asked."""
    now = [0.0]
    strategy = SharedStrategy()
    clock = SharedClock(100.0, strategy, lambda: now[0])
    due_at = []
    while now[0] < seconds:
        now[0] += pace(now[0])
        if clock.due():
            due_at.append(now[0])
    return due_at, len(strategy.answers)


def test_the_shared_clock_is_rarely_asked_and_never_much_late():
    due_at, questions = due_after(1000, lambda now: 0.01)
    gaps = [b - a for a, b in zip([0.0, *due_at], due_at, strict=False)]
    assert len(gaps) == 9
    assert all(99.9 <= gap < 100.1 for gap in gaps)
    assert questions < 2000  # of 100,000 batches


@pytest.mark.parametrize("quick", [0.0, 10.0])
def test_the_shared_clock_is_not_much_late_when_batches_become_slow(quick):
    due_at, _ = due_after(1000, lambda now: 0.001 if now <= quick else 0.5)
    assert 100 <= due_at[0] < 100 + 0.5 * SharedClock.MOST_BATCHES_BETWEEN_ANSWERS


def test_all_ranks_follow_rank_zero():
    times = [0.0, 0.0]
    sent: list[Any] = []

    class Leader:
        world_size = 2

        def broadcast(self, value: Any, src: int = 0) -> Any:
            sent.append(value)
            return value

    class Follower:
        world_size = 2
        received = 0

        def broadcast(self, value: Any, src: int = 0) -> Any:
            self.received += 1
            return sent[self.received - 1]

    leader = SharedClock(10.0, Leader(), lambda: times[0])
    follower = SharedClock(10.0, Follower(), lambda: times[1])
    agreed = []
    for _ in range(500):
        times[0] += 0.1
        times[1] += 0.37  # its own clock runs wild
        one, other = leader.due(), follower.due()
        assert one == other
        agreed.append(one)
    assert sum(agreed) == 4


def test_a_zero_interval_is_due_each_time():
    for strategy in (FakeStrategy(), SharedStrategy()):
        clock = SharedClock(0.0, strategy, time.monotonic)
        assert all(clock.due() for _ in range(5))


# ---------------------------------------------------------------------------- will validation follow


@pytest.mark.parametrize(
    ("attributes", "batch_idx", "expected"),
    [
        ({}, 1, True),
        ({}, 0, False),
        ({"enable_validation": False}, 1, False),
        ({"num_val_batches": [0]}, 1, False),
        ({"num_val_batches": []}, 1, False),
        ({"check_val_every_n_epoch": 2}, 1, False),
        ({"check_val_every_n_epoch": 2, "current_epoch": 1}, 1, True),
        ({"check_val_every_n_epoch": None, "val_check_batch": 5}, 1, True),
        ({"check_val_every_n_epoch": None, "val_check_batch": 3}, 1, False),
        ({"val_check_batch": None}, 1, False),
        ({"val_check_batch": math.inf}, 1, False),
        ({"val_check_batch": math.inf, "limit_train_batches": 2}, 1, True),
    ],
)
def test_validation_follows(tmp_path, attributes, batch_idx, expected):
    trainer = FakeTrainer(tmp_path, ModelCheckpoint(), **attributes)
    trainer.progress.total.ready = 5
    assert validation_follows(trainer, batch_idx) is expected
    trainer.progress.is_last_batch = True
    if attributes == {"val_check_batch": math.inf}:
        assert validation_follows(trainer, batch_idx)


# ---------------------------------------------------------------------------- last, state, resume


def test_last_keeps_its_name_when_training_goes_on_in_the_folder(tmp_path):
    callback, trainer = make(tmp_path, save_last=True)
    trainer.end_epoch()
    first = io.load(callback.best_model_path)["state"]
    assert first["last_model_path"] == ""  # it was written before there was a last file

    callback, trainer = make(tmp_path, {"ckpt_path": callback.best_model_path, "global_step": 1}, save_last=True)
    callback.load_state_dict(first)
    trainer.end_epoch()
    assert "last.ckpt" in saved(tmp_path)
    assert "last-v1.ckpt" not in saved(tmp_path)


def test_a_new_run_in_the_folder_does_not_overwrite_last(tmp_path):
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            callback, trainer = make(tmp_path, save_last=True)
        trainer.end_epoch()
    assert [name for name in saved(tmp_path) if name.startswith("last")] == ["last-v1.ckpt", "last.ckpt"]
    assert os.path.basename(callback.last_model_path) == "last-v1.ckpt"


def test_last_may_be_a_template(tmp_path):
    callback, trainer = make(tmp_path, save_last=True)
    callback.CHECKPOINT_NAME_LAST = "{epoch}-last"
    trainer.end_epoch()
    trainer.end_epoch()
    (tmp_path / "saved" / "lasting.ckpt").write_text("")
    (tmp_path / "saved" / "epoch=7-last.txt").write_text("")
    found = callback._find_last_checkpoints(trainer)
    assert {os.path.basename(path) for path in found} == {"epoch=1-last.ckpt"}
    assert "epoch=0-last.ckpt" not in saved(tmp_path)  # the one before was its own and is gone


def test_last_files_of_any_version_are_found(tmp_path):
    callback, trainer = make(tmp_path)
    for name in ("last.ckpt", "last-v1.ckpt", "last-v22.ckpt", "lasting.ckpt", "last.txt", "my-last.ckpt"):
        files.makedirs(tmp_path / "saved")
        (tmp_path / "saved" / name).write_text("")
    found = callback._find_last_checkpoints(trainer)
    assert {os.path.basename(path) for path in found} == {"last.ckpt", "last-v1.ckpt", "last-v22.ckpt"}


def test_state_goes_round(tmp_path):
    callback, trainer = make(tmp_path, monitor="loss", save_top_k=2, save_last=True)
    for loss in (3.0, 1.0, 2.0):
        trainer.end_epoch(loss=loss)
    path = tmp_path / "state.ckpt"
    io.save(callback.state_dict(), path)  # plain enough for a safe load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, _ = make(tmp_path, monitor="loss", save_top_k=2, save_last=True)
    again.load_state_dict(io.load(path))
    expected = callback.state_dict()
    expected["current_score"] = None  # as in Lightning, not taken over
    assert again.state_dict() == expected


def test_in_another_folder_only_the_best_path_is_taken_over(tmp_path):
    callback, trainer = make(tmp_path, monitor="loss")
    trainer.end_epoch(loss=1.0)
    other, _ = make(tmp_path, monitor="loss", dirpath=tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="only `best_model_path` is taken over"):
        other.load_state_dict(callback.state_dict())
    assert other.best_model_path == callback.best_model_path
    assert other.best_k_models == {}
    assert other.best_model_score is None


def test_yaml_of_the_best(tmp_path):
    import yaml

    callback, trainer = make(tmp_path, monitor="loss", save_top_k=2)
    for loss in (1.0, 0.5):
        trainer.end_epoch(loss=loss)
    callback.to_yaml()
    written = yaml.safe_load((tmp_path / "saved" / "best_k_models.yaml").read_text())
    assert written == {path: float(score) for path, score in callback.best_k_models.items()}
    callback.to_yaml(tmp_path / "other.yaml")
    assert (tmp_path / "other.yaml").exists()


def test_loggers_are_told(tmp_path):
    told = []
    logger = SimpleNamespace(
        save_dir=str(tmp_path), name="n", version=0, after_save_checkpoint=lambda cb: told.append(cb.best_model_path)
    )
    callback, trainer = make(tmp_path, {"loggers": [logger]})
    trainer.end_epoch()
    assert told == [callback.best_model_path]


# ---------------------------------------------------------------------------- names


def test_a_format_that_does_not_suit_its_value_is_named():
    with pytest.raises(ValueError, match=r"'\{loss:d\}'.*loss=0.5"):
        names.render("{loss:d}", {"loss": 0.5}, "=")


def test_a_name_that_is_taken_gets_a_version():
    taken = {"a", "a-v1"}
    found = names.unused_name(lambda version: "a" if version is None else f"a-v{version}", taken.__contains__, 1)
    assert found == "a-v2"


def test_missing_names_are_listed_in_order():
    assert names.missing_names("{b:.1f}-{epoch}-{a}", {"epoch": 1}) == ["b", "a"]


# ---------------------------------------------------------------------------- on exception


def test_on_exception_checkpoint(tmp_path):
    callback = OnExceptionCheckpoint(tmp_path / "saved")
    trainer = FakeTrainer(tmp_path, callback)
    trainer.global_step = 3
    assert callback.ckpt_path == str(tmp_path / "saved" / "on_exception.ckpt")
    callback.on_exception(trainer, None, ValueError("x"))
    callback.on_exception(trainer, None, ValueError("x"))  # overwritten
    assert saved(tmp_path) == ["on_exception.ckpt"]

    callback.teardown(trainer, None, "test")  # a test in between leaves it for the next fit
    assert saved(tmp_path) == ["on_exception.ckpt"]
    callback.teardown(trainer, None, "fit")
    assert saved(tmp_path) == []
    callback.teardown(trainer, None, "fit")

    trainer.state.fn = TrainerFn.TESTING
    callback.on_exception(trainer, None, ValueError("x"))
    assert saved(tmp_path) == []


def test_on_exception_checkpoint_never_hides_the_error(tmp_path):
    callback = OnExceptionCheckpoint(tmp_path / "saved", filename="rescue")
    trainer = FakeTrainer(tmp_path, callback, save_error=AttributeError("no model attached"))
    with pytest.warns(UserWarning, match=r"rescue.ckpt.*ValueError: no model attached"):
        callback.on_exception(trainer, None, ValueError("x"))
    with pytest.raises(ValueError, match="filename=''"):
        OnExceptionCheckpoint(tmp_path, filename="")
