"""load_from_checkpoint."""

import io
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leyden.base.errors import CheckpointError, UnsafeCheckpointError
from leyden.core.datamodule import LightningDataModule
from leyden.core.loading import load_hparams_file
from leyden.core.module import LightningModule


class Net(LightningModule):
    def __init__(self, size: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(size, 1)


def save(path: Path, module: Any, **more: Any) -> Path:
    """Writes what the trainer writes of a module."""
    torch.save(
        {
            "state_dict": module.state_dict(),
            module.CHECKPOINT_HYPER_PARAMS_NAME: module.__dict__.get("_hparams_name"),
            module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams),
            **more,
        },
        path,
    )
    return path


def test_hyperparameters_weights_and_overrides(tmp_path: Path) -> None:
    net = Net(3, lr=0.5)
    path = save(tmp_path / "a.ckpt", net)
    for source in (path, str(path), path.as_uri(), io.BytesIO(path.read_bytes())):
        loaded = Net.load_from_checkpoint(source)
        assert torch.equal(loaded.layer.weight, net.layer.weight)
        assert loaded.hparams == {"size": 3, "lr": 0.5}
    assert Net.load_from_checkpoint(path, lr=7).hparams.lr == 7
    asked: list[str] = []
    Net.load_from_checkpoint(path, map_location=lambda storage, location: asked.append(location) or storage)
    assert set(asked) == {"cpu"}


def test_unknown_hyperparameters_are_left_out_unless_all_are_taken(tmp_path: Path) -> None:
    class Other(LightningModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = nn.Linear(size, 1)

    class Open(Other):
        def __init__(self, size: int, **rest: Any) -> None:
            super().__init__(size)
            self.rest = rest

    path = save(tmp_path / "a.ckpt", Net(3, lr=0.5))
    assert Other.load_from_checkpoint(path).layer.in_features == 3
    assert Open.load_from_checkpoint(path, more=1).rest == {"lr": 0.5, "more": 1}


def test_missing_arguments_are_named(tmp_path: Path) -> None:
    class Needs(Net):
        def __init__(self, size: int, teacher: Any, depth: int) -> None:
            super().__init__(size)

    path = save(tmp_path / "a.ckpt", Net(3))
    with pytest.raises(TypeError, match=r"needs 'teacher', 'depth'.*\(path, teacher=..., depth=...\)"):
        Needs.load_from_checkpoint(path)
    assert Needs.load_from_checkpoint(path, teacher=None, depth=1).layer.in_features == 3


def test_hyperparameters_as_one_argument(tmp_path: Path) -> None:
    class Whole(LightningModule):
        def __init__(self, hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters(hparams)
            self.layer = nn.Linear(hparams.size, 1)

    path = save(tmp_path / "a.ckpt", Whole(Namespace(size=3, lr=1)))
    loaded = Whole.load_from_checkpoint(path)
    assert loaded.hparams == {"size": 3, "lr": 1}


def test_hyperparameters_under_an_old_name(tmp_path: Path) -> None:
    torch.save({"state_dict": Net(3).state_dict(), "hparams": {"size": 3, "lr": 0.5}}, tmp_path / "old.ckpt")
    assert Net.load_from_checkpoint(tmp_path / "old.ckpt").hparams == {"size": 3, "lr": 0.5}


def test_strict(tmp_path: Path) -> None:
    class Loose(Net):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.strict_loading = False

    path = save(tmp_path / "a.ckpt", Net(3), state_dict={"layer.weight": torch.ones(1, 3), "x": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"layer\.bias"):
        Net.load_from_checkpoint(path)
    with pytest.warns(UserWarning, match="the checkpoint has") as caught:
        loaded = Net.load_from_checkpoint(path, strict=False)
    assert [re.findall(r"\[.*\]", str(w.message)) for w in caught] == [["['layer.bias']"], ["['x']"]]
    assert loaded.layer.weight[0, 0] == 1
    with pytest.warns(UserWarning, match="the checkpoint has"):
        Loose.load_from_checkpoint(path)
    with pytest.raises(ValueError, match=r"strict=True.*strict_loading=False of Loose"):
        Loose.load_from_checkpoint(path, strict=True)


def test_hooks(tmp_path: Path) -> None:
    class Late(LightningModule):
        def configure_model(self) -> None:
            self.layer = nn.Linear(3, 1)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["layer.bias"] = torch.full((1,), 5.0)
            self.epoch = checkpoint["epoch"]

    loaded = Late.load_from_checkpoint(save(tmp_path / "a.ckpt", Net(3), epoch=4))
    assert loaded.layer.bias.item() == 5
    assert loaded.epoch == 4


def test_an_empty_state_dict(tmp_path: Path) -> None:
    class Empty(LightningModule):
        pass

    with pytest.warns(UserWarning, match="no weights were loaded"):
        Empty.load_from_checkpoint(save(tmp_path / "a.ckpt", Empty()))


def test_only_on_the_class(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", Net(3))
    with pytest.raises(TypeError, match=r"`Net.load_from_checkpoint` creates a new object"):
        Net(3).load_from_checkpoint(path)

    class Child(Net):
        @classmethod
        def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
            model = super().load_from_checkpoint(*args, **kwargs)
            return type(model), cls

    assert Child.load_from_checkpoint(path) == (Child, Child)


class Gadget:
    pass


def test_code_in_a_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", Net(3), gadget=Gadget())
    with pytest.raises(UnsafeCheckpointError, match="Gadget"):
        Net.load_from_checkpoint(path)
    assert Net.load_from_checkpoint(path, weights_only=False).layer.in_features == 3
    path = save(tmp_path / "b.ckpt", Net(3), hyper_parameters={"size": 3, "_instantiator": "os.system"})
    assert Net.load_from_checkpoint(path).layer.in_features == 3, "an import path in a file is never followed"


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    torch.save(Net(3).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"no 'state_dict'.*load_state_dict\(torch.load\(path\)\)"):
        Net.load_from_checkpoint(tmp_path / "weights.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        Net.load_from_checkpoint(tmp_path / "list.pt")
    with pytest.raises(FileNotFoundError):
        Net.load_from_checkpoint(tmp_path / "absent.ckpt")


def test_hparams_files(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", Net(3), hyper_parameters={"size": 99})
    (tmp_path / "h.yaml").write_text("size: 3\nlr: 0.25\nshape: !!python/tuple [1, 2]\n")
    (tmp_path / "h.csv").write_text("key,value\nsize,3\nname,adam\n")
    assert Net.load_from_checkpoint(path, hparams_file=tmp_path / "h.yaml").hparams == {"size": 3, "lr": 0.25}
    assert Net.load_from_checkpoint(path, hparams_file=str(tmp_path / "h.csv"), lr=1).hparams == {"size": 3, "lr": 1}
    assert load_hparams_file(tmp_path / "h.yaml")["shape"] == (1, 2)
    assert load_hparams_file(tmp_path / "h.csv") == {"size": 3, "name": "adam"}
    with pytest.raises(ValueError, match=r"must end in \.yaml, \.yml or \.csv"):
        Net.load_from_checkpoint(path, hparams_file="h.txt")
    (tmp_path / "bad.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="holds a list"):
        load_hparams_file(tmp_path / "bad.yaml")
    (tmp_path / "evil.yaml").write_text("size: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(Exception, match="could not determine a constructor"):
        load_hparams_file(tmp_path / "evil.yaml")


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.position = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def test_datamodules(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "datamodule_hyper_parameters": {"batch_size": 8}, "Data": {"position": 5}}, path)
    loaded = Data.load_from_checkpoint(path)
    assert loaded.hparams.batch_size == 8
    assert loaded.position == 5
    assert Data.load_from_checkpoint(path, batch_size=3).hparams.batch_size == 3
    with pytest.raises(TypeError, match="creates a new object"):
        loaded.load_from_checkpoint(path)
