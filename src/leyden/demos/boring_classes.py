"""The smallest model and data on which every hook runs: for tests, bug reports and benchmarks.

All of them are meant to be subclassed. Names, shapes and sizes are those of ``lightning.pytorch.demos``, so that a
bug report moves over with its import line.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from leyden.core.datamodule import LightningDataModule
from leyden.core.module import LightningModule

__all__ = [
    "BoringDataModule",
    "BoringDataModuleNoLen",
    "BoringModel",
    "DemoModel",
    "IterableBoringDataModule",
    "ManualOptimBoringModel",
    "RandomDataset",
    "RandomDictDataset",
    "RandomIterableDataset",
    "RandomIterableDatasetWithLen",
]


class RandomDataset(Dataset):
    """``length`` vectors of ``size`` normal numbers, drawn when it is made."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """Like `RandomDataset`; an item is ``{"a": vector, "b": vector + 2}``."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        vector = self.data[index]
        return {"a": vector, "b": vector + 2}


class RandomIterableDataset(IterableDataset):
    """``count`` vectors of ``size`` normal numbers, drawn one by one; its length is not known beforehand."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """Like `RandomIterableDataset`, and says how long it is."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """One linear layer, 32 to 2, drawn towards ones; batches are ``(batch, 32)`` tensors, 64 per epoch and stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean squared distance of ``preds`` to ``labels``, or to ones."""
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))


class ManualOptimBoringModel(BoringModel):
    """`BoringModel` with manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(LightningModule):
    """One linear layer and a ReLU, without data of its own; ``(batch, 32) -> (batch, out_dim)``."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.flatten(1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class _StageData(LightningDataModule):
    """Keeps what ``setup`` makes in ``random_{train,val,test,predict}`` and serves it one sample at a time."""

    random_train: Any
    random_val: Any
    random_test: Any
    random_predict: Any

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModule(_StageData):
    """Data for `BoringModel`: 256 random vectors, a quarter for each of train, val, test and predict."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 4 * 64)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = self._quarter(0)
        if stage in ("fit", "validate"):
            self.random_val = self._quarter(1)
        if stage == "test":
            self.random_test = self._quarter(2)
        if stage == "predict":
            self.random_predict = self._quarter(3)

    def _quarter(self, number: int) -> Subset:
        return Subset(self.random_full, range(64 * number, 64 * (number + 1)))


class BoringDataModuleNoLen(_StageData):
    """Data for `BoringModel` of unknown length: 512 vectors to train on, 128, 256 and 64 to evaluate on."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = RandomIterableDataset(32, 512)
        if stage in ("fit", "validate"):
            self.random_val = RandomIterableDataset(32, 128)
        if stage == "test":
            self.random_test = RandomIterableDataset(32, 256)
        if stage == "predict":
            self.random_predict = RandomIterableDataset(32, 64)


class IterableBoringDataModule(LightningDataModule):
    """Two loaders per stage, one over data of known length and one over a stream; vectors of four numbers."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.train_datasets = self._pair(16)
        if stage in ("fit", "validate"):
            self.val_datasets = self._pair(32)
        if stage == "test":
            self.test_datasets = self._pair(64)
        if stage == "predict":
            self.predict_datasets = self._pair(128)

    def _pair(self, length: int) -> list[Dataset]:
        return [RandomDataset(4, length), RandomIterableDataset(4, length)]

    def _loaders(self, datasets: Iterable[Dataset]) -> list[DataLoader]:
        return [DataLoader(dataset) for dataset in datasets]

    def train_dataloader(self) -> Any:
        return self._loaders(self.train_datasets)

    def val_dataloader(self) -> Any:
        return self._loaders(self.val_datasets)

    def test_dataloader(self) -> Any:
        return self._loaders(self.test_datasets)

    def predict_dataloader(self) -> Any:
        return self._loaders(self.predict_datasets)
