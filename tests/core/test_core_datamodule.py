"""LightningDataModule by itself."""

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from leyden.base.errors import MisconfigurationException
from leyden.core.datamodule import LightningDataModule
from leyden.core.hooks import is_overridden

DATA = TensorDataset(torch.arange(8.0))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


class Sized(LightningDataModule):
    def __init__(self, batch_size: int = 2, path: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()


class Takes(LightningDataModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


def test_from_datasets() -> None:
    data = LightningDataModule.from_datasets(DATA, [DATA, Stream()], {"a": DATA}, batch_size=4)
    train = data.train_dataloader()
    assert isinstance(train, DataLoader)
    assert isinstance(train.sampler, RandomSampler)
    assert train.batch_size == 4
    first, second = data.val_dataloader()
    assert isinstance(first.sampler, SequentialSampler)
    assert next(iter(second)).tolist() == [0, 1, 2]
    assert data.test_dataloader()["a"].dataset is DATA
    assert is_overridden("train_dataloader", data)
    assert not is_overridden("predict_dataloader", data)
    assert isinstance(LightningDataModule.from_datasets(Stream()).train_dataloader().dataset, Stream)
    twin = pickle.loads(pickle.dumps(data))
    assert len(twin.train_dataloader()) == 2


def test_from_datasets_hands_on_what_the_class_takes() -> None:
    data = Sized.from_datasets(DATA, batch_size=4, num_workers=0, path="p")
    assert data.hparams == {"batch_size": 4, "path": "p"}
    assert Takes.from_datasets(DATA, batch_size=4, x=1).options == {"batch_size": 4, "num_workers": 0, "x": 1}


def test_defaults() -> None:
    data = LightningDataModule(1, a=2)
    assert data.trainer is None
    assert data.name is None
    assert data.prepare_data_per_node
    assert data.state_dict() == {}
    assert data.load_state_dict({}) is None  # type: ignore[func-returns-value]
    assert data.setup("fit") is None  # type: ignore[func-returns-value]
    with pytest.raises(MisconfigurationException, match=r"LightningDataModule has no `train_dataloader`"):
        data.train_dataloader()


def test_pickles_without_its_trainer() -> None:
    data = Sized(3)
    data.trainer = object()  # type: ignore[assignment]
    twin = pickle.loads(pickle.dumps(data))
    assert twin.trainer is None
    assert twin.hparams.batch_size == 3
    assert data.trainer is not None


def test_text() -> None:
    class Broken(LightningDataModule):
        def val_dataloader(self) -> Any:
            return self.made_in_setup  # type: ignore[attr-defined]

    data = LightningDataModule.from_datasets(DATA, [DATA, Stream()])
    assert str(data).splitlines() == [
        "{Train dataloader: size=8}",
        "{Validation dataloader: 1. size=8 ; 2. size=NA}",
        "{Test dataloader: None}",
        "{Predict dataloader: None}",
    ]
    assert "{Validation dataloader: not available (AttributeError)}" in str(Broken())
