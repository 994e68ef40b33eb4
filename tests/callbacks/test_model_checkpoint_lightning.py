"""ModelCheckpoint beside Lightning's own in one real Lightning run: the same files at the same moments."""

import logging
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.callbacks.checkpoint import ModelCheckpoint

lightning = pytest.importorskip("lightning.pytorch")

HOOKS = (
    "setup",
    "on_train_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_exception",
)


class TrainerView:
    """A Lightning trainer with the one name that Leyden's has in addition."""

    val_check_time = None

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class Adapter(lightning.callbacks.Checkpoint):
    """Leyden's callback inside Lightning."""

    def __init__(self, inner: ModelCheckpoint) -> None:
        self.inner = inner

    @property
    def state_key(self) -> str:
        return "Leyden" + self.inner.state_key

    def state_dict(self) -> dict:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.inner.load_state_dict(state_dict)


def _forward(name: str):
    def hook(self, trainer, *args: Any, **kwargs: Any) -> None:
        getattr(self.inner, name)(TrainerView(trainer), *args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(Adapter, _name, _forward(_name))


class Model(lightning.LightningModule):
    """Scores are scripted, so that what is best and what is kept is known."""

    scores = (3.0, 1.0, 2.0, 5.0, 1.0, float("nan"), 0.5, 4.0)

    def __init__(self, fail_at: int | None = None, manual: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)
        self.validations = 0
        self.fail_at = fail_at
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        if self.fail_at is not None and self.trainer.global_step == self.fail_at:
            raise ValueError("as planned")
        loss = self.layer(batch).sum()
        self.log("train_loss", float(self.trainer.global_step % 3))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.scores[self.validations % len(self.scores)])
        self.log("val/loss", 0.25)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validations += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(6, 32), batch_size=1)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(2, 32), batch_size=1)


class Listing(lightning.callbacks.Checkpoint):
    """What both folders hold after each moment that something can be saved at."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.seen: list[tuple[list[str], ...]] = []

    def look(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(tuple(contents(folder) for folder in self.folders))

    on_train_batch_end = on_validation_end = on_train_epoch_end = on_train_end = look


def contents(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found.append(f"{path.relative_to(folder)} -> {os.readlink(path)}")
        elif path.is_file():
            found.append(str(path.relative_to(folder)))
    return found


def run(tmp_path: Path, model: Any = None, ckpt_path: Any = None, options: dict | None = None, **trainer: Any):
    """One fit with both callbacks; returns ``(theirs, ours, listing)``."""
    theirs_dir, ours_dir = tmp_path / "theirs", tmp_path / "ours"
    options = options or {}
    their_class = lightning.callbacks.ModelCheckpoint
    theirs = their_class(dirpath=theirs_dir, **options)
    ours = ModelCheckpoint(dirpath=ours_dir, **options)
    listing = Listing(theirs_dir, ours_dir)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = lightning.Trainer(
            **{
                "max_epochs": 3,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "accelerator": "cpu",
                "callbacks": [theirs, Adapter(ours), listing],
                "log_every_n_steps": 1,
                **trainer,
            }
        )
        try:
            made.fit(model or Model(), ckpt_path=ckpt_path)
        except ValueError as error:
            if "as planned" not in str(error):
                raise
    return theirs, ours, listing


def relative(path: str, folder: Any) -> str:
    return os.path.relpath(path, folder) if path else ""


def state(callback: Any) -> dict:
    folder = callback.dirpath
    score = callback.best_model_score
    return {
        "best_model_path": relative(callback.best_model_path, folder),
        "best_model_score": None if score is None else float(score),
        "current_score": None if callback.current_score is None else float(callback.current_score),
        "best_k_models": {relative(path, folder): float(value) for path, value in callback.best_k_models.items()},
        "kth_best_model_path": relative(callback.kth_best_model_path, folder),
        "kth_value": float(callback.kth_value),
        "last_model_path": relative(callback.last_model_path, folder),
    }


def assert_same(theirs: Any, ours: ModelCheckpoint, listing: Listing) -> None:
    for number, (their_files, our_files) in enumerate(listing.seen):
        assert our_files == their_files, f"at moment {number}"
    assert listing.seen
    assert state(ours) == state(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.state_key == theirs.state_key


SAME = {
    "default": ({}, {}),
    "best": ({"monitor": "val_loss"}, {"max_epochs": 8}),
    "best three": ({"monitor": "val_loss", "save_top_k": 3, "filename": "{epoch}-{val_loss:.1f}"}, {"max_epochs": 8}),
    "best two, high": ({"monitor": "val_loss", "save_top_k": 2, "mode": "max"}, {"max_epochs": 8}),
    "all": ({"monitor": "val_loss", "save_top_k": -1}, {"max_epochs": 4}),
    "all, without a monitor": ({"save_top_k": -1}, {}),
    "none": ({"save_top_k": 0}, {}),
    "none but last": ({"save_top_k": 0, "save_last": True}, {}),
    "last": ({"save_last": True}, {}),
    "last of best": ({"monitor": "val_loss", "save_last": True}, {"max_epochs": 4}),
    "link": ({"save_last": "link", "monitor": "val_loss"}, {"max_epochs": 4}),
    "link to newest": ({"save_last": "link"}, {}),
    "every second epoch": ({"every_n_epochs": 2, "save_top_k": -1}, {"max_epochs": 5}),
    "every second epoch and last": ({"every_n_epochs": 2, "save_top_k": -1, "save_last": True}, {"max_epochs": 5}),
    "no epoch": ({"every_n_epochs": 0, "save_last": True}, {}),
    "after validation": ({"monitor": "val_loss", "save_on_train_epoch_end": False, "save_top_k": 2}, {}),
    "after each of several validations": (
        {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{step}-{val_loss:.2f}"},
        {"val_check_interval": 0.5},
    ),
    "every second epoch validated": ({"monitor": "val_loss"}, {"check_val_every_n_epoch": 2, "max_epochs": 5}),
    "no validation": ({"save_top_k": -1}, {"limit_val_batches": 0}),
    "train metric": ({"monitor": "train_loss", "save_top_k": 2}, {"max_epochs": 5}),
    "steps": ({"every_n_train_steps": 2, "save_top_k": -1}, {}),
    "steps, newest": ({"every_n_train_steps": 4, "save_last": True}, {}),
    "steps, train metric": (
        {"every_n_train_steps": 4, "monitor": "train_loss", "save_top_k": -1},
        {"limit_val_batches": 0},
    ),
    "steps while accumulating": ({"every_n_train_steps": 2, "save_top_k": -1}, {"accumulate_grad_batches": 2}),
    "steps, after validation": (
        {
            "every_n_train_steps": 2,
            "monitor": "val_loss",
            "save_top_k": -1,
            "save_on_train_epoch_end": False,
            "filename": "{step}-{val_loss:.2f}",
        },
        {},
    ),
    "all the time": ({"train_time_interval": timedelta(0), "save_top_k": -1}, {}),
    "rarely": ({"train_time_interval": timedelta(hours=1), "save_last": True}, {}),
    "one name": ({"filename": "model", "save_top_k": -1}, {}),
    "one name, overwritten": ({"filename": "model", "save_top_k": -1, "enable_version_counter": False}, {}),
    "one name, best": ({"filename": "model", "monitor": "val_loss", "save_top_k": 2}, {"max_epochs": 8}),
    "a metric with a slash": ({"filename": "{epoch}-{val/loss:.2f}", "monitor": "val/loss"}, {}),
    "a metric with a slash, without its name": (
        {"filename": "e{epoch:03d}-{val/loss:.2f}", "monitor": "val/loss", "auto_insert_metric_name": False},
        {},
    ),
    "a metric that is not there": ({"filename": "{epoch}-{nothing:.2f}"}, {}),
    "weights only": ({"save_weights_only": True, "save_last": True}, {}),
    "cut by max_steps": ({"save_top_k": -1}, {"max_steps": 8, "max_epochs": -1}),
    "fast_dev_run": ({}, {"fast_dev_run": True}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_files_at_the_same_moments(tmp_path, name):
    options, trainer = SAME[name]
    assert_same(*run(tmp_path, options=options, **trainer))


@pytest.mark.parametrize("name", ["best two, high", "last", "link", "all", "steps", "one name"])
def test_the_files_hold_the_same(tmp_path, name):
    options, trainer = SAME[name]
    theirs, ours, listing = run(tmp_path, options=options, **trainer)
    assert_same(theirs, ours, listing)
    for file in contents(Path(str(ours.dirpath))):
        file = file.split(" -> ")[0]
        one, other = (torch.load(os.path.join(str(each.dirpath), file), weights_only=True) for each in (theirs, ours))
        assert (one["epoch"], one["global_step"]) == (other["epoch"], other["global_step"])
        assert all(torch.equal(one["state_dict"][key], other["state_dict"][key]) for key in one["state_dict"])
        saved = dict(one["callbacks"][theirs.state_key]), dict(other["callbacks"]["Leyden" + ours.state_key])
        for each, folder in zip(saved, (theirs.dirpath, ours.dirpath), strict=True):
            for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
                each[key] = relative(each[key], folder)
            each["best_k_models"] = {relative(path, folder): score for path, score in each["best_k_models"].items()}
            each.pop("dirpath")
        assert saved[0] == saved[1]


@pytest.mark.parametrize("options", [{}, {"save_last": True}, {"monitor": "train_loss", "save_top_k": 2}])
def test_the_same_when_training_fails(tmp_path, options):
    options = {**options, "save_on_exception": True}
    theirs, ours, listing = run(tmp_path, model=Model(fail_at=8), options=options)
    listing.look()
    assert_same(theirs, ours, listing)


def test_the_same_with_manual_optimization(tmp_path):
    assert_same(*run(tmp_path, model=Model(manual=True), options={"every_n_train_steps": 2, "save_top_k": -1}))


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
        {"save_last": True},
        {"save_top_k": -1},
        {"every_n_train_steps": 4, "save_top_k": -1, "save_last": "link"},
    ],
)
def test_the_same_after_a_resume(tmp_path, options):
    def resumed(which: int):
        """Each goes on from a file of its own: only that one has its newest state."""
        folder = tmp_path / str(which)
        first = run(folder, options=options)
        newest = max(Path(str(first[which].dirpath)).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        second = run(folder, ckpt_path=newest, options=options, max_epochs=6)
        return [seen[which] for seen in second[2].seen], state(second[which])

    assert resumed(1) == resumed(0)


def test_a_score_from_before_validation_is_waited_for(tmp_path):
    """Differs: Lightning saves the last batch of an epoch with the score of the validation before."""
    options = {
        "every_n_train_steps": 6,
        "monitor": "val_loss",
        "save_top_k": -1,
        "filename": "{step}-{val_loss:.0f}",
        "auto_insert_metric_name": False,
    }
    theirs, ours, _ = run(tmp_path, options=options, num_sanity_val_steps=0)
    assert contents(Path(str(ours.dirpath))) == ["12-1.ckpt", "18-2.ckpt", "6-3.ckpt"]
    assert contents(Path(str(theirs.dirpath))) == ["12-3.ckpt", "18-1.ckpt"]


def test_a_train_metric_at_the_end_of_an_epoch_waits_as_well(tmp_path):
    """Differs only in the moment: the callback can't know that validation does not log it."""
    options = {"every_n_train_steps": 4, "monitor": "train_loss", "save_top_k": -1}
    theirs, ours, listing = run(tmp_path, options=options)
    assert listing.seen[-1][0] == listing.seen[-1][1] != []
    assert state(ours) == state(theirs)


def test_names_that_can_be_formatted_are_formatted_as_by_lightning():
    metrics = {
        "epoch": torch.tensor(3),
        "step": torch.tensor(40),
        "val_loss": torch.tensor(0.123456),
        "val/acc": torch.tensor(0.5),
        "val.acc": torch.tensor(0.25),
        "epoch_test": torch.tensor(7),
        "a b": torch.tensor(1.5),
    }
    templates = [
        None,
        "{epoch}",
        "{epoch:03d}-{step:05d}",
        "{val_loss:.2f}",
        "{val_loss}",
        "{val/acc:.1f}",
        "{val.acc}",
        "{epoch}{epoch_test}",
        "{epoch_test}-{epoch}",
        "{a b:.2e}",
        "plain",
        "{missing}",
        "{missing:.2f}",
        "x={epoch}-{epoch}",
        "{val_loss:>10.3f}",
    ]
    their_class = lightning.callbacks.ModelCheckpoint
    for insert in (True, False):
        for template in templates:
            theirs = their_class(filename=template, auto_insert_metric_name=insert)
            ours = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
            for more in ({}, {"ver": 2}, {"prefix": "run"}, {"filename": "{step}"}):
                assert ours.format_checkpoint_name(dict(metrics), **more) == theirs.format_checkpoint_name(
                    dict(metrics), **more
                )
