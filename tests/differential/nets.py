"""Tiny data, modules and trainers that scripts are made of; everything depends on the data and on nothing random."""

import functools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from differential.tracing import sub

__all__ = ["Batches", "StatefulLoader", "Stream", "csv_trainer", "dataset", "loader", "net_class", "quiet_trainer"]

FEATURES = 4


def dataset(size: int = 8, seed: int = 1) -> Dataset:
    """``size`` samples of a noisy linear function of four features: ``(x [4], y [1])``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(size, 1, generator=generator)
    return TensorDataset(x, y)


def loader(size: int = 8, batch_size: int = 2, seed: int = 1, **kwargs: Any) -> DataLoader:
    """Batches of `dataset`, in order unless told otherwise."""
    return DataLoader(dataset(size, seed), batch_size=batch_size, **kwargs)


class Stream(IterableDataset):
    """An iterable dataset without a length."""

    def __init__(self, size: int = 8, seed: int = 1) -> None:
        self.samples = list(dataset(size, seed))  # type: ignore[call-overload]

    def __iter__(self) -> Any:
        return iter(self.samples)


class Batches:
    """A loader that is none of torch's: yields the given batches. (A plain list would be taken for several loaders.)"""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class StatefulLoader(Batches):
    """A loader that knows how far it is and can go on from there, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__(batches)
        self.given = 0
        self.resume_at = 0

    def __iter__(self) -> Any:
        self.given, self.resume_at = self.resume_at, 0
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume_at = state["given"]


def _fixed(module: nn.Module, seed: int = 7) -> nn.Module:
    """Gives a module weights that no earlier use of the global generator can change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


@functools.cache
def net_class(L: ModuleType) -> Any:
    """The module class that most scripts use or subclass, made for one root."""

    class Net(L.LightningModule):
        def __init__(self, lr: float = 0.05) -> None:
            super().__init__()
            self.lr = lr
            self.layer = _fixed(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    return Net


def quiet_trainer(L: ModuleType, tmp: Path, **kwargs: Any) -> Any:
    """A trainer on one CPU with everything off that a script does not ask for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": _has_checkpoint(kwargs.get("callbacks")),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(tmp),
        "max_epochs": 1,
    }
    return L.Trainer(**{**defaults, **kwargs})


def csv_trainer(L: ModuleType, tmp: Path, **kwargs: Any) -> Any:
    """`quiet_trainer` with a CSVLogger in ``tmp/logs/version_0`` that is due at every batch."""
    logger = sub(L, "loggers").CSVLogger(str(tmp), name="logs", version=0)
    return quiet_trainer(L, tmp, **{"logger": logger, "log_every_n_steps": 1, **kwargs})


def _has_checkpoint(callbacks: Any) -> bool:
    entries = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    return any(cls.__name__ == "Checkpoint" for entry in entries for cls in type(entry).__mro__)
