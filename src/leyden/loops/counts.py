"""How many batches a loader has, within the limits of the Trainer and the other ranks' numbers."""

from typing import TYPE_CHECKING

import torch
from torch.utils.data import IterableDataset

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn
from leyden.base.states import RunningStage
from leyden.loops.combined import sized_len

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

__all__ = ["agree_on_length", "loader_length", "num_batches"]

_INF = float("inf")


def loader_length(loader: object) -> int | float:
    """The number of batches of a loader on this rank; infinity when it doesn't know. Warns when it is doubtful."""
    length = sized_len(loader)
    if length is None:
        return _INF
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        rank_zero_warn(
            "Your IterableDataset has a `__len__`. With several workers it may be wrong, unless each worker reads its"
            " own part of the data."
        )
    return length


def agree_on_length(
    loader: object, strategy: "Strategy", stage: RunningStage, allow_zero_length: bool = False
) -> int | float:
    """The number of batches to read from a loader, in a distributed run with regard to the other ranks.

    In training all ranks take the smallest number: a rank that had more would wait for ever in its next backward. Where
    some have none and that is allowed, each keeps its own.

    Raises:
        RuntimeError: Training would start with no batch on some rank, and ``allow_zero_length`` is False.
    """
    length = loader_length(loader)
    lengths: list[int | float] = [length]
    if strategy.world_size > 1:
        tensor = torch.tensor([length], dtype=torch.float64, device=strategy.root_device)
        gathered = strategy.all_gather(tensor).flatten().tolist()
        lengths = [number if number == _INF else int(number) for number in gathered]
    kind = type(loader).__name__
    if max(lengths) == 0:
        rank_zero_warn(f"The `{stage.dataloader_prefix}_dataloader` ({kind}) has no batch; is that what you want?")
    elif min(lengths) == 0:
        empty = [rank for rank, other in enumerate(lengths) if other == 0]
        if stage is RunningStage.TRAINING and not allow_zero_length:
            raise RuntimeError(
                f"The `{stage.dataloader_prefix}_dataloader` ({kind}) has no batch on rank {empty[0]}, but has some on"
                " other ranks. Give each rank at least one batch, or set"
                " allow_zero_length_dataloader_with_multiple_devices = True on the module."
            )
        rank_zero_warn(f"The `{stage.dataloader_prefix}_dataloader` ({kind}) has no batch on the ranks {empty}.")
        return length
    if stage is not RunningStage.TRAINING or min(lengths) == max(lengths):
        return length
    shortest = min(lengths)
    rank_zero_warn(
        f"The ranks have from {shortest} to {max(lengths)} batches in their `{stage.dataloader_prefix}_dataloader`;"
        f" each will train on {shortest} per epoch."
    )
    return shortest


def num_batches(length: int | float, limit: int | float, stage: RunningStage) -> int | float:
    """The number of batches to read: ``length`` bounded by ``limit_{stage}_batches``.

    Args:
        length: Batches that the loader has; infinity when it doesn't know.
        limit: An int counts batches; a float from 0.0 to 1.0 is a fraction of ``length``.
        stage: For the messages.

    Raises:
        MisconfigurationException: A fraction of an unknown length, or one that is less than one batch.
    """
    if length == 0:
        return 0
    if isinstance(limit, int):
        return min(length, limit)
    name = f"limit_{stage.dataloader_prefix}_batches"
    if length == _INF:
        if limit == 1.0:
            return length
        if limit == 0.0:
            return 0
        raise MisconfigurationException(
            f"{name}={limit} is a fraction of a `{stage.dataloader_prefix}_dataloader` that has no length, as with an"
            " IterableDataset; pass a number of batches (an int), or 1.0 for all."
        )
    count = int(length * limit)
    if count == 0 and limit > 0.0:
        raise MisconfigurationException(
            f"{name}={limit} of {length} batches is less than one batch; pass at least {1.0 / length}, or an int."
        )
    return count
