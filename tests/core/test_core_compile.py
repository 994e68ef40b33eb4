"""A module that went through torch.compile."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden.base import log as log_module
from leyden.core.compile import from_compiled, to_uncompiled, unwrap_module
from leyden.core.hooks import is_overridden
from leyden.core.module import LightningModule


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).sum()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_steps_are_compiled_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_said", set())
    net = Net()
    model = compiled(net)
    assert from_compiled(model) is net
    assert net._compiler_ctx is not None
    assert {"forward", "training_step"} <= net.__dict__.keys()
    assert "validation_step" not in net.__dict__
    assert is_overridden("training_step", net)
    assert not is_overridden("validation_step", net)
    batch = torch.ones(3, 2)
    assert torch.allclose(net.training_step(batch, 0), Net.forward(net, batch).sum())
    with pytest.warns(UserWarning, match="isn't attached"):
        net.log("compiled", 1)
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]
    assert unwrap_module(model) is net, "compiled once"
    assert to_uncompiled(model) is net
    assert not {"forward", "training_step", "log", "log_dict"} & net.__dict__.keys()
    assert net._compiler_ctx is None
    assert to_uncompiled(model) is net
    from_compiled(model)
    assert to_uncompiled(net) is net


def test_a_method_set_on_the_instance_comes_back() -> None:
    net = Net()
    own = net.training_step = lambda batch, batch_idx: batch.sum()
    from_compiled(compiled(net))
    assert net.training_step is not own
    assert to_uncompiled(net).training_step is own


def test_what_is_not_a_compiled_module() -> None:
    net = Net()
    assert unwrap_module(net) is net
    with pytest.raises(TypeError, match=r"got `Linear`: wrap an nn.Module in a LightningModule"):
        unwrap_module(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"is a Net, not what `torch.compile"):
        from_compiled(net)
    with pytest.raises(ValueError, match=r"is a compiled Linear, but only a LightningModule"):
        from_compiled(compiled(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="this Net is not compiled"):
        to_uncompiled(net)
    with pytest.raises(ValueError, match=r"must be a LightningModule or the result of torch.compile"):
        to_uncompiled(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="a compiled Linear, not"):
        to_uncompiled(compiled(nn.Linear(1, 1)))
