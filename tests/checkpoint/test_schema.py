"""checkpoint/schema.py: the position of a run, against files that Lightning itself wrote and reads."""

import copy
import logging
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.base.errors import CheckpointError
from leyden.checkpoint import io, schema
from leyden.checkpoint.schema import Position, loops_from_position, position_from_loops

# What Lightning writes in which hook, for an epoch of 3 batches and validation of 2
BATCHES = 3


# ---------------------------------------------------------------------------- Lightning, really run


@pytest.fixture(scope="module")
def lightning():
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning


def quiet(lightning, **options: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(
            **{
                "max_epochs": 2,
                "limit_train_batches": BATCHES,
                "limit_val_batches": 2,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
                "accelerator": "cpu",
                "num_sanity_val_steps": 0,
                **options,
            }
        )


def two_optimizers():
    from lightning.pytorch.demos.boring_classes import BoringModel

    class TwoOptimizers(BoringModel):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.step(batch))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.layer.parameters(), lr=0.1) for _ in range(2)]

    return TwoOptimizers()


def boring():
    from lightning.pytorch.demos.boring_classes import BoringModel

    return BoringModel()


SCENARIOS = {
    "plain": (boring, {}),
    "validation after each batch": (boring, {"val_check_interval": 1}),
    "accumulating": (boring, {"accumulate_grad_batches": 2}),
    "manual": (two_optimizers, {}),
    "no validation": (boring, {"limit_val_batches": 0}),
}


@pytest.fixture(scope="module")
def written(lightning, tmp_path_factory):
    """Scenario -> {"hook-epoch-batch": checkpoint}, one for each moment that a callback can save at."""

    def write(name: str) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("written")
        found: dict[str, Path] = {}

        class Save(lightning.callbacks.Callback):
            def save(self, trainer, hook: str, batch: int | None = None) -> None:
                key = f"{hook}-{trainer.current_epoch}" + ("" if batch is None else f"-{batch}")
                found[key] = folder / f"{key}.ckpt"
                trainer.save_checkpoint(found[key], weights_only=False)

            def on_train_start(self, trainer, module):
                self.save(trainer, "train_start")

            def on_train_epoch_start(self, trainer, module):
                self.save(trainer, "epoch_start")

            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                self.save(trainer, "batch_start", batch_idx)

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                self.save(trainer, "batch_end", batch_idx)

            def on_validation_batch_end(self, trainer, module, *args):
                self.save(trainer, "in_validation", trainer.fit_loop.epoch_loop.batch_idx)

            def on_validation_end(self, trainer, module):
                self.save(trainer, "validation_end", trainer.fit_loop.epoch_loop.batch_idx)

            def on_train_epoch_end(self, trainer, module):
                self.save(trainer, "epoch_end")

            def on_train_end(self, trainer, module):
                self.save(trainer, "train_end")

        model, options = SCENARIOS[name]
        callback = Save()
        trainer = quiet(lightning, callbacks=[callback], **options)
        trainer.fit(model())
        callback.save(trainer, "after")
        return found

    cache: dict[str, dict[str, Path]] = {}
    return lambda name: cache.setdefault(name, write(name)) if name not in cache else cache[name]


def read(path: Path) -> tuple[dict, Position]:
    checkpoint = io.load(path)
    schema.check(checkpoint, str(path))
    return checkpoint, position_from_loops(checkpoint["loops"], checkpoint["epoch"], checkpoint["global_step"])


def steps_after(batches: int, every: int = 1) -> int:
    """Steps in ``batches`` batches, over epochs; an epoch's last batch always steps."""
    epochs, rest = divmod(batches, BATCHES)
    return epochs * -(-BATCHES // every) + rest // every


def test_the_epoch_key_is_the_current_epoch(written):
    for name in SCENARIOS:
        for path in written(name).values():
            checkpoint, position = read(path)
            assert position.current_epoch == checkpoint["epoch"]
            assert position.global_step == checkpoint["global_step"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_positions_between_batches(written, name):
    every = SCENARIOS[name][1].get("accumulate_grad_batches", 1)
    for epoch in (0, 1):
        for batch in range(BATCHES):
            total = epoch * BATCHES + batch + 1
            _, position = read(written(name)[f"batch_end-{epoch}-{batch}"])
            assert position == Position(
                epoch=epoch,
                batch=batch + 1,
                global_step=2 * total if name == "manual" else steps_after(total, every),
                batches_that_stepped=steps_after(total, every),
                total_batches=total,
                val_done=False,
                is_last_batch=batch == BATCHES - 1,
                manual=name == "manual",
                stepped=batch == BATCHES - 1 or (batch + 1) % every == 0,
            )


@pytest.mark.parametrize("name", ["plain", "validation after each batch", "accumulating", "manual"])
def test_positions_around_validation(written, name):
    files = written(name)
    for key in files:
        hook, _, where = key.partition("-")
        if hook not in ("in_validation", "validation_end"):
            continue
        before, position = read(files[f"batch_end-{where}"])[1], read(files[key])[1]
        assert position == replace(before, val_done=hook == "validation_end")


@pytest.mark.parametrize("name", SCENARIOS)
def test_positions_between_epochs(written, name):
    files = written(name)
    assert read(files["train_start-0"])[1] == read(files["epoch_start-0"])[1] == Position()
    for epoch in (0, 1):
        at_end = read(files[f"epoch_end-{epoch}"])[1]
        last = read(files[f"batch_end-{epoch}-{BATCHES - 1}"])[1]
        assert at_end == replace(
            last, epoch=epoch + 1, batch=0, in_epoch_end=True, previous_batches=BATCHES, stepped=True
        )
        assert not at_end.cut
        after = read(files["epoch_start-1" if epoch == 0 else "train_end-2"])[1]
        assert after == replace(at_end, in_epoch_end=False)
    assert read(files["after-2"])[1] == read(files["train_end-2"])[1]


def test_a_batch_that_was_begun_is_to_be_run_again(written):
    files = written("plain")
    for batch in (1, 2):
        _, position = read(files[f"batch_start-0-{batch}"])
        assert (position.epoch, position.batch, position.is_last_batch) == (0, batch, False)
        assert position.batches_that_stepped == position.global_step == position.total_batches == batch


def test_an_epoch_cut_short_by_max_steps(lightning, tmp_path):
    class Save(lightning.callbacks.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt", weights_only=False)

    trainer = quiet(lightning, max_epochs=-1, max_steps=BATCHES + 1, callbacks=[Save()])
    trainer.fit(boring())
    assert not read(tmp_path / "0.ckpt")[1].cut
    _, position = read(tmp_path / "1.ckpt")
    assert position.cut
    assert (position.epoch, position.in_epoch_end, position.previous_batches) == (2, True, 1)


# ---------------------------------------------------------------------------- the way back: Lightning reads ours


def resume(lightning, path: Path, model, **options: Any) -> tuple[list[str], int, int]:
    trace: list[str] = []

    class Trace(lightning.callbacks.Callback):
        def on_train_epoch_start(self, trainer, module):
            trace.append(f"epoch {trainer.current_epoch}")

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            trace.append(f"batch {batch_idx}")

        def on_validation_start(self, trainer, module):
            trace.append("validation")

        def on_train_epoch_end(self, trainer, module):
            trace.append(f"end {trainer.current_epoch}")

    trainer = quiet(lightning, callbacks=[Trace()], **{**options, "max_epochs": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, ckpt_path=path)
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 3 * BATCHES
    return trace, trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        (name, moment)
        for name in SCENARIOS
        for moment in ("train_start-0", "batch_end-0-0", "batch_end-1-1", "batch_end-0-2", "epoch_end-0", "train_end-2")
    ]
    + [
        (name, moment)
        for name in ("plain", "validation after each batch", "accumulating", "manual")
        for moment in ("validation_end-0-2", "validation_end-1-2")
    ]
    + [("validation after each batch", "validation_end-0-0"), ("validation after each batch", "validation_end-1-1")],
)
def test_lightning_resumes_from_our_loops_as_from_its_own(lightning, written, tmp_path, name, moment):
    model, options = SCENARIOS[name]
    path = written(name)[moment]
    checkpoint, position = read(path)
    checkpoint["loops"] = loops_from_position(position)
    ours = tmp_path / "ours.ckpt"
    io.save(checkpoint, ours)
    assert resume(lightning, ours, model(), **options) == resume(lightning, path, model(), **options)


def test_lightning_does_not_skip_an_epoch_that_max_steps_would_make_it_skip(lightning, written, tmp_path):
    checkpoint, position = read(written("plain")["train_end-2"])
    checkpoint["loops"] = loops_from_position(position)
    io.save(checkpoint, tmp_path / "ours.ckpt")
    trainer = quiet(lightning, max_epochs=-1, max_steps=3 * BATCHES)
    trainer.fit(boring(), ckpt_path=tmp_path / "ours.ckpt")
    assert (trainer.current_epoch, trainer.global_step) == (3, 3 * BATCHES)


def test_lightning_validates_tests_and_predicts_from_our_loops(lightning, written, tmp_path):
    checkpoint, position = read(written("plain")["epoch_end-1"])
    checkpoint["loops"] = loops_from_position(position)
    ours = tmp_path / "ours.ckpt"
    io.save(checkpoint, ours)
    trainer = quiet(lightning, limit_test_batches=2, limit_predict_batches=2)
    assert len(trainer.validate(boring(), ckpt_path=ours, verbose=False)) == 1
    assert len(trainer.test(boring(), ckpt_path=ours, verbose=False)) == 1
    assert len(trainer.predict(boring(), ckpt_path=ours)) == 2


# ---------------------------------------------------------------------------- the structure


def structure(value: Any, top: bool = True) -> Any:
    if isinstance(value, dict):
        return {key: structure(each, False) for key, each in value.items() if not str(key).startswith("leyden")}
    return type(value)


def test_the_keys_are_those_of_lightning(written):
    checkpoint, position = read(written("plain")["validation_end-0-2"])
    assert structure(loops_from_position(position)) == structure(checkpoint["loops"])


def positions() -> list[Position]:
    inside = Position(epoch=2, batch=2, global_step=8, batches_that_stepped=8, total_batches=8)
    between = Position(
        epoch=3, global_step=9, batches_that_stepped=9, total_batches=9, is_last_batch=True, previous_batches=3
    )
    return [
        Position(),
        inside,
        replace(inside, val_done=True),
        replace(inside, is_last_batch=True),
        replace(inside, manual=True, global_step=16),
        replace(inside, stepped=False, global_step=4, batches_that_stepped=4),
        between,
        replace(between, in_epoch_end=True),
        replace(between, in_epoch_end=True, is_last_batch=False),
    ]


@pytest.mark.parametrize("position", positions())
def test_a_position_comes_back_exactly(position):
    assert position_from_loops(loops_from_position(position), epoch=99, global_step=99) == position


@pytest.mark.parametrize("position", positions())
def test_a_position_survives_without_our_own_entry(position):
    """As when Lightning's own counters are all there is; only what it does not store between epochs is lost."""
    loops = loops_from_position(position)
    loops["fit_loop"]["state_dict"] = {}
    back = position_from_loops(loops)
    if position.batch == 0 and not position.in_epoch_end:
        position = replace(position, is_last_batch=False, previous_batches=0)
    assert back == position


def test_the_entry_is_plain_data(tmp_path):
    io.save({"loops": loops_from_position(Position(epoch=1), [{"position": 3}])}, tmp_path / "a.ckpt")
    loops = io.load(tmp_path / "a.ckpt")["loops"]
    assert position_from_loops(loops) == Position(epoch=1)
    assert schema.loader_states(loops) == [{"position": 3}]
    assert schema.loader_states({}) == []


def test_a_later_version_may_add_to_a_position():
    loops = loops_from_position(Position(epoch=1))
    loops["fit_loop"]["state_dict"]["leyden_position"]["added_later"] = 1
    assert position_from_loops(loops) == Position(epoch=1)


def test_without_counters_the_keys_are_taken():
    assert position_from_loops({}, epoch=4, global_step=40) == Position(
        epoch=4, global_step=40, batches_that_stepped=40
    )


def test_counters_that_make_no_sense_are_named():
    loops = loops_from_position(Position(epoch=1))
    loops["fit_loop"]["state_dict"] = {}
    for broken in ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.automatic_optimization.optim_progress"):
        bad = copy.deepcopy(loops)
        bad["fit_loop"][broken] = {"total": None, "current": {}}
        with pytest.raises(CheckpointError, match="`loops` can't be understood"):
            position_from_loops(bad)
    bad = copy.deepcopy(loops)
    bad["fit_loop"]["state_dict"]["leyden_position"] = {**asdict(Position()), "batch": -1}
    with pytest.raises(CheckpointError, match="negative batch"):
        position_from_loops(bad)


# ---------------------------------------------------------------------------- check, migrate


def test_check_names_what_is_wrong():
    assert schema.check({"state_dict": {}}) == {"state_dict": {}}
    with pytest.raises(CheckpointError, match=r"'a.ckpt' holds a list"):
        schema.check([1], "a.ckpt")
    with pytest.raises(CheckpointError, match=r"no 'state_dict' \(it holds 'weight'\)"):
        schema.check({"weight": torch.ones(1)})


def test_check_warns_of_files_from_the_future():
    future = {"state_dict": {}, "pytorch-lightning_version": "9.1.0"}
    with pytest.warns(UserWarning, match=r"9\.1\.0, newer"):
        schema.check(future)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema.check({"state_dict": {}, "pytorch-lightning_version": "2.6.99"})
        schema.check({"state_dict": {}, "pytorch-lightning_version": "1.9.0"})


def test_a_weights_only_file_can_not_continue_a_training():
    schema.require_training_state({"optimizer_states": [], "lr_schedulers": []})
    with pytest.raises(CheckpointError, match=r"no optimizer_states and no lr_schedulers.*load_from_checkpoint"):
        schema.require_training_state({"state_dict": {}}, "a.ckpt")


def test_a_file_of_lightning_1_is_understood(written):
    checkpoint, expected = read(written("plain")["batch_end-1-1"])
    fit = checkpoint["loops"]["fit_loop"]
    moves = {
        "epoch_loop.automatic_optimization.optim_progress": "epoch_loop.batch_loop.optimizer_loop.optim_progress",
        "epoch_loop.manual_optimization.optim_step_progress": "epoch_loop.batch_loop.manual_loop.optim_step_progress",
        "epoch_loop.val_loop.batch_progress": "epoch_loop.val_loop.epoch_loop.batch_progress",
    }
    for new, old in moves.items():
        fit[old] = fit.pop(new)
    old_key = "ModelCheckpoint{'monitor': None, 'train_time_interval': None, 'save_on_train_epoch_end': True}"
    checkpoint["callbacks"] = {old_key: {"x": 1}, "Timer": {}}
    checkpoint["native_amp_scaling_state"] = {"scale": 2.0}
    checkpoint["hparams"] = {"lr": 1}
    migrated = schema.migrate(checkpoint)
    assert migrated is checkpoint
    assert position_from_loops(migrated["loops"]) == expected
    assert migrated["callbacks"] == {
        "ModelCheckpoint{'monitor': None, 'train_time_interval': None}": {"x": 1},
        "Timer": {},
    }
    assert migrated["MixedPrecision"] == {"scale": 2.0}
    assert migrated["hyper_parameters"] == {"lr": 1}
    keys = list(migrated)
    assert list(schema.migrate(migrated)) == keys  # a second time changes nothing


def test_two_old_states_that_would_share_a_key_stay_apart():
    states = {f"ModelCheckpoint{{'monitor': None, 'save_on_train_epoch_end': {each}}}": {} for each in (True, False)}
    assert schema.migrate({"callbacks": dict(states)})["callbacks"] == states
