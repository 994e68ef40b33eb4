"""DistributedDataParallel in two processes, compared with one process that sees the whole batch."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from two_ranks import FakeTrainer, Regression, ddp_strategy, prepared, run_on_two_ranks

from leyden.base.errors import MisconfigurationException
from leyden.dist.comm import NoComm
from leyden.dist.env import TorchElasticEnvironment
from leyden.strategies.layer_sync import TorchSyncBatchNorm
from leyden.strategies.precision import MixedPrecision

DATA = torch.arange(64, dtype=torch.float32).reshape(16, 4) / 64


def _seeded(cls=Regression):
    torch.manual_seed(1)
    return cls()


def _share(rank, index, size=2):
    """Rows of batch ``index`` (4 rows) for a rank."""
    return DATA[4 * index : 4 * index + 4][rank::size]


def _reference(accumulate=1):
    module = _seeded()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for index in range(4):
        if index % accumulate == 0:
            optimizer.zero_grad()
        (module.training_step(DATA[4 * index : 4 * index + 4], index) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
    return module


def _train_and_return_weight(accumulate):
    strategy = prepared(ddp_strategy(), _seeded())
    step, optimizer = strategy.step_callable("training_step"), strategy.optimizers[0]
    for index in range(4):
        if index % accumulate == 0:
            optimizer.zero_grad()
        last = (index + 1) % accumulate == 0
        with nullcontext() if last else strategy.no_sync():
            loss = step(_share(strategy.global_rank, index), index) / accumulate
            strategy.backward(loss, lambda loss: loss.backward())
        if not last:
            grads = strategy.all_gather(strategy.lightning_module.layer.weight.grad)
            assert not torch.equal(grads[0], grads[1])  # still local
        if last:
            optimizer.step()
    return strategy.lightning_module.layer.weight.detach()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_train_like_one_process_on_the_whole_batch(accumulate):
    weight = run_on_two_ranks(_train_and_return_weight, accumulate)
    torch.testing.assert_close(weight, _reference(accumulate).layer.weight)


class Gan(nn.Module):
    """Two networks, two optimizers, manual optimisation, each backward reaches a part of the parameters only."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(4, 4)
        self.critic = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.toggled = True

    def training_step(self, batch, batch_idx, world):
        backward, optimizers = world
        for number, part, other in ((0, self.generator, self.critic), (1, self.critic, self.generator)):
            if self.toggled:
                other.requires_grad_(False)
            fake = self.generator(batch)
            loss = self.critic(fake if number == 0 else torch.cat([fake.detach(), batch])).pow(2).mean() + number
            optimizers[number].zero_grad()
            backward(loss)
            optimizers[number].step()
            if self.toggled:
                other.requires_grad_(True)
                part.requires_grad_(True)


def _gan_optimizers(module):
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (module.generator, module.critic)]


def _train_gan(toggled, kwargs):
    module = _seeded(Gan)
    module.toggled = toggled
    strategy = prepared(ddp_strategy(**kwargs), module, make_optimizers=_gan_optimizers)
    step = strategy.step_callable("training_step")

    def backward(loss):
        strategy.backward(loss, lambda loss: loss.backward())

    for index in range(4):
        step(_share(strategy.global_rank, index), index, (backward, strategy.optimizers))
    for name, tensor in module.named_parameters():
        first, second = strategy.all_gather(tensor.detach())
        assert torch.equal(first, second), name
    for name in ("0.running_mean", "0.running_var"):
        assert torch.isfinite(module.critic.state_dict()[name]).all()
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("toggled", [True, False])
def test_manual_optimisation_with_two_optimizers_syncs_each_backward(toggled):
    weights = run_on_two_ranks(_train_gan, toggled, {})
    untrained = dict(_seeded(Gan).named_parameters())
    assert all(not torch.equal(weights[name], untrained[name]) for name in weights)


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch, batch_idx, world):
        backward, optimizer = world
        optimizer.zero_grad()
        # Two backwards before one update: gradients of both must arrive, averaged once each.
        backward(self(batch).pow(2).mean())
        backward(self(batch).mean())
        optimizer.step()
        return {"anything": torch.tensor(1.0)}


def _train_manual(kwargs):
    strategy = prepared(ddp_strategy(**kwargs), _seeded(Manual))
    step = strategy.step_callable("training_step")

    def backward(loss):
        strategy.backward(loss, lambda loss: loss.backward())

    for index in range(4):
        output = step(_share(strategy.global_rank, index), index, (backward, strategy.optimizers[0]))
        assert output["anything"].item() == 1.0
    return strategy.lightning_module.layer.weight.detach()


def _manual_reference():
    module = _seeded(Manual)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for index in range(4):
        module.training_step(DATA[4 * index : 4 * index + 4], index, (torch.Tensor.backward, optimizer))
    return module.layer.weight


@pytest.mark.parametrize(
    "kwargs", [{}, {"find_unused_parameters": False}, {"gradient_as_bucket_view": True}], ids=["auto", "used", "view"]
)
def test_manual_optimisation_with_several_backwards_equals_one_process(kwargs):
    torch.testing.assert_close(run_on_two_ranks(_train_manual, kwargs), _manual_reference())


class OneBackward(Regression):
    automatic_optimization = False

    def training_step(self, batch, batch_idx, world):
        backward, optimizer = world
        optimizer.zero_grad()
        backward(self(batch).pow(2).mean())
        optimizer.step()


def _train_static():
    strategy = prepared(ddp_strategy(static_graph=True), _seeded(OneBackward))
    step = strategy.step_callable("training_step")

    def backward(loss):
        strategy.backward(loss, lambda loss: loss.backward())

    for index in range(4):
        step(_share(strategy.global_rank, index), index, (backward, strategy.optimizers[0]))
    return strategy.lightning_module.layer.weight.detach()


def test_manual_optimisation_with_a_static_graph():
    torch.testing.assert_close(run_on_two_ranks(_train_static), _reference().layer.weight)


class Unused(Regression):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


def _train_unused(kwargs):
    strategy = prepared(ddp_strategy(**kwargs), _seeded(Unused))
    step, optimizer = strategy.step_callable("training_step"), strategy.optimizers[0]
    for index in range(2):
        optimizer.zero_grad()
        step(_share(strategy.global_rank, index), index).backward()
        optimizer.step()


def test_unused_parameters_are_named_in_the_error():
    with pytest.raises(Exception, match=r"no part in the loss of the last training_step: spare.weight, spare.bias;"):
        run_on_two_ranks(_train_unused, {})


def test_unused_parameters_are_fine_when_asked_for():
    run_on_two_ranks(_train_unused, {"find_unused_parameters": True})


def _broadcast_in_test():
    strategy = ddp_strategy()
    module = Regression()  # not seeded alike
    with torch.no_grad():
        module.offset += 1
    strategy.connect(module)
    strategy.setup_environment()
    with torch.no_grad():
        module.layer.weight += strategy.global_rank
        module.offset += strategy.global_rank
    strategy.setup(FakeTrainer(module, fn="test"))
    for tensor in (module.layer.weight.detach(), module.offset):
        first, second = strategy.all_gather(tensor)
        assert torch.equal(first, second)
    assert strategy.model is module
    assert strategy.optimizers == []


def test_other_stages_get_the_weights_of_rank_0_without_a_wrapper():
    run_on_two_ranks(_broadcast_in_test)


def _compressed():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    strategy = prepared(ddp_strategy(ddp_comm_hook=fp16_compress_hook), _seeded())
    loss = strategy.step_callable("training_step")(_share(strategy.global_rank, 0), 0)
    loss.backward()
    return strategy.lightning_module.layer.weight.grad


def test_communication_hook():
    grad = run_on_two_ranks(_compressed)
    module = _seeded()
    module.training_step(DATA[:4], 0).backward()
    torch.testing.assert_close(grad, module.layer.weight.grad, atol=1e-3, rtol=1e-2)


def test_model_averaging_brings_local_weights_together_every_period():
    agree = run_on_two_ranks(_local_sgd_one_machine)
    assert agree[0]
    assert True in agree[1:]
    assert False in agree[1:]


def _local_sgd_one_machine():
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    strategy = ddp_strategy(ddp_comm_hook=post_localSGD_hook, model_averaging_period=2)
    module = _seeded()
    strategy.connect(module)
    strategy.setup_environment()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=1)
    strategy._comm_hook = (state, post_localSGD_hook, None)
    strategy.setup(FakeTrainer(module))
    step, optimizer = strategy.step_callable("training_step"), strategy.optimizers[0]
    agree = []
    for index in range(4):
        optimizer.zero_grad()
        step(_share(strategy.global_rank, index), index).backward()
        optimizer.step()
        first, second = strategy.all_gather(module.layer.weight.detach())
        agree.append(torch.allclose(first, second))
    return agree


def test_model_averaging_refuses_what_can_not_work():
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)
    with pytest.raises(ValueError, match="also pass model_averaging_period"):
        ddp_strategy(ddp_comm_state=state).setup_optimizers(FakeTrainer(Regression()))
    scaled = MixedPrecision("16-mixed", "cpu")
    with pytest.raises(ValueError, match="model averaging can't work with precision='16-mixed'"):
        ddp_strategy(ddp_comm_state=state, model_averaging_period=2, precision_plugin=scaled).setup_optimizers(
            FakeTrainer(Regression())
        )


def _mixed():
    strategy = prepared(ddp_strategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")), _seeded())
    loss = strategy.step_callable("training_step")(_share(strategy.global_rank, 0), 0)
    loss.backward()
    first, second = strategy.all_gather(strategy.lightning_module.layer.weight.grad)
    assert torch.equal(first, second)


def test_mixed_precision():
    run_on_two_ranks(_mixed)


def test_sync_batchnorm_on_the_cpu_is_refused_before_it_fails():
    strategy = ddp_strategy()
    strategy.sync_batchnorm = True
    module = Gan()
    strategy.connect(module)
    with pytest.raises(MisconfigurationException, match="SyncBatchNorm runs on GPUs only"):
        strategy.setup(FakeTrainer(module))


def test_sync_batchnorm_layers_are_replaced_and_put_back():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm2d(3)))
    keys, before = list(module.state_dict()), copy.deepcopy(module.state_dict())
    sync = TorchSyncBatchNorm()
    synced = sync.apply(module)
    assert isinstance(synced[1], nn.SyncBatchNorm)
    assert isinstance(synced[2][0], nn.SyncBatchNorm)
    parameters = [id(p) for p in synced.parameters()]
    plain = sync.revert(synced)
    assert type(plain[1]) is nn.BatchNorm1d
    assert type(plain[2][0]) is nn.BatchNorm2d
    assert [id(p) for p in plain.parameters()] == parameters
    assert list(plain.state_dict()) == keys
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
    assert plain[1](torch.ones(2, 4)).shape == (2, 4)
    alone = sync.apply(nn.BatchNorm1d(4))
    assert type(sync.revert(alone)) is nn.BatchNorm1d


def test_ranks_before_the_environment_is_set_up(monkeypatch):
    for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    strategy = ddp_strategy()
    strategy.num_nodes = 2
    assert (strategy.global_rank, strategy.world_size, strategy.num_processes) == (0, 4, 2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}
    assert strategy.process_group_backend == "gloo"
    assert isinstance(strategy.comm, NoComm)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "1")
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank) == (3, 1, 1)
    monkeypatch.setenv("RANK", "2")
    strategy.cluster_environment = TorchElasticEnvironment()
    assert strategy.global_rank == 2


def _wrapped_reaches_the_users_module():
    strategy = prepared(ddp_strategy(), _seeded())
    assert torch.equal(strategy.model.module.layer.weight, strategy.lightning_module.layer.weight)
    assert strategy.model.module.training_step == strategy.lightning_module.training_step
    with pytest.raises(AttributeError):
        _ = strategy.model.module.nothing_of_that_name


def test_attributes_behind_the_wrapper():
    run_on_two_ranks(_wrapped_reaches_the_users_module)


def _frozen():
    module = _seeded()
    module.requires_grad_(False)
    strategy = prepared(ddp_strategy(), module, make_optimizers=lambda module: [])
    assert strategy.model is module
    assert strategy.step_callable("training_step") == module.training_step


def test_a_module_without_trainable_parameters_is_not_wrapped():
    run_on_two_ranks(_frozen)
