"""Export to TorchScript, ONNX and TensorRT."""

import importlib.machinery
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden.base.errors import MisconfigurationException
from leyden.core.module import LightningModule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(LightningModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(size, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).sum()


@pytest.fixture
def net() -> Net:
    net = Net()
    net.example_input_array = torch.ones(1, 2)
    return net


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript(net: Net, method: str, tmp_path: Path) -> None:
    script = net.to_torchscript(tmp_path / "a.pt", method=method)
    assert net.training, "the module's mode is as before"
    assert not script.training
    x = torch.rand(4, 2)
    expected = net.eval()(x)
    assert torch.equal(script(x), expected)
    assert torch.equal(torch.jit.load(tmp_path / "a.pt")(x), expected)
    assert net.load_from_checkpoint is not None  # TorchScript reads all attributes, so it must not raise here


def test_torchscript_of_a_module_in_a_run(net: Net) -> None:
    net._trainer = object()  # type: ignore[assignment]
    assert torch.equal(net.to_torchscript()(torch.ones(1, 2)), net.eval()(torch.ones(1, 2)))


def test_trace_inputs(net: Net) -> None:
    script = net.to_torchscript(method="trace", example_inputs=torch.ones(5, 2), check_inputs=[torch.zeros(5, 2)])
    assert script(torch.ones(5, 2)).shape == (5, 3)
    net.example_input_array = None
    with pytest.raises(ValueError, match=r"pass `example_inputs`"):
        net.to_torchscript(method="trace")
    with pytest.raises(ValueError, match="must be 'script' or 'trace'"):
        net.to_torchscript(method="temp")


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType | None = None) -> None:
    """Makes a package look installed."""
    find = importlib.util.find_spec
    spec = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted, *rest: spec if wanted == name else find(wanted, *rest)
    )
    if module is not None:
        monkeypatch.setitem(sys.modules, name, module)


def test_onnx_says_what_is_missing(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ModuleNotFoundError, match=r"dynamo=False\) needs the package onnx: pip install onnx"):
        net.to_onnx("a.onnx", dynamo=False)
    pretend(monkeypatch, "onnx")
    with pytest.raises(ModuleNotFoundError, match=r"dynamo=True\) needs the package onnxscript"):
        net.to_onnx("a.onnx", dynamo=True)


def test_onnx_export_gets_sample_and_path(net: Net, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "onnx")
    asked: list[Any] = []
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: asked.append((args, kwargs)) or "program")
    assert net.to_onnx(tmp_path / "a.onnx", opset_version=17, dynamo=False) == "program"
    [((model, sample, path), kwargs)] = asked
    assert model is net
    assert sample is net.example_input_array
    assert path == str(tmp_path / "a.onnx")
    assert kwargs == {"opset_version": 17, "dynamo": False}
    buffer = io.BytesIO()
    net.to_onnx(buffer, torch.zeros(2, 2), dynamo=False)
    assert asked[1][0][2] is buffer
    net.example_input_array = None
    with pytest.raises(ValueError, match="no input for the export to ONNX: pass `input_sample`"):
        net.to_onnx(dynamo=False)


def test_onnx_for_real(net: Net, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    net.to_onnx(tmp_path / "a.onnx", dynamo=False)
    assert (tmp_path / "a.onnx").stat().st_size > 0
    assert net.training


def test_tensorrt(net: Net, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="needs the package torch_tensorrt"):
        net.to_tensorrt()
    saved: list[Any] = []
    package: Any = ModuleType("torch_tensorrt")
    package.compile = lambda **kwargs: kwargs
    package.save = lambda *args, **kwargs: saved.append((args, kwargs))
    pretend(monkeypatch, "torch_tensorrt", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MisconfigurationException, match="the module is on cpu, and default_device=cuda"):
        net.to_tensorrt()
    with pytest.raises(ValueError, match="output_format='exported_program'"):
        net.to_tensorrt("a", ir="ts")
    moves: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(net, "to", lambda device: moves.append(str(device)))
    compiled = net.to_tensorrt(tmp_path / "a.ep", enabled_precisions={"fp16"})
    assert moves == ["cuda", "cpu"]
    assert compiled["module"] is net
    assert compiled["ir"] == "default"
    assert torch.equal(compiled["inputs"][0], net.example_input_array)
    assert compiled["enabled_precisions"] == {"fp16"}
    assert saved[0][1]["output_format"] == "exported_program"
    assert net.training
