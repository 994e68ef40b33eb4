import pickle

import pytest
import torch

from leyden.strategies.base import SingleDeviceStrategy
from leyden.strategies.ddp import DDPStrategy
from leyden.strategies.registry import StrategyRegistry


@pytest.mark.parametrize(
    ("name", "start_method"), [("ddp", "popen"), ("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork")]
)
@pytest.mark.parametrize(
    ("suffix", "kwargs"),
    [
        ("", {}),
        ("_find_unused_parameters_true", {"find_unused_parameters": True}),
        ("_find_unused_parameters_false", {"find_unused_parameters": False}),
    ],
)
def test_ddp_names(name, start_method, suffix, kwargs):
    strategy = StrategyRegistry.get(name + suffix)
    assert type(strategy) is DDPStrategy
    assert strategy.start_method == start_method
    assert strategy._ddp_kwargs == kwargs
    assert name + suffix in StrategyRegistry
    assert name + suffix in StrategyRegistry.available_strategies()


def test_single_device():
    assert StrategyRegistry.get("single_device", device="meta").root_device == torch.device("meta")


@pytest.mark.parametrize("name", ["fsdp", "deepspeed_stage_3_offload", "single_xla"])
def test_names_of_other_versions_are_not_faked(name):
    with pytest.raises(ValueError, match=f"strategy='{name}' (is not in this version|needs torch_xla)"):
        StrategyRegistry.get(name)
    assert name not in StrategyRegistry


def test_unknown_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="strategy='dpd' is unknown; did you mean 'ddp'"):
        StrategyRegistry.get("dpd")


def test_own_strategy():
    @StrategyRegistry.register("mine", description="a test", device="meta")
    class Mine(SingleDeviceStrategy):
        pass

    try:
        assert type(StrategyRegistry.get("mine")) is Mine
        assert StrategyRegistry.get("mine").root_device.type == "meta"
        assert StrategyRegistry.get_description("mine") == "a test"
        with pytest.raises(ValueError, match="already registered; pass override=True"):
            StrategyRegistry.register("mine", Mine)
    finally:
        StrategyRegistry.remove("mine")
    assert "mine" not in StrategyRegistry


@pytest.mark.parametrize("name", ["single_device", "ddp", "ddp_spawn"])
def test_strategies_can_be_sent_to_a_process(name):
    strategy = StrategyRegistry.get(name)
    strategy.configure_launcher()
    copy = pickle.loads(pickle.dumps(strategy))
    assert type(copy) is type(strategy)
