"""`LightningConfigBuilder` and `LightningTrainer`, as the migration part of the tutorial has them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_scripts import QUIET, Validated, digits
from torch.utils.data import DataLoader

import leyden as pl
from leyden.base.errors import LeydenDeprecationWarning, MisconfigurationException
from leyden.train import CheckpointConfig, RunConfig, ScalingConfig
from leyden.train.legacy import _with_retention
from leyden.train.lightning import LightningConfigBuilder, LightningTrainer

pytest.importorskip("sklearn", reason="the digits data set comes with scikit-learn")


class DigitsDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(digits(0, 256), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(digits(256, 384), batch_size=self.batch_size)


@contextlib.contextmanager
def deprecated() -> Iterator[None]:
    with pytest.warns(LeydenDeprecationWarning, match="TorchTrainer"):
        yield


def builder() -> LightningConfigBuilder:
    with deprecated():
        return LightningConfigBuilder()


def test_the_tutorials_old_listing(tmp_path, monkeypatch):
    """Steps 1 to 6, with two CPU workers for four GPUs."""
    monkeypatch.chdir(tmp_path)
    config_builder = builder()
    # [1] Collect model configs
    config_builder.module(cls=Validated, lr=1e-2, width=4)

    # [2] Collect checkpointing configs
    config_builder.checkpointing(monitor="val_accuracy", mode="max", save_top_k=2, dirpath=str(tmp_path / "files"))

    # [3] Collect pl.Trainer configs
    config_builder.trainer(max_epochs=4, accelerator="cpu", log_every_n_steps=100, **QUIET)

    # [4] Build datasets on the head node
    datamodule = DigitsDataModule(batch_size=32)
    config_builder.fit_params(datamodule=datamodule)

    # [5] Execute the internal training function in a black box
    with deprecated():
        ray_trainer = LightningTrainer(
            lightning_config=config_builder.build(),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(tmp_path / "results"),
                checkpoint_config=CheckpointConfig(
                    num_to_keep=3,
                    checkpoint_score_attribute="val_accuracy",
                    checkpoint_score_order="max",
                ),
            ),
        )
    result = ray_trainer.fit()

    # [6] Load the trained model from an opaque Lightning-specific checkpoint.
    lightning_checkpoint = result.checkpoint
    model = lightning_checkpoint.get_model(Validated)
    assert model.hparams["width"] == 4
    assert result.metrics["epoch"] == 3
    best, metrics = result.best_checkpoints[-1]
    assert metrics["val_accuracy"] == max(each["val_accuracy"] for _, each in result.best_checkpoints)
    x, y = digits(256, 384)[:]
    accuracy = (best.get_model(Validated).eval()(x).argmax(1) == y).float().mean()
    assert accuracy == pytest.approx(metrics["val_accuracy"], abs=1e-6)


def test_build_collects_everything():
    config = (
        builder()
        .module(cls=Validated, width=2)
        .trainer(max_epochs=1)
        .fit_params(ckpt_path="x")
        .strategy("ddp", find_unused_parameters=True)
        .checkpointing(save_top_k=-1)
        .build()
    )
    assert config == {
        "module_class": Validated,
        "module": {"width": 2},
        "trainer": {"max_epochs": 1},
        "fit": {"ckpt_path": "x"},
        "strategy": ("ddp", {"find_unused_parameters": True}),
        "checkpoint": {"save_top_k": -1},
    }


def test_build_names_all_that_is_wrong():
    with pytest.raises(MisconfigurationException, match=r"(?s)2 problems.*module\(cls.*accelerator"):
        builder().trainer(accelerator="tpu").build()
    with pytest.raises(MisconfigurationException, match="must be a class"):
        builder().module(cls=Validated()).build()
    with pytest.raises(ValueError, match="use one of"):
        builder().strategy("horovod")


def test_build_warns_of_what_it_ignores():
    made = builder().module(cls=Validated).trainer(strategy="ddp", devices=4).fit_params(model=Validated())
    with pytest.warns(UserWarning, match="is ignored") as caught:
        config = made.build()
    texts = [str(each.message) for each in caught]
    assert any("trainer(strategy=...) is ignored" in text for text in texts)
    assert any("trainer(devices=...) is ignored" in text for text in texts)
    assert any("fit_params(model=...) is ignored" in text for text in texts)
    assert config["trainer"] == config["fit"] == {}


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({}, (1, None, "min")),
        ({"save_top_k": -1, "monitor": "a"}, (None, "a", "min")),
        ({"save_top_k": 0}, (1, None, "min")),
        ({"save_top_k": 3, "monitor": "a", "mode": "max"}, (3, "a", "max")),
    ],
)
def test_retention_of_model_checkpoint_becomes_the_runs(checkpoint: dict[str, Any], expected: tuple):
    config = _with_retention(RunConfig(), checkpoint).checkpoint_config
    assert (config.num_to_keep, config.checkpoint_score_attribute, config.checkpoint_score_order) == expected


def test_retention_of_the_user_stays():
    given = RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert _with_retention(given, {"save_top_k": 5}).checkpoint_config == CheckpointConfig(num_to_keep=2)


def test_unsupported_arguments_are_named():
    config = builder().module(cls=Validated).build()
    with deprecated(), pytest.raises(MisconfigurationException, match="datasets="):
        LightningTrainer(config, datasets={"train": [1]})


def test_get_model_takes_a_class(tmp_path: Path):
    from leyden.train.legacy import LightningCheckpoint

    trainer = pl.Trainer(accelerator="cpu", max_epochs=0, default_root_dir=tmp_path, **QUIET)
    trainer.strategy.connect(Validated(width=2))
    trainer.save_checkpoint(os.path.join(tmp_path, "checkpoint.ckpt"))
    checkpoint = LightningCheckpoint(tmp_path)
    assert checkpoint.get_model(Validated, lr=0.5).lr == 0.5
    assert isinstance(checkpoint.get_model(Validated, map_location=torch.device("cpu")), Validated)
    with pytest.raises(TypeError, match="takes the class"):
        checkpoint.get_model(Validated())
