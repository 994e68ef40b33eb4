"""What every strategy must do, run for one process and for two."""

import copy

import pytest
import torch
from torch import nn
from two_ranks import FakeTrainer, Regression, ddp_strategy, prepared, run_on_two_ranks

from leyden.base.errors import CheckpointError
from leyden.dist.devices import CPUAccelerator
from leyden.strategies.base import SingleDeviceStrategy, Strategy
from leyden.strategies.precision import MixedPrecision, Precision


def _single():
    return SingleDeviceStrategy(accelerator=CPUAccelerator())


def _here(function, *args):
    return function(*args)


@pytest.fixture(params=["single_device", "ddp"])
def world(request):
    """(how to make the strategy, how to run a function under it, number of processes)."""
    return {"single_device": (_single, _here, 1), "ddp": (ddp_strategy, run_on_two_ranks, 2)}[request.param]


def _train(make, steps=3):
    torch.manual_seed(0)
    module = Regression()
    strategy = prepared(make(), module)
    step, optimizer = strategy.step_callable("training_step"), strategy.optimizers[0]
    for index in range(steps):
        optimizer.zero_grad()
        loss = step(torch.full((2, 4), float(index + strategy.global_rank)), index)
        strategy.backward(loss, lambda loss: loss.backward())
        optimizer.step()
    return strategy, module


def _check_life_of_a_run(make, size):
    strategy, module = _train(make)
    assert strategy.world_size == size
    assert strategy.num_processes == size
    assert strategy.is_distributed == (size > 1)
    assert strategy.is_global_zero == (strategy.global_rank == 0)
    assert strategy.lightning_module is module
    assert list(strategy.lightning_module_state_dict()) == ["offset", "layer.weight", "layer.bias"]
    assert strategy.root_device == torch.device("cpu")

    # The ranks agree on the weights.
    gathered = strategy.all_gather(module.layer.weight.detach())
    assert gathered.shape == ((2, 4) if size == 1 else (size, 2, 4))
    assert size == 1 or torch.equal(gathered[0], gathered[1])

    # Evaluation runs the module itself.
    assert strategy.step_callable("validation_step") == module.validation_step

    strategy.teardown()
    assert strategy.model is module
    # The same strategy serves the next call of the same trainer.
    strategy.connect(module)
    strategy.setup_environment()
    strategy.setup(FakeTrainer(module, fn="test"))
    assert strategy.step_callable("test_step") == module.test_step
    assert strategy.model is module
    strategy.teardown()


def _check_talk(make, size):
    strategy = prepared(make(), Regression())
    rank = strategy.global_rank
    strategy.barrier("here")
    assert strategy.broadcast({"from": rank}) == {"from": 0}
    assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
    assert strategy.reduce_boolean_decision(rank == 0, all=True) is (size == 1)
    total = sum(range(size))
    assert strategy.reduce(torch.tensor(float(rank)), reduce_op="sum").item() == total
    assert strategy.reduce(torch.tensor(float(rank))).item() == total / size
    assert strategy.reduce("no tensor") == "no tensor"


def _check_checkpoints(make, size, folder):
    strategy, module = _train(make)
    checkpoint = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers],
    }
    path = folder / f"{size}.ckpt"
    strategy.save_checkpoint(checkpoint, path)
    strategy.barrier()
    expected = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.layer.weight.zero_()
    loaded = strategy.load_checkpoint(path)
    strategy.load_model_state_dict(loaded)
    strategy.load_optimizer_state_dict(loaded)
    assert all(torch.equal(value, expected[key]) for key, value in module.state_dict().items())
    with pytest.raises(CheckpointError, match="2 optimizers, but configure_optimizers returned 1"):
        strategy.load_optimizer_state_dict({"optimizer_states": [{}, {}]})
    strategy.barrier()
    strategy.remove_checkpoint(path)
    strategy.barrier()
    assert not path.exists()


def test_life_of_a_run(world):
    make, run, size = world
    run(_check_life_of_a_run, make, size)


def test_talk(world):
    make, run, size = world
    run(_check_talk, make, size)


def test_checkpoints(world, tmp_path):
    make, run, size = world
    run(_check_checkpoints, make, size, tmp_path)


def test_step_is_the_bound_method_itself_when_nothing_wraps_it():
    module = Regression()
    strategy = prepared(_single(), module)
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        assert strategy.step_callable(name) == getattr(module, name)
    assert torch.equal(strategy.validation_step(torch.ones(1, 4), 0), module(torch.ones(1, 4)))


def test_step_of_a_subclass_wins():
    class Doubling(SingleDeviceStrategy):
        def training_step(self, *args, **kwargs):
            return 2 * super().training_step(*args, **kwargs)

    module = Regression()
    strategy = prepared(Doubling(), module)
    batch = torch.ones(1, 4)
    assert torch.equal(strategy.step_callable("training_step")(batch, 0), 2 * module.training_step(batch, 0))


def test_step_in_precision_context():
    module = Regression()
    strategy = prepared(SingleDeviceStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")), module)
    assert strategy.step_callable("predict_step")(torch.ones(1, 4), 0).dtype == torch.float32  # + the float32 buffer
    module.offset = None
    module.forward = module.layer.forward
    assert strategy.step_callable("predict_step")(torch.ones(1, 4), 0).dtype == torch.bfloat16


def test_own_context_of_one_stage():
    seen = []

    class Noting(Precision):
        def val_step_context(self):
            seen.append("val")
            return super().val_step_context()

    strategy = prepared(SingleDeviceStrategy(precision_plugin=Noting()), Regression())
    strategy.step_callable("training_step")(torch.ones(1, 4), 0)
    assert seen == []
    strategy.step_callable("validation_step")(torch.ones(1, 4), 0)
    assert seen == ["val"]


def test_optimizer_step_calls_before_step_between_closure_and_update():
    module = Regression()
    strategy = prepared(_single(), module)
    before = module.layer.weight.detach().clone()
    order = []

    def closure():
        order.append("closure")
        loss = module.training_step(torch.ones(2, 4), 0)
        loss.backward()
        return loss

    def before_step(optimizer):
        order.append(torch.equal(module.layer.weight, before))

    strategy.before_step = before_step
    strategy.optimizer_step(strategy.optimizers[0], closure)
    assert order == ["closure", True]
    assert not torch.equal(module.layer.weight, before)


def test_backward_surrounds_the_user_part_with_scaling():
    order = []

    class Scaling(Precision):
        def pre_backward(self, tensor, module=None):
            order.append("scale")
            return tensor * 4

    class Noting(SingleDeviceStrategy):
        def pre_backward(self, closure_loss):
            order.append(("pre", closure_loss.item()))

        def post_backward(self, closure_loss):
            order.append(("post", closure_loss.item()))

    strategy = Noting(precision_plugin=Scaling())
    result = strategy.backward(torch.tensor(1.0), lambda loss: order.append(("run", loss.item())))
    assert order == [("pre", 1.0), "scale", ("run", 4.0), ("post", 4.0)]
    assert result.item() == 4.0


def test_tensor_init_context_sets_device_and_leaves_weights_uninitialised():
    calls = []
    strategy = SingleDeviceStrategy("meta")
    with strategy.tensor_init_context():
        assert torch.empty(1).device.type == "meta"

    class Layer(nn.Linear):
        def reset_parameters(self):
            with torch.no_grad():
                self.weight.fill_(3)
            calls.append(nn.init.kaiming_uniform_(self.weight) is nn.init.constant_(tensor=self.weight, val=1))

    with _single().tensor_init_context(empty_init=True):
        layer = Layer(64, 64)
    assert calls == [True]
    assert torch.equal(layer.weight, torch.full((64, 64), 3.0))
    assert nn.init.constant_(layer.weight, 1).sum() == 64 * 64


def test_setup_without_a_model_says_so():
    with pytest.raises(RuntimeError, match=r"SingleDeviceStrategy has no model yet: call connect"):
        _single().setup(FakeTrainer(None))


def test_sync_batchnorm_is_a_switch_for_layer_sync():
    strategy = _single()
    assert strategy.sync_batchnorm is False
    strategy.sync_batchnorm = True
    assert strategy.sync_batchnorm is True
    strategy.sync_batchnorm = False
    assert strategy.layer_sync is None


def test_stage_hooks_do_nothing():
    strategy = _single()
    for stage in ("train", "validation", "test", "predict"):
        assert getattr(strategy, f"on_{stage}_start")() is None
        assert getattr(strategy, f"on_{stage}_end")() is None
    assert strategy.on_train_batch_start(None, 0) is None
    assert isinstance(strategy, Strategy)
