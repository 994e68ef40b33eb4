"""Two small collectives for training functions; data travels between the hosts' memories, never through a GPU."""

from typing import Any, TypeVar

from leyden.train.context import get_context

__all__ = ["barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")

_groups: list[Any] = []


def barrier() -> None:
    """Waits until all workers have called it.

    Raises:
        RuntimeError: Called outside of a worker, or a worker is gone.
    """
    broadcast_from_rank_zero(None)


def broadcast_from_rank_zero(data: T) -> T:
    """Gives all workers what rank 0 passed. All must call it, in the same order as other collectives.

    Args:
        data: Can be pickled; only rank 0's counts.

    Raises:
        RuntimeError: Called outside of a worker, or a worker is gone.
    """
    if get_context().get_world_size() == 1:
        return data
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError(
            "the process group of this worker was destroyed by the training function; leave it to leyden.train, which "
            "destroys it when the function returns"
        )
    if not _groups:  # made once, by all ranks: making a group is a collective itself
        _groups.append(dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo"))
    box = [data]
    dist.broadcast_object_list(box, 0, group=_groups[0], device=torch.device("cpu"))
    # A broadcast alone lets rank 0 go on; the name promises more for barrier(), and costs the same here.
    dist.barrier(group=_groups[0])
    return box[0]
