import inspect
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from leyden.dist import comm as comm_module
from leyden.dist.comm import Comm, NoComm, init_process_group
from leyden.dist.env import DistInfo, LightningEnvironment, find_free_port
from leyden.dist.launch import MultiProcessingLauncher


def _public(cls):
    return {name: member for name, member in vars(cls).items() if not name.startswith("_")}


def test_both_kinds_have_the_same_methods():
    one, many = _public(NoComm), _public(Comm)
    for name, member in many.items():
        assert name in one
        if inspect.isfunction(member):
            assert list(inspect.signature(member).parameters) == list(inspect.signature(one[name]).parameters)
    assert {"rank", "world_size"} <= set(one)


def test_one_process():
    comm = NoComm()
    tensor = torch.ones(2)
    comm.barrier("x")
    comm.broadcast_module_state(nn.Linear(1, 1))
    assert comm.all_reduce(tensor) is tensor
    assert comm.all_gather(tensor) is tensor
    assert comm.broadcast_object("a") == "a"
    assert comm.all_gather_object("a") == ["a"]
    assert comm.reduce_bool(True) is True
    assert comm.host_group is None
    comm.destroy()


@pytest.mark.parametrize("failed", [False, True])
def test_exit_hands_the_gil_to_gloos_threads_and_leaves_the_group_only_after_a_good_run(monkeypatch, failed):
    order = []
    monkeypatch.setattr(comm_module, "destroy_process_group", lambda: order.append("destroy"))
    monkeypatch.setattr(comm_module.time, "sleep", lambda seconds: order.append("sleep"))
    monkeypatch.setattr(sys, "last_value", RuntimeError() if failed else None, raising=False)
    comm_module._destroy_at_exit()
    assert order == (["sleep"] if failed else ["destroy", "sleep"])


def _collectives(port):
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    info = DistInfo(rank, rank, 0, 2, 2, "127.0.0.1", port)
    assert init_process_group(info, "gloo") is True
    assert init_process_group(info, "gloo") is False
    with pytest.raises(RuntimeError, match="a process group of 2 processes exists, but this run needs 3"):
        init_process_group(DistInfo(rank, rank, 0, 3, 3, "127.0.0.1", port), "gloo")
    comm = Comm(torch.device("cpu"))
    assert (comm.rank, comm.world_size) == (rank, 2)
    assert comm.host_group is dist.group.WORLD
    comm.barrier()

    values = {"mean": 1.5, "avg": 1.5, "sum": 3.0, "min": 1.0, "max": 2.0, "product": 2.0}
    for op, expected in values.items():
        tensor = torch.tensor([rank + 1.0])
        assert comm.all_reduce(tensor, op) is tensor
        assert tensor.item() == expected, op
    assert comm.all_reduce(torch.tensor(rank + 1), "MEAN").item() == 1  # an int stays one
    assert comm.all_reduce(torch.tensor(rank + 1), dist.ReduceOp.MAX).item() == 2
    assert comm.all_reduce(torch.ones(2, 3).t() * rank, "sum").tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(ValueError, match="reduce op 'median' is unknown; use one of mean"):
        comm.all_reduce(torch.ones(1), "median")

    gathered = comm.all_gather(torch.full((3,), float(rank)))
    assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
    assert comm.all_gather(torch.tensor(rank)).tolist() == [0, 1]
    own = torch.tensor([1.0 + rank], requires_grad=True)
    weights = torch.tensor([[2.0], [5.0]]) * (rank + 1)
    (comm.all_gather(own, sync_grads=True) * weights).sum().backward()
    assert own.grad.item() == (6.0 if rank == 0 else 15.0)  # both ranks' losses see it

    assert comm.broadcast_object({"rank": rank}, src=1) == {"rank": 1}
    assert comm.all_gather_object(("a", rank)) == [("a", 0), ("a", 1)]
    assert comm.reduce_bool(rank == 0, all=True) is False
    assert comm.reduce_bool(rank == 0, all=False) is True
    assert comm.reduce_bool(True) is True

    module = nn.BatchNorm1d(2)
    with torch.no_grad():
        module.weight += rank
        module.running_mean += rank + 1
        module.bias += rank
    module._ddp_params_and_buffers_to_ignore = ["bias"]
    comm.broadcast_module_state(module)
    assert module.weight.tolist() == [1.0, 1.0]
    assert module.running_mean.tolist() == [1.0, 1.0]
    assert module.bias.tolist() == [rank, rank]
    comm.destroy()
    assert not dist.is_initialized()
    return "all checked"


def test_two_processes():
    launcher = MultiProcessingLauncher(LightningEnvironment(), 2, start_method="fork")
    assert launcher.launch(_collectives, find_free_port()) == "all checked"
