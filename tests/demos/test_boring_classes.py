"""The boring classes have the shapes and sizes of Lightning's, and train."""

import importlib

import pytest
import torch

import leyden as L
from leyden.demos import boring_classes
from leyden.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    RandomDataset,
    RandomDictDataset,
    RandomIterableDataset,
    RandomIterableDatasetWithLen,
)


def quiet_trainer(tmp_path, **kwargs):
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **options, **kwargs)


def test_the_same_classes_as_lightning():
    theirs = importlib.import_module("lightning.pytorch.demos.boring_classes")
    public = {
        name
        for name, value in vars(theirs).items()
        if isinstance(value, type) and value.__module__ == theirs.__name__ and name != "Net"  # an MNIST network
    }
    assert public == set(boring_classes.__all__)


def test_datasets():
    assert RandomDataset(3, 5)[4].shape == (3,)
    assert len(RandomDataset(3, 5)) == 5
    item = RandomDictDataset(3, 5)[0]
    assert torch.equal(item["b"], item["a"] + 2)
    assert [x.shape for x in RandomIterableDataset(3, 2)] == [(3,), (3,)]
    assert not hasattr(RandomIterableDataset(3, 2), "__len__")
    assert len(RandomIterableDatasetWithLen(3, 2)) == len(list(RandomIterableDatasetWithLen(3, 2))) == 2


@pytest.mark.parametrize("model", [BoringModel, ManualOptimBoringModel])
@pytest.mark.parametrize("data", [None, BoringDataModule, BoringDataModuleNoLen])
def test_every_stage_runs(tmp_path, model, data):
    trainer = quiet_trainer(tmp_path, fast_dev_run=2)
    module, datamodule = model(), data and data()
    before = module.layer.weight.clone()
    trainer.fit(module, datamodule=datamodule)
    assert not torch.equal(before, module.layer.weight)
    trainer.validate(module, datamodule=datamodule, verbose=False)
    trainer.test(module, datamodule=datamodule, verbose=False)
    predictions = trainer.predict(module, datamodule=datamodule)
    assert [prediction.shape for prediction in predictions] == [(1, 2), (1, 2)]


def test_demo_model_trains(tmp_path):
    data = torch.utils.data.DataLoader(RandomDataset(32, 8), batch_size=4)
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(DemoModel(out_dim=3), data)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("stage", "loaders", "length"),
    [("fit", "train", 16), ("fit", "val", 32), ("test", "test", 64), ("predict", "predict", 128)],
)
def test_iterable_data_module_has_two_loaders(stage, loaders, length):
    data = IterableBoringDataModule()
    data.setup(stage)
    sized, stream = getattr(data, f"{loaders}_dataloader")()
    assert len(sized) == length
    assert sum(1 for _ in stream) == length
    assert next(iter(sized)).shape == (1, 4)
