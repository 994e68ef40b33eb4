"""A run that is interrupted and resumed against the run that was not."""

import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import rank_scripts
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import leyden as L
from leyden.base.errors import MisconfigurationException, UnsafeCheckpointError
from leyden.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
X = torch.arange(66, dtype=torch.float32).reshape(22, 3).sin()
Y = X.sum(1, keepdim=True).cos()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(L.LightningModule):
    """One optimizer with momentum; ``kind`` chooses the scheduler."""

    def __init__(self, kind="none"):
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.kind = kind
        self.seen = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, round(float(batch[0].sum()), 5)))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.kind == "none":
            return optimizer
        if self.kind == "step":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        if self.kind == "step frequency":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 3}]
        if self.kind == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
        assert self.kind == "plateau"
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class TwoOptimizers(Net):
    def __init__(self, kind="none"):
        super().__init__(kind)
        self.automatic_optimization = False
        self.other = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, round(float(batch[0].sum()), 5)))
        first, second = self.optimizers()
        scheduler = self.lr_schedulers()
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2 == 0:
            loss = nn.functional.mse_loss(self.other(batch[0]), batch[1])
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            scheduler.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.layer.parameters(), lr=0.02)
        second = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.95)]


def train_loader(batch=2, rows=22):
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), batch)


def val_loader():
    return DataLoader(TensorDataset(X[:5], Y[:5]), 2)


class SavesAt(Callback):
    """Saves ``path`` when ``hook`` is called for the n-th time; then the run is broken off, if ``end``."""

    def __init__(self, path, hook, n, end=True):
        self.path, self.hook, self.n, self.end = path, hook, n, end
        setattr(self, hook, self._count)

    def _count(self, trainer, *args):
        self.n -= 1
        if self.n == 0:
            trainer.save_checkpoint(self.path)
            if self.end:
                raise KeyError("broken off")


def fit(module, *callbacks, ckpt_path=None, train=None, **more):
    arguments = {**QUIET, "max_epochs": 3, "enable_checkpointing": False, **more}
    trainer = L.Trainer(callbacks=list(callbacks), **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, train_loader() if train is None else train, val_loader(), ckpt_path=ckpt_path)
    return trainer


def everything(trainer):
    """All that a run ends with: weights, buffers, optimizers, schedulers, counters."""
    state = dict(trainer.lightning_module.state_dict())
    for number, optimizer in enumerate(trainer.optimizers):
        state.update(_flat(optimizer.state_dict(), f"optimizer{number}"))
    for number, config in enumerate(trainer.lr_scheduler_configs):
        state.update(_flat(config.scheduler.state_dict(), f"scheduler{number}"))
    progress = trainer.fit_loop.epoch_loop
    state["counters"] = (trainer.global_step, trainer.current_epoch, progress._batches_that_stepped)
    state["total"] = progress.batch_progress.total
    return state


def _flat(value, name):
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}").items()}
    return {name: value}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


CASES = {
    "plain": (Net, "none", {}),
    "accumulation": (Net, "none", {"accumulate_grad_batches": 3}),
    "accumulation and step scheduler": (Net, "step", {"accumulate_grad_batches": 4}),
    "step scheduler": (Net, "step", {}),
    "step scheduler with frequency": (Net, "step frequency", {}),
    "epoch scheduler": (Net, "epoch", {}),
    "plateau": (Net, "plateau", {}),
    "validation inside the epoch": (Net, "plateau", {"val_check_interval": 4}),
    "validation across epochs": (Net, "none", {"val_check_interval": 7, "check_val_every_n_epoch": None}),
    "clipping": (Net, "none", {"gradient_clip_val": 0.1}),
    "two optimizers": (TwoOptimizers, "none", {}),
    "bf16": (Net, "none", {"precision": "bf16-mixed"}),
}
# Where the run is broken off: 11 batches an epoch, 3 validation batches.
PLACES = [
    ("on_train_batch_end", 1),
    ("on_train_batch_end", 9),
    ("on_train_batch_end", 11),
    ("on_train_batch_end", 18),
    ("on_validation_end", 1),
    ("on_validation_end", 2),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_end", 2),
    ("on_train_epoch_start", 2),
]


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_the_unbroken_one(case, tmp_path):
    cls, kind, more = CASES[case]
    whole = cls(kind)
    expected = everything(fit(whole, num_sanity_val_steps=0, **more))
    for number, (hook, n) in enumerate(PLACES):
        path = tmp_path / f"{number}.ckpt"
        first = cls(kind)
        window = more.get("accumulate_grad_batches", 1)
        if hook == "on_train_batch_end" and n != 11:  # gradients that wait for their step are not in a checkpoint
            epoch, batch = divmod(n, 11)
            n = epoch * 11 + min(-(-batch // window) * window, 11)
        with pytest.raises(KeyError, match="broken off"):
            fit(first, SavesAt(path, hook, n), num_sanity_val_steps=0, **more)
        second = cls(kind)
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.zero_()  # what is not restored shows
        trainer = fit(second, ckpt_path=path, **more)
        try:
            same(everything(trainer), expected)
            assert first.seen + second.seen == whole.seen
        except AssertionError as error:
            raise AssertionError(f"broken off in {hook}, time {n}: {error}") from error


def test_checkpoint_inside_an_accumulation_window_loses_its_gradients_only(tmp_path):
    """As under Lightning, gradients are not in a checkpoint: the window goes on with what comes after."""
    path = tmp_path / "a.ckpt"
    with pytest.raises(KeyError):
        fit(Net(), SavesAt(path, "on_train_batch_end", 2), accumulate_grad_batches=3)
    second = Net()
    trainer = fit(second, ckpt_path=path, accumulate_grad_batches=3)
    assert trainer.global_step == 3 * 4
    assert second.seen[0][:2] == (0, 2)


def test_stream_is_resumed_after_the_batches_that_were_trained(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(X, Y, strict=True)

    def stream():
        return DataLoader(Stream(), 2)

    whole = Net()
    expected = everything(fit(whole, train=stream()))
    path = tmp_path / "a.ckpt"
    first, second = Net(), Net()
    with pytest.raises(KeyError):
        fit(first, SavesAt(path, "on_train_batch_end", 15), train=stream())
    same(everything(fit(second, ckpt_path=path, train=stream())), expected)
    assert first.seen + second.seen == whole.seen


def test_more_epochs_after_a_finished_run(tmp_path):
    path = tmp_path / "a.ckpt"
    trainer = fit(Net("step"), max_epochs=2)
    trainer.save_checkpoint(path)
    again = fit(Net("step"), ckpt_path=path, max_epochs=4)
    same(everything(again), everything(fit(Net("step"), max_epochs=4)))


def test_resume_by_max_steps(tmp_path):
    path = tmp_path / "a.ckpt"
    limits = {"max_epochs": -1, "max_steps": 30}
    whole = everything(fit(Net("step"), **limits))
    assert whole["counters"][0] == 30
    with pytest.raises(KeyError):
        fit(Net("step"), SavesAt(path, "on_train_batch_end", 17), **limits)
    same(everything(fit(Net("step"), ckpt_path=path, **limits)), whole)


def test_epoch_metrics_after_a_resume_are_of_the_batches_that_were_run(tmp_path):
    """Values before the checkpoint are not in it; what is averaged is what this run has seen."""
    path = tmp_path / "a.ckpt"

    class Numbers(Net):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx), on_step=False, on_epoch=True)
            return self.loss(batch)

    with pytest.raises(KeyError):
        fit(Numbers(), SavesAt(path, "on_train_batch_end", 4), max_epochs=1)
    trainer = fit(Numbers(), ckpt_path=path, max_epochs=1)
    assert float(trainer.callback_metrics["index"]) == sum(range(4, 11)) / 7


# ---- files ---------------------------------------------------------------------------------------------------------


def test_file_holds_lightnings_keys(tmp_path):
    trainer = fit(Net("step"), ModelCheckpoint(tmp_path, save_last=True), max_epochs=1, enable_checkpointing=True)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"} < set(checkpoint)
    assert len(checkpoint["optimizer_states"]) == len(checkpoint["lr_schedulers"]) == 1
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & set(weights)
    with pytest.raises(Exception, match="optimizer"):
        fit(Net("step"), ckpt_path=tmp_path / "weights.ckpt")
    assert L.Trainer(**QUIET).validate(Net(), val_loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)


class Own:
    """A class that a checkpoint may not bring in by itself."""

    ran = []

    def __setstate__(self, state):
        Own.ran.append("code of the file")


def test_foreign_class_in_a_checkpoint_is_refused_by_name(tmp_path):
    class Adds(Net):
        def on_save_checkpoint(self, checkpoint):
            own = Own()
            own.x = 1
            checkpoint["own"] = own

    path = tmp_path / "a.ckpt"
    fit(Adds(), max_epochs=1).save_checkpoint(path)
    for use in (
        lambda: fit(Net(), ckpt_path=path),
        lambda: L.Trainer(**QUIET).test(Tests(), val_loader(), ckpt_path=path),
        lambda: Net.load_from_checkpoint(path),
    ):
        with pytest.raises(UnsafeCheckpointError, match=r"test_checkpointing\.Own") as caught:
            use()
        assert "weights_only=False" in str(caught.value)
        assert Own.ran == []
    trainer = L.Trainer(**QUIET, max_epochs=2, enable_checkpointing=False)
    trainer.fit(Net(), train_loader(), ckpt_path=path, weights_only=False)
    assert Own.ran == ["code of the file"]
    Own.ran.clear()


class Tests(Net):
    __test__ = False  # no test class

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


@pytest.mark.parametrize("form", [str, Path, lambda path: f"file://{path}"])
def test_forms_of_ckpt_path(form, tmp_path):
    path = tmp_path / "a.ckpt"
    trainer = fit(Net(), max_epochs=1)
    trainer.save_checkpoint(form(path))
    assert path.is_file()
    again = fit(Net(), ckpt_path=form(path), max_epochs=1)
    assert again.global_step == 11
    assert str(again.ckpt_path) == str(form(path))


def test_best_and_last(tmp_path):
    module = Tests()
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, filename="{epoch}")
    trainer = fit(module, best, max_epochs=3, enable_checkpointing=True)
    scores = {path: float(score) for path, score in best.best_k_models.items()}
    assert best.best_model_path in scores
    values = {
        form: trainer.validate(module, val_loader(), ckpt_path=form, verbose=False)[0]["val_loss"]
        for form in ("best", "last", best.best_model_path, None)
    }
    assert values["best"] == values[best.best_model_path] == pytest.approx(float(best.best_model_score), rel=1e-6)
    assert values["last"] == values[None]
    with pytest.warns(UserWarning, match="best"):
        found = trainer.test(dataloaders=val_loader(), verbose=False)
    assert found[0]["test_loss"] == values["best"]
    # "last" of a new trainer is found in the folder of its callback
    fresh = fit(Net(), ModelCheckpoint(tmp_path, save_last=True), ckpt_path="last", enable_checkpointing=True)
    assert Path(fresh.ckpt_path).name == "last.ckpt"
    assert fresh.global_step == 33


@pytest.mark.parametrize(
    ("ckpt_path", "error", "message"),
    [
        ("best", ValueError, "has not saved a best model"),
        ("hpc", ValueError, "hpc_ckpt"),
        ("registry:x", MisconfigurationException, "registries"),
        ("", ValueError, "ckpt_path=''"),
        ("nowhere.ckpt", FileNotFoundError, "nowhere.ckpt"),
    ],
)
def test_ckpt_paths_that_name_nothing(ckpt_path, error, message, tmp_path):
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=ModelCheckpoint(tmp_path), default_root_dir=tmp_path)
    with pytest.raises(error, match=message):
        trainer.fit(Net(), train_loader(), ckpt_path=ckpt_path)


def test_last_without_a_file_starts_from_the_beginning(tmp_path):
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=ModelCheckpoint(tmp_path, save_last=True))
    with pytest.warns(UserWarning, match="there is no last checkpoint"):
        trainer.fit(Net(), train_loader(), ckpt_path="last")
    assert trainer.global_step == 11


def test_hpc_checkpoint_of_the_highest_number(tmp_path):
    trainer = fit(Net(), max_epochs=1, default_root_dir=tmp_path)
    for number in (2, 10):
        trainer.save_checkpoint(tmp_path / f"hpc_ckpt_{number}.ckpt")
    again = fit(Net(), ckpt_path="hpc", max_epochs=1, default_root_dir=tmp_path)
    assert Path(again.ckpt_path).name == "hpc_ckpt_10.ckpt"


def test_on_exception_checkpoint_is_the_next_start(tmp_path):
    """Without ckpt_path, a run goes on from the file that the broken one left, and removes it at its good end."""

    class Breaks(Net):
        fail = True

        def training_step(self, batch, batch_idx):
            if self.fail and (self.current_epoch, batch_idx) == (1, 4):
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    whole = Breaks()
    whole.fail = False
    expected = everything(fit(whole))
    saved = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(Breaks(), saved, enable_checkpointing=True)
    assert Path(saved.ckpt_path).is_file()
    second = Breaks()
    second.fail = False
    trainer = fit(second, OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    same(everything(trainer), expected)
    assert not Path(saved.ckpt_path).exists()


def test_checkpoint_past_max_epochs_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    fit(Net(), max_epochs=3).save_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=r"epoch 3, past Trainer\(max_epochs=2\)"):
        fit(Net(), ckpt_path=path, max_epochs=2)


def test_other_number_of_schedulers_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    fit(Net("step"), max_epochs=1).save_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=r"holds 1 learning-rate schedulers, .* returned 0"):
        fit(Net(), ckpt_path=path)


def test_saving_does_not_change_the_run(tmp_path):
    """Random numbers included: a run that saves often ends as one that never does."""

    class Noisy(Net):
        def training_step(self, batch, batch_idx):
            noise = torch.rand(()) + random.random() + float(np.random.rand())
            return super().training_step(batch, batch_idx) * noise

    def seeded(*callbacks, **more):
        L.seed_everything(3, verbose=False)
        return fit(Noisy(), *callbacks, **more)

    often = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    same(everything(seeded(often, enable_checkpointing=True)), everything(seeded()))


# ---- a process that is killed --------------------------------------------------------------------------------------

KILLED = """
    folder, kill_at = sys.argv[1], int(sys.argv[2])

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(3, 1)
            self.left = kill_at

        def training_step(self, batch, batch_idx):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    X = torch.arange(60, dtype=torch.float32).reshape(20, 3).sin()
    data = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), 2)
    keep = ModelCheckpoint(folder, every_n_train_steps=3, save_last=True)
    trainer = L.Trainer(**{**QUIET, "enable_checkpointing": True}, max_epochs=4, callbacks=[keep])
    module = Net()
    trainer.fit(module, data, ckpt_path="last")
    print(trainer.global_step, module.layer.weight.flatten().tolist(), trainer.ckpt_path, flush=True)
"""


def test_killed_run_goes_on_from_last(tmp_path):
    path = rank_scripts.write_script(tmp_path, KILLED)
    code, expected, err = rank_scripts.run(path, tmp_path / "whole", -1)
    assert code == 0, err
    folder = tmp_path / "killed"
    code, _, _ = rank_scripts.run(path, folder, 17)
    assert code == -signal.SIGKILL
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 15
    code, out, err = rank_scripts.run(path, folder, -1)
    assert code == 0, err
    assert out.split("]")[0] == expected.split("]")[0]
    assert out.strip().endswith("last.ckpt")
    assert not [name for name in os.listdir(folder) if not name.endswith(".ckpt")]


def test_numpy_numbers_in_hyper_parameters_are_saved_as_python_numbers(tmp_path):
    class Net(L.LightningModule):
        def __init__(self, lr):
            super().__init__()
            self.save_hyperparameters()

        def forward(self, x):
            return x

    trainer = L.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.predict(Net(np.float64(0.25)), [torch.zeros(1)])
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    lr = Net.load_from_checkpoint(tmp_path / "net.ckpt").hparams.lr
    assert (type(lr), lr) == (float, 0.25)
