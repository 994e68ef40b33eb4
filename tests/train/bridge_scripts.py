"""Training functions that the tests of the bridge to Lightning run in real workers."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leyden as pl
import leyden.train.lightning
from leyden.callbacks import ModelCheckpoint

EPOCHS = 4
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def digits(first: int = 0, last: int = 256) -> TensorDataset:
    """Scikit-learn's digits as images ``[1, 8, 8]`` in 0..1, with labels 0..9."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(x, torch.tensor(labels[first:last]))


class ImageClassifier(pl.LightningModule):
    """The tutorial's, with a small network."""

    def __init__(self, width: int = 8, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.model = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)
        )
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Validated(ImageClassifier):
    """With a validation."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(1) == y).float().mean(), sync_dist=True)


class Killer(pl.Callback):
    """Ends a rank by SIGKILL at given ``(epoch, batch, rank)``, each once over all restarts."""

    def __init__(self, folder: str, kills: list[tuple[int, int, int]]) -> None:
        self.folder = Path(folder)
        self.kills = kills

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        place = (trainer.current_epoch, batch_idx, trainer.global_rank)
        mark = self.folder / f"killed-{'-'.join(map(str, place))}"
        if place in self.kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _weights(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def with_glue(config: dict[str, Any]) -> dict[str, Any]:
    """The tutorial's training function."""
    pl.seed_everything(1, verbose=False)
    loader = DataLoader(digits(), batch_size=32, shuffle=True)
    model = ImageClassifier()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        devices="auto",
        accelerator="auto",
        strategy=leyden.train.lightning.RayDDPStrategy(),
        plugins=[leyden.train.lightning.RayLightningEnvironment()],
        callbacks=[leyden.train.lightning.RayTrainReportCallback(), Killer(config["folder"], config["kills"])],
        enable_checkpointing=False,
        **QUIET,
    )
    trainer = leyden.train.lightning.prepare_trainer(trainer)
    trainer.fit(model, train_dataloaders=loader)
    return _weights(model)


def without_glue(config: dict[str, Any]) -> dict[str, Any]:
    """The same as a plain script would have it."""
    pl.seed_everything(1, verbose=False)
    loader = DataLoader(digits(), batch_size=32, shuffle=True)
    model = ImageClassifier()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        devices="auto",
        accelerator="auto",
        callbacks=[
            ModelCheckpoint(dirpath=config["folder"], every_n_train_steps=3, save_top_k=-1),
            Killer(config["folder"], config["kills"]),
        ],
        **QUIET,
    )
    trainer.fit(model, train_dataloaders=loader)
    return _weights(model)
