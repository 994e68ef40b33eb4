"""The main job: a residual network that learns handwritten digits. ``leyden demo`` runs it.

Everything below the imports uses the public interface only: it is what a user's own script looks like.
The data is scikit-learn's: 1,797 grey images of 8x8 pixels, inside the package, nothing is downloaded.
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import leyden as L
from leyden.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from leyden.loggers import CSVLogger, TensorBoardLogger

__all__ = ["DigitsData", "DigitsNet", "evaluate", "train"]


class DigitsData(L.LightningDataModule):
    """The digits, split into 1,077 images to train on, 360 to validate on and 360 to test on."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the demo's data is scikit-learn's: pip install 'leyden[demo]'") from error
        digits: Any = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8), 0 to 1
        everything = TensorDataset(images, torch.tensor(digits.target))
        # The split has a seed of its own, so a new process tests on the same images.
        self.train_data, self.val_data, self.test_data = random_split(
            everything, [1077, 360, 360], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_data, batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_data, batch_size=120)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test_data, batch_size=120)


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them. ``(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)``."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


class DigitsNet(L.LightningModule):
    """A residual network: ``(N, 1, 8, 8)`` images to ``(N, 10)`` logits."""

    def __init__(self, width: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Residual(width, width),
            Residual(width, 2 * width, stride=2),
            Residual(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        down, right = torch.randint(-1, 2, (2,)).tolist()  # a digit moved by a pixel is the same digit
        logits = self(x.roll((down, right), (2, 3)))
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log_dict({f"{stage}_loss": F.cross_entropy(logits, y), f"{stage}_acc": accuracy}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        lr = self.hparams["lr"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(folder: Path, epochs: int, seed: int) -> dict[str, Any]:
    """Trains, tests the best checkpoint, and says where everything lies.

    Args:
        folder: Where logs and checkpoints go.
        epochs: Epochs at most; early stopping may end the training before.
        seed: For weights, batch order and augmentation.

    Returns:
        ``test_acc``, ``epochs`` and ``seconds`` of the training, and the paths ``checkpoint``, ``log_dir``, ``csv``.
    """
    L.seed_everything(seed, verbose=False)
    data, model = DigitsData(), DigitsNet()
    best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=epochs,
        logger=[TensorBoardLogger(folder, name="tensorboard"), CSVLogger(folder, name="csv")],
        callbacks=[best, EarlyStopping(monitor="val_acc", mode="max", patience=8), LearningRateMonitor()],
        log_every_n_steps=10,
    )
    start = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - start
    epochs_run = trainer.current_epoch
    (metrics,) = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    return {
        "test_acc": metrics["test_acc"],
        "epochs": epochs_run,
        "seconds": round(seconds, 2),
        "checkpoint": str(Path(best.best_model_path).resolve()),
        "log_dir": str(Path(trainer.log_dir or folder).resolve()),
        "csv": str(Path(trainer.loggers[1].log_dir or folder).resolve()),
    }


def evaluate(checkpoint: str) -> float:
    """Builds the network from ``checkpoint`` alone and returns its accuracy on the test images."""
    logging.getLogger("leyden").setLevel(logging.WARNING)
    model = DigitsNet.load_from_checkpoint(checkpoint)
    trainer = L.Trainer(accelerator="auto", devices=1, logger=False, enable_progress_bar=False)
    (metrics,) = trainer.test(model, datamodule=DigitsData(), verbose=False)
    return metrics["test_acc"]
