"""What processes say to each other: a thin layer over torch.distributed, and its silent twin for one process."""

import atexit
import datetime
import os
import sys
import time
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from leyden.dist.env import DistInfo

__all__ = ["Comm", "NoComm", "default_backend", "destroy_process_group", "init_process_group", "note_lost_peer"]

T = TypeVar("T")

_OPS = {"mean": "SUM", "avg": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}
_MEANS = ("mean", "avg")
_GIL_HANDOVER = 0.1  # seconds; the thread needs microseconds once it is scheduled


def default_backend(device: torch.device) -> str:
    """NCCL for CUDA, gloo otherwise."""
    return "nccl" if device.type == "cuda" else "gloo"


def init_process_group(
    info: DistInfo, backend: str, timeout: datetime.timedelta | None = None, device: torch.device | None = None
) -> bool:
    """Joins the process group, once per process.

    Args:
        info: Ranks and meeting point.
        backend: ``"gloo"``, ``"nccl"`` or another that torch knows.
        timeout: How long a collective may take; None: torch's default.
        device: This process's accelerator; lets NCCL connect at once instead of at the first collective.

    Returns:
        True when this call made the group, False when there was one already, e.g. of an earlier Trainer.

    Raises:
        RuntimeError: torch has no distributed package, or the existing group has another size.
    """
    if not dist.is_available():
        raise RuntimeError(f"this torch ({torch.__version__}) has no torch.distributed; run on one device: devices=1")
    if dist.is_initialized():
        if dist.get_world_size() != info.world_size:
            raise RuntimeError(
                f"a process group of {dist.get_world_size()} processes exists, but this run needs {info.world_size}: "
                "use the same devices and num_nodes for all Trainers of a script, or destroy the group first"
            )
        return False
    # Where torch's env:// meets, and where users' own libraries look.
    os.environ["MASTER_ADDR"] = info.main_address
    os.environ["MASTER_PORT"] = str(info.main_port)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device is not None and device.type != "cpu":
        options["device_id"] = device
    dist.init_process_group(backend, rank=info.global_rank, world_size=info.world_size, **options)
    atexit.register(_destroy_at_exit)
    return True


def destroy_process_group() -> None:
    """Leaves the group; does nothing when there is none."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _destroy_at_exit() -> None:
    # After an error others may be in the middle of a collective, and leaving in good order would wait for them.
    if getattr(sys, "last_value", None) is None and not _Peers.lost:
        destroy_process_group()
    # A gloo thread frees its last finished work late, and needs the GIL to drop a Python object of it. Once the
    # interpreter finalizes, asking for the GIL ends that thread inside a C++ destructor, which aborts the process: now
    # and then a good run would exit with SIGABRT. Sleeping hands the GIL over while that is still allowed.
    time.sleep(_GIL_HANDOVER)


class _Peers:
    """Whether a process of this run is known to have ended: then there is nobody left to wait for."""

    lost = False


def note_lost_peer() -> None:
    """Lets barriers return at once from now on, so that what is done on errors (saving, closing) does not hang."""
    _Peers.lost = True


class NoComm:
    """The talk of one process: every answer is its own."""

    rank = 0
    world_size = 1
    host_group = None

    def barrier(self, name: str | None = None) -> None:
        """Returns at once."""

    def all_reduce(self, tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor itself, without a new dimension."""
        return tensor

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """The object itself."""
        return obj

    def all_gather_object(self, obj: T) -> list[T]:
        """A list of the object alone."""
        return [obj]

    def reduce_bool(self, decision: bool, all: bool = True) -> bool:
        """The decision itself."""
        return bool(decision)

    def broadcast_module_state(self, module: torch.nn.Module, src: int = 0) -> None:
        """Does nothing."""

    def destroy(self) -> None:
        """Does nothing."""


class Comm:
    """Collectives of the default process group. Every method must be called by all ranks in the same order.

    Decisions and objects travel between hosts' memories (`host_group`), so they never wait for a GPU.

    Args:
        device: This process's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Made here and not on use: creating a group is itself a collective, and uses may differ between ranks.
        self._host_group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    @property
    def host_group(self) -> Any:
        """A group that moves CPU tensors; the default group itself under gloo."""
        return dist.group.WORLD if self._host_group is None else self._host_group

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks; ``name`` is for the reader of the call."""
        if _Peers.lost:
            return
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def all_reduce(self, tensor: Tensor, op: Any = "mean", group: Any = None) -> Tensor:
        """Combines ``tensor`` over ranks, in place where its memory is contiguous.

        Args:
            tensor: Same shape and dtype on all ranks. The mean of integers is rounded towards zero.
            op: ``"mean"``, ``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"``, or a ``ReduceOp``.
            group: Default: the group that can move this tensor.

        Returns:
            The combined tensor.

        Raises:
            ValueError: The op is unknown.
        """
        group = self._group_of(tensor, group)
        result = tensor.contiguous()
        if not isinstance(op, str):
            dist.all_reduce(result, op=op, group=group)
            return result
        name = op.lower()
        if name not in _OPS:
            raise ValueError(f"reduce op {op!r} is unknown; use one of {', '.join(_OPS)} or a torch ReduceOp")
        dist.all_reduce(result, op=getattr(dist.ReduceOp, _OPS[name]), group=group)
        if name not in _MEANS:
            return result
        # Sum and divide: not every backend that torch supports has AVG.
        size = dist.get_world_size(group)
        if result.is_floating_point() or result.is_complex():
            return result.div_(size)
        return result.copy_(result / size)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stacks the tensors of all ranks.

        Args:
            tensor: Same shape ``(...)`` on all ranks.
            group: Default: the group that can move this tensor.
            sync_grads: Let gradients flow back to each rank's own tensor, summed over ranks.

        Returns:
            Shape ``(world_size, ...)``.
        """
        group = self._group_of(tensor, group)
        if sync_grads:
            return _AllGather.apply(tensor, group)  # pyright: ignore[reportReturnType]
        with torch.no_grad():
            return torch.stack(_gathered(tensor, group))

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Sends a picklable object from rank ``src``."""
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.host_group)
        return box[0]

    def all_gather_object(self, obj: T) -> list[T]:
        """The picklable objects of all ranks, by rank."""
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, obj, group=self.host_group)
        return boxes

    def reduce_bool(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or, with ``all=False``, any) said True."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self.host_group)
        return bool(votes.item())

    def broadcast_module_state(self, module: torch.nn.Module, src: int = 0) -> None:
        """Gives all ranks the parameters and buffers of rank ``src``, in place."""
        skip = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [*module.named_parameters(), *module.named_buffers()]
        with torch.no_grad():
            work = [
                dist.broadcast(tensor.detach(), src, group=self._group_of(tensor, None), async_op=True)
                for name, tensor in named
                if name not in skip
            ]
        for item in work:
            item.wait()  # pyright: ignore[reportOptionalMemberAccess]

    def destroy(self) -> None:
        """Leaves the process group."""
        destroy_process_group()

    def _group_of(self, tensor: Tensor, group: Any) -> Any:
        if group is not None:
            return group
        return self.host_group if tensor.device.type == "cpu" else dist.group.WORLD


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return torch.stack(_gathered(tensor, group))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        total = grad_outputs[0].contiguous().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
