"""Gradient norms, shared parameters and operation counts of modules."""

import math

import pytest
import torch
from torch import nn

from leyden.base.modules import find_shared_parameters, grad_norm, measure_flops, set_shared_parameters


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 3, bias=False)
        self.again = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
        self.again["one"].weight = self.inside.weight
        self.again["two"].bias = self.again["one"].bias
        self.bare = self.inside.weight


@pytest.fixture
def linear():
    module = nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[3.0, -4.0]])
    module.bias.grad = torch.tensor([12.0])
    return module


def test_grad_norm(linear):
    norms = grad_norm(linear, 2)
    assert {name: value.item() for name, value in norms.items()} == {
        "grad_2.0_norm/weight": 5.0,
        "grad_2.0_norm/bias": 12.0,
        "grad_2.0_norm_total": 13.0,
    }


def test_grad_norm_inf_and_separator(linear):
    norms = grad_norm(linear, "inf", group_separator=".")
    assert norms["grad_inf_norm.weight"] == 4
    assert norms["grad_inf_norm_total"] == 12


def test_grad_norm_leaves_out_what_has_no_gradient(linear):
    linear.bias.grad = None
    assert set(grad_norm(linear, 1)) == {"grad_1.0_norm/weight", "grad_1.0_norm_total"}
    linear.weight.grad = None
    assert grad_norm(linear, 1) == {}


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_grad_norm_refuses_what_is_no_norm(linear, norm_type):
    with pytest.raises(ValueError, match=f"norm_type={norm_type}"):
        grad_norm(linear, norm_type)


def test_find_shared_parameters():
    assert find_shared_parameters(Tied()) == [
        ["bare", "inside.weight", "again.one.weight"],
        ["again.one.bias", "again.two.bias"],
    ]
    assert find_shared_parameters(nn.Linear(2, 2)) == []


def test_a_module_reached_twice_is_shared():
    layer = nn.Linear(2, 2)
    module = nn.Sequential(layer, layer)
    assert find_shared_parameters(module) == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_set_shared_parameters_restores_them():
    module = Tied()
    shared = find_shared_parameters(module)
    module.again["one"].weight = nn.Parameter(torch.zeros(3, 3))
    module.again["two"].bias = nn.Parameter(torch.zeros(3))
    assert find_shared_parameters(module) != shared
    assert set_shared_parameters(module, shared) is module
    assert find_shared_parameters(module) == shared


def test_measure_flops_on_meta():
    with torch.device("meta"):
        module = nn.Linear(8, 4, bias=False)
        x = torch.randn(2, 8)
    forward = measure_flops(module, lambda: module(x))
    assert forward == 2 * 2 * 8 * 4
    assert measure_flops(module, lambda: module(x), torch.sum) == 2 * forward


def test_the_same_as_lightning(linear):
    lightning = pytest.importorskip("lightning.pytorch.utilities")
    for norm_type in (1, 2, "inf"):
        assert grad_norm(linear, norm_type) == lightning.grad_norm(linear, norm_type)
    assert find_shared_parameters(Tied()) == lightning.find_shared_parameters(Tied())
