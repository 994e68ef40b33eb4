from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from leyden.loggers.hparams_yaml import (
    convert_params,
    flatten_dict,
    sanitize_params,
    save_hparams_to_yaml,
)


class Colour(Enum):
    RED = 1


@dataclass
class Config:
    width: int = 3
    more: dict = field(default_factory=lambda: {"deep": True})


@pytest.mark.parametrize(
    "params",
    [
        {"a": {"b": {"c": 1}}, "d": [1, 2]},
        {5: {"a": 123}, "n": Namespace(x=1)},
        {"dl": [{"a": 1}, {"b": 2}], "l": [1, 2], "config": Config()},
        {},
    ],
    ids=str,
)
def test_flatten_as_lightning(params):
    from lightning.fabric.utilities.logger import _flatten_dict

    assert flatten_dict(params) == _flatten_dict(params)


def test_sanitize_as_lightning_and_without_touching_the_original():
    from lightning.fabric.utilities.logger import _sanitize_params

    params = {
        "f": np.float32(0.5),
        "i": 1,
        "s": "a",
        "b": True,
        "l": [1],
        "c": torch.nn.ReLU,
        "t": torch.ones(1),
        "n": None,
    }
    before = dict(params)
    ours = sanitize_params(params)
    assert params == before
    theirs = _sanitize_params(dict(params))
    assert ours == theirs
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in theirs.items()}


def test_params_as_a_dict():
    assert convert_params(None) == {}
    assert convert_params(Namespace(a=1)) == {"a": 1}


def test_file_needs_no_code_to_read(tmp_path):
    hparams = {
        "none": None,
        "lr": 1e-3,
        "np": np.float64(0.5),
        "np_int": np.int64(3),
        "enum": Colour.RED,
        "path": Path("/tmp/x"),
        "cls": torch.nn.ReLU,
        "function": torch.relu,
        "module": torch.nn.Linear(1, 1),
        "config": Config(),
        "ordered": OrderedDict(a=[Namespace(z=1)]),
        "tensor": torch.arange(3),
        "big": torch.zeros(1000),
        "set": {1},
        "long": "y" * 500,
    }
    save_hparams_to_yaml(tmp_path / "hparams.yaml", hparams)
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {
        "none": None,
        "lr": 0.001,
        "np": 0.5,
        "np_int": 3,
        "enum": "RED",
        "path": "/tmp/x",
        "cls": "torch.nn.modules.activation.ReLU",
        "function": "None.relu"
        if torch.relu.__module__ is None
        else f"{torch.relu.__module__}.{torch.relu.__qualname__}",
        "module": "Linear(in_features=1, out_features=1, bias=True)",
        "config": {"width": 3, "more": {"deep": True}},
        "ordered": {"a": [{"z": 1}]},
        "tensor": [0, 1, 2],
        "big": "Tensor(1000,)",
        "set": [1],
        "long": "y" * 500,
    }


def test_errors_name_the_way_out(tmp_path):
    with pytest.raises(RuntimeError, match="create it first"):
        save_hparams_to_yaml(tmp_path / "none" / "hparams.yaml", {})
    with pytest.raises(TypeError, match="must be a dictionary, not int"):
        save_hparams_to_yaml(tmp_path / "hparams.yaml", 3)


def test_recursive_hparams_warn(tmp_path):
    loop = {}
    loop["me"] = loop
    with pytest.warns(UserWarning, match="was not written"):
        save_hparams_to_yaml(tmp_path / "hparams.yaml", loop)
