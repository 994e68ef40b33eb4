"""A script as it is written for Lightning 2.x. `migration_after.py` is the same script for Leyden."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class Perceptron(LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self(x).argmax(dim=1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_acc"}}


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    seed_everything(7)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, val = random_split(dataset, [1437, 360])

    checkpoint = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=CSVLogger("logs"),
        callbacks=[checkpoint, LearningRateMonitor()],
    )
    trainer.fit(Perceptron(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=360))
    best = Perceptron.load_from_checkpoint(checkpoint.best_model_path)
    print(f"val_acc={trainer.validate(best, DataLoader(val, batch_size=360), verbose=False)[0]['val_acc']:.6f}")
