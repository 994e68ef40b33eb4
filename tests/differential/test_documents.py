"""Runs the Lightning listings of the two tutorials that Leyden was made for, with nothing but the import renamed.

Each listing stands here as in its tutorial. Around it, a test supplies what the listing leaves to its reader: data
(scikit-learn's digits), a model where it says ``MyModel``, fewer epochs, and the CPU where it names GPUs.
"""

# ruff: noqa: RET504 - the listings assign before they return
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from differential.harness import OTHER, load_root

pytest.importorskip("sklearn", reason="the digits data set comes with scikit-learn")

# The listings keep the quotes and line breaks that they have in the tutorials.
# fmt: off
EPOCHS = 2
# For a listing whose 100 epochs are its point.
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture
def L(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The root; output folders land in the test's folder, and every run starts from the same random state."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # So that a listing can write `from <root>.callbacks import ...`, whatever the root is.
    root = load_root("lightning" if OTHER == "lightning.pytorch" else OTHER)
    callbacks = importlib.import_module(f"{OTHER}.callbacks")
    monkeypatch.setitem(sys.modules, "root_under_test", root)
    monkeypatch.setitem(sys.modules, "root_under_test.callbacks", callbacks)
    return root


def _digits(first: int, last: int, side: int = 28) -> Dataset:
    """Digits ``first`` to ``last`` as images ``[side * side]`` in 0..1, scaled up from 8x8, with labels 0..9."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[first:last], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    large = nn.functional.interpolate(small, size=(side, side), mode="bilinear", align_corners=False)
    return TensorDataset(large.flatten(1), torch.tensor(labels[first:last]))


def _accuracy(model: Any, dataset: Dataset) -> float:
    x, y = dataset[:]  # type: ignore[misc]
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).float().mean().item()


def my_model() -> Any:
    return nn.Sequential(nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))


def _evaluated(L: Any, MyModel: Any = my_model) -> Any:
    """Listing "validation and test"; several others are used with its module."""

    class LitModel(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = MyModel()

        def training_step(self, batch, batch_idx):
            x, y = batch
            y_hat = self.model(x)
            loss = nn.functional.cross_entropy(y_hat, y)
            self.log('train_loss', loss)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            y_hat = self.model(x)
            val_loss = nn.functional.cross_entropy(y_hat, y)
            acc = (y_hat.argmax(dim=1) == y).float().mean()
            self.log('val_loss', val_loss)
            self.log('val_acc', acc)

        def test_step(self, batch, batch_idx):
            x, y = batch
            y_hat = self.model(x)
            test_loss = nn.functional.cross_entropy(y_hat, y)
            self.log('test_loss', test_loss)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return LitModel


def test_quick_start(L: Any, tmp_path: Path) -> None:
    """From plain torch code to a module in three steps, with all defaults: logger, bar, summary, checkpoint."""
    train_dataset = _digits(0, 256)

    # Step 1: Define LightningModule (organize your PyTorch code)
    class LitModel(L.LightningModule):
        def __init__(self, hidden_size=128):
            super().__init__()
            self.model = nn.Sequential(
                nn.Linear(28 * 28, hidden_size),
                nn.ReLU(),
                nn.Linear(hidden_size, 10)
            )

        def training_step(self, batch, batch_idx):
            x, y = batch
            y_hat = self.model(x)
            loss = nn.functional.cross_entropy(y_hat, y)
            self.log('train_loss', loss)  # Auto-logged to TensorBoard
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    # Step 2: Create data
    train_loader = DataLoader(train_dataset, batch_size=32)

    # Step 3: Train with Trainer (handles everything else!)
    trainer = L.Trainer(max_epochs=10, accelerator='cpu', devices=1)
    model = LitModel()
    trainer.fit(model, train_loader)

    assert trainer.global_step == 80
    assert _accuracy(model.model, _digits(512, 1024)) > 0.7
    log = tmp_path / "lightning_logs" / "version_0"
    assert (log / "checkpoints" / "epoch=9-step=80.ckpt").is_file()
    assert list(log.glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_quick_start_on_two_processes(tmp_path: Path) -> None:
    """The quick start's `devices=2`, run as a script of its own, since its processes start it again."""
    import os
    import subprocess

    script = tmp_path / "quick_start.py"
    script.write_text(TWO_PROCESSES.format(root="lightning" if OTHER == "lightning.pytorch" else OTHER))
    # The script runs in another folder, where a relative PYTHONPATH would lead nowhere.
    source = str(Path(load_root(OTHER).__file__ or "").resolve().parent.parent)
    paths = os.pathsep.join([source] if OTHER != "lightning.pytorch" else [])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 2: 8 steps" in done.stdout
    assert "rank 1 of 2: 8 steps" in done.stdout


TWO_PROCESSES = """
import {root} as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class LitModel(L.LightningModule):
    def __init__(self, hidden_size=128):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(28 * 28, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, 10)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.model(x)
        loss = nn.functional.cross_entropy(y_hat, y)
        self.log('train_loss', loss)  # Auto-logged to TensorBoard
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    train_dataset = TensorDataset(torch.rand(512, 28 * 28), torch.arange(512) % 10)
    train_loader = DataLoader(train_dataset, batch_size=32)
    trainer = L.Trainer(max_epochs=1, accelerator='cpu', devices=2)
    model = LitModel()
    trainer.fit(model, train_loader)
    print(f"rank {{trainer.global_rank}} of {{trainer.world_size}}: {{trainer.global_step}} steps", flush=True)
"""


def test_plain_torch_and_its_module_agree(L: Any) -> None:
    """Workflow 1: the loop in plain torch and the module that replaces it come to the same weights."""
    max_epochs = EPOCHS

    class MyModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Linear(28 * 28, 10)

        def forward(self, batch: Any) -> Any:
            return self.net(batch).pow(2).mean()

    train_loader = DataLoader(torch.stack([x for x, _ in _digits(0, 128)]), batch_size=32)

    model = MyModel()
    optimizer = torch.optim.Adam(model.parameters())
    model.to('cpu')

    for epoch in range(max_epochs):
        for batch in train_loader:
            batch = batch.to('cpu')
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()

    class LitModel(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = MyModel()

        def training_step(self, batch, batch_idx):
            loss = self.model(batch)  # No .to('cuda') needed!
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    # Train
    trainer = L.Trainer(max_epochs=EPOCHS, accelerator='cpu')
    lit = LitModel()
    trainer.fit(lit, train_loader)

    for name, value in model.state_dict().items():
        assert torch.equal(value, lit.model.state_dict()[name])


def test_validation_and_test(L: Any) -> None:
    """Workflow 2: validation each epoch, then a test."""
    model = _evaluated(L)()
    train_loader = DataLoader(_digits(0, 512), batch_size=32)
    val_loader = DataLoader(_digits(512, 768), batch_size=32)
    test_loader = DataLoader(_digits(768, 1024), batch_size=32)

    # Train with validation
    trainer = L.Trainer(max_epochs=EPOCHS, accelerator="cpu")
    trainer.fit(model, train_loader, val_loader)

    assert set(trainer.callback_metrics) == {"train_loss", "val_loss", "val_acc"}
    assert trainer.callback_metrics["val_acc"] > 0.5

    # Test
    results = trainer.test(model, test_loader)

    assert list(results[0]) == ["test_loss"]


def test_monitoring_with_callbacks(L: Any, tmp_path: Path) -> None:
    """Workflow 4: best checkpoints, early stopping and learning rates."""
    model = _evaluated(L)()
    train_loader = DataLoader(_digits(0, 256), batch_size=32)
    val_loader = DataLoader(_digits(512, 768), batch_size=32)

    from root_under_test.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint  # type: ignore

    # Create callbacks
    checkpoint = ModelCheckpoint(
        monitor='val_loss', mode='min', save_top_k=3, filename="model-{epoch:02d}-{val_loss:.2f}"
    )

    early_stop = EarlyStopping(monitor='val_loss', patience=5, mode='min')

    lr_monitor = LearningRateMonitor(logging_interval='epoch')

    # Add to Trainer
    trainer = L.Trainer(max_epochs=5, accelerator="cpu", callbacks=[checkpoint, early_stop, lr_monitor])

    trainer.fit(model, train_loader, val_loader)

    saved = sorted(path.name for path in Path(checkpoint.dirpath).iterdir())
    assert len(saved) == 3
    assert saved[-1].startswith("model-epoch=04-val_loss=")
    assert early_stop.stopped_epoch == 0
    assert lr_monitor.lrs == {"lr-Adam": [1e-3] * 5}


def test_learning_rate_schedule(L: Any) -> None:
    """Workflow 5: cosine annealing, stepped once per epoch."""

    class LitModel(_evaluated(L)):
        # ... (training_step, etc.)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)

            # Cosine annealing
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-5)

            return {
                'optimizer': optimizer,
                'lr_scheduler': {
                    'scheduler': scheduler,
                    'interval': 'epoch',  # Update per epoch
                    'frequency': 1
                },
            }

    model = LitModel()
    train_loader = DataLoader(_digits(0, 16), batch_size=32)

    # Learning rate auto-logged!
    trainer = L.Trainer(max_epochs=100, accelerator="cpu", **QUIET)
    trainer.fit(model, train_loader)

    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-5)


def test_a_look_into_the_batch(L: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Advice for a loss that does not go down: a print in the training step comes through."""

    class LitModel(_evaluated(L)):
        # Add to training_step
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                print(f"Batch shape: {batch[0].shape}")
                print(f"Labels: {batch[1]}")
            loss = super().training_step(batch, batch_idx)
            return loss

    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1)
    trainer.fit(LitModel(), DataLoader(_digits(0, 64), batch_size=32))

    assert "Batch shape: torch.Size([32, 784])" in capsys.readouterr().out


def test_less_memory(L: Any) -> None:
    """Advice for too little memory: accumulated gradients and bf16."""
    trainer = L.Trainer(
        accumulate_grad_batches=4,  # Effective batch = batch_size x 4
        precision='bf16',  # Or 'fp16', reduces memory 50%
        accelerator="cpu",
        max_epochs=EPOCHS,
    )
    trainer.fit(_evaluated(L)(), DataLoader(_digits(0, 256), batch_size=16))

    assert trainer.precision == "bf16-mixed"
    assert trainer.global_step == EPOCHS * 4


def test_validation_needs_a_loader(L: Any) -> None:
    """Advice for validation that does not run: without a loader it does not, with one it does."""
    train_loader = DataLoader(_digits(0, 64), batch_size=32)
    val_loader = DataLoader(_digits(512, 576), batch_size=32)
    model = _evaluated(L)()

    # WRONG
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1)
    trainer.fit(model, train_loader)
    assert "val_loss" not in trainer.callback_metrics

    # CORRECT
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1)
    trainer.fit(model, train_loader, val_loader)
    assert "val_loss" in trainer.callback_metrics


def test_one_device_on_cpu(L: Any) -> None:
    """Advice against unexpected processes: one device stays one process."""
    # Test on CPU first
    trainer = L.Trainer(accelerator='cpu', devices=1)

    assert (trainer.num_devices, trainer.world_size) == (1, 1)


def test_image_classifier(L: Any, tmp_path: Path) -> None:
    """The Lightning script that the other tutorial starts from, with a small network for its resnet18."""
    pl = L

    def resnet18(num_classes: int) -> Any:
        net = nn.Sequential()
        net.conv1 = nn.Conv2d(3, 64, 3)
        net.rest = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, num_classes))
        return net

    images, labels = _digits(0, 128)[:]  # type: ignore[misc]
    train_data = TensorDataset((images.view(-1, 1, 28, 28) - 0.28604) / 0.32025, labels)

    # Model, Loss, Optimizer
    class ImageClassifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = resnet18(num_classes=10)
            self.model.conv1 = torch.nn.Conv2d(1, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
            self.criterion = torch.nn.CrossEntropyLoss()

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            outputs = self.forward(x)
            loss = self.criterion(outputs, y)
            self.log("loss", loss, on_step=True, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.model.parameters(), lr=0.001)

    # Data
    train_dataloader = DataLoader(train_data, batch_size=128, shuffle=True)

    # Training
    model = ImageClassifier()
    trainer = pl.Trainer(max_epochs=10, accelerator="cpu")
    trainer.fit(model, train_dataloaders=train_dataloader)

    assert trainer.global_step == 10
    assert trainer.callback_metrics["loss"] < 2.3
    saved = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=9-step=10.ckpt"
    loaded = ImageClassifier.load_from_checkpoint(saved)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
