"""Real files in both directions: Leyden's resumed by Lightning, Lightning's by Leyden, to the same bits."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import leyden
from leyden.checkpoint import io

lightning = pytest.importorskip("lightning.pytorch")
ROOTS = {"leyden": leyden, "lightning": lightning}
BATCHES, EPOCHS = 4, 3


def make_model(root: Any, manual: bool = False) -> Any:
    class Model(root.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = not manual
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            self.log("train_loss", loss)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def train_dataloader(self):
            data = torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(data, batch_size=2)

        def val_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(2, 3), batch_size=1)

    return Model()


def fit(root: Any, model: Any, callbacks: Any = (), ckpt_path: Any = None, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = root.Trainer(
            **{
                "max_epochs": EPOCHS,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": True,
                "accelerator": "cpu",
                "callbacks": list(callbacks),
                **options,
            }
        )
        trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def saver(root: Any, hook: str, folder: Path) -> Any:
    class Save(root.Callback):
        pass

    def save(self, trainer, *args: Any) -> None:
        trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt", weights_only=False)

    setattr(Save, hook, save)
    return Save()


def quiet_mc(root: Any, folder: Path, **options: Any) -> Any:
    return root.callbacks.ModelCheckpoint(dirpath=folder, **options)


def outcome(trainer: Any, model: Any) -> dict[str, Any]:
    optimizer = trainer.optimizers[0]
    return {
        "weight": model.layer.weight.detach().tolist(),
        "bias": model.layer.bias.detach().tolist(),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "lr": optimizer.param_groups[0]["lr"],
        "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never interrupted, under Lightning."""
    outcomes = {}
    for manual in (False, True):
        model = make_model(lightning, manual)
        folder = tmp_path_factory.mktemp("straight")
        outcomes[manual] = outcome(fit(lightning, model, [quiet_mc(lightning, folder)]), model)
    return outcomes


# The batches after which a file is written; between two epochs both can go on from it exactly.
AT_AN_EPOCHS_END = [("on_train_epoch_end", BATCHES), ("on_validation_end", BATCHES), ("on_train_end", 2 * BATCHES)]
INSIDE = [("on_train_batch_end", 1), ("on_train_batch_end", 2), ("on_train_batch_end", BATCHES + 3)]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(("hook", "step"), AT_AN_EPOCHS_END)
def test_lightning_goes_on_from_our_file(tmp_path, straight, hook, step, manual):
    fit(leyden, make_model(leyden, manual), [saver(leyden, hook, tmp_path), quiet_mc(leyden, tmp_path)], max_epochs=2)
    model = make_model(lightning, manual)
    trainer = fit(lightning, model, [quiet_mc(lightning, tmp_path)], ckpt_path=tmp_path / f"{step}.ckpt")
    assert outcome(trainer, model) == straight[manual]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(("hook", "step"), AT_AN_EPOCHS_END + INSIDE)
def test_leyden_goes_on_from_a_file_of_lightning(tmp_path, straight, hook, step, manual):
    saving = [saver(lightning, hook, tmp_path), quiet_mc(lightning, tmp_path)]
    fit(lightning, make_model(lightning, manual), saving, max_epochs=2)
    model = make_model(leyden, manual)
    trainer = fit(leyden, model, [quiet_mc(leyden, tmp_path)], ckpt_path=tmp_path / f"{step}.ckpt")
    assert outcome(trainer, model) == straight[manual]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_leyden_goes_on_from_any_file_of_its_own(tmp_path, straight, hook):
    options = {"val_check_interval": 2}
    saving = [saver(leyden, hook, tmp_path), quiet_mc(leyden, tmp_path)]
    fit(leyden, make_model(leyden), saving, **options)
    files = sorted((path for path in tmp_path.glob("*.ckpt") if path.stem.isdigit()), key=lambda path: int(path.stem))
    assert len(files) >= EPOCHS
    for path in files[:-1]:
        model = make_model(leyden)
        trainer = fit(leyden, model, [quiet_mc(leyden, tmp_path / "more")], ckpt_path=path, **options)
        assert outcome(trainer, model) == straight[False]


@pytest.mark.parametrize(("writer", "reader"), [("leyden", "lightning"), ("lightning", "leyden")])
def test_weights_hyper_parameters_and_best_file_cross_over(tmp_path, writer, reader):
    source, target = ROOTS[writer], ROOTS[reader]
    model = make_model(source)
    checkpoint = quiet_mc(source, tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    fit(source, model, [checkpoint])
    path = checkpoint.best_model_path
    loaded = type(make_model(target)).load_from_checkpoint(path)
    assert dict(loaded.hparams) == {"width": 3}
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(loaded.state_dict()[key], weights[key]) for key in weights)

    other = quiet_mc(target, tmp_path, monitor="val_loss", save_top_k=2, save_last=True)
    fit(target, make_model(target), [other], ckpt_path=tmp_path / "last.ckpt", max_epochs=EPOCHS + 1)
    assert len(other.best_k_models) == 2
    assert set(map(os.path.basename, other.best_k_models)) <= set(os.listdir(tmp_path))


@pytest.mark.parametrize(("writer", "reader"), [("leyden", "lightning"), ("lightning", "leyden")])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_from_the_other_ones_file(tmp_path, writer, reader, stage):
    source, target = ROOTS[writer], ROOTS[reader]
    fit(source, make_model(source), [quiet_mc(source, tmp_path, save_last=True)])
    model = make_model(target)
    base = type(model)
    model.__class__ = type(
        "Evaluated", (base,), {"test_step": base.validation_step, "forward": lambda self, x: self.layer(x)}
    )
    trainer = target.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    loader = torch.utils.data.DataLoader(torch.ones(2, 3), batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = getattr(trainer, stage)(model, dataloaders=loader, ckpt_path=tmp_path / "last.ckpt")
    weights = io.load(tmp_path / "last.ckpt")["state_dict"]
    assert torch.equal(model.layer.weight, weights["layer.weight"])
    assert result


@pytest.mark.slow
def test_a_run_killed_anywhere_goes_on_to_the_same_bits(tmp_path):
    """``kill -9`` at several moments of a run that saves after each batch; then it goes on from ``last``."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time, torch
            import leyden
            from leyden.callbacks import ModelCheckpoint
            folder, slow = sys.argv[1], float(sys.argv[2])
            class Model(leyden.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(3, 1)
                def training_step(self, batch, batch_idx):
                    return self.layer(batch).square().mean()
                def validation_step(self, batch, batch_idx):
                    self.log("val_loss", self.layer(batch).square().mean())
                def configure_optimizers(self):
                    return torch.optim.Adam(self.parameters(), lr=0.05)
                def train_dataloader(self):
                    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
                    return torch.utils.data.DataLoader(data, batch_size=2)
                def val_dataloader(self):
                    return torch.utils.data.DataLoader(torch.ones(2, 3))
            class Slow(leyden.Callback):
                def on_train_batch_end(self, trainer, *args):
                    print(trainer.global_step, flush=True)
                    time.sleep(slow)
            torch.manual_seed(0)
            model = Model()
            saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True)
            trainer = leyden.Trainer(
                max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[Slow(), saving]
            )
            trainer.fit(model, ckpt_path="last")
            torch.save(model.state_dict(), folder + "/weights")
            """
        )
    )

    def start(folder: Path, slow: float) -> subprocess.Popen:
        env = {**os.environ, "PYTHONPATH": str(Path(leyden.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, str(script), str(folder), str(slow)], env=env, stdout=subprocess.PIPE)

    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert start(tmp_path / "whole", 0).wait() == 0
    for lines in (1, 4, 3):
        process = start(tmp_path / "killed", 0.03)
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        time.sleep(0.035)  # somewhere in the saves after this batch
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed", 0).wait() == 0
    whole, killed = (torch.load(tmp_path / each / "weights") for each in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
