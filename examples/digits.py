"""Handwritten digits with a residual network: `python examples/digits.py` (about ten seconds on two cores)."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import leyden as L
from leyden.callbacks import EarlyStopping, ModelCheckpoint


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        conv = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.body = nn.Sequential(conv[0], nn.BatchNorm2d(width), nn.ReLU(), conv[1], nn.BatchNorm2d(width))

    def forward(self, x):
        return F.relu(x + self.body(x))


class DigitsNet(L.LightningModule):
    def __init__(self, width=32, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        blocks = [Residual(width), nn.MaxPool2d(2), Residual(width), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.net = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), *blocks, nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, stage="val"):
        x, y = batch
        self.log(f"{stage}_acc", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx, stage="test")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


if __name__ == "__main__":
    L.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, val, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1077, 360, 360])

    callbacks = [ModelCheckpoint(monitor="val_acc", mode="max"), EarlyStopping("val_acc", mode="max", patience=8)]
    trainer = L.Trainer(devices=1, max_epochs=15, callbacks=callbacks, log_every_n_steps=10)
    model = DigitsNet()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=120))
    trainer.test(model, DataLoader(test, batch_size=120), ckpt_path="best")
