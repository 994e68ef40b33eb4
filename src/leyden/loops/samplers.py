"""Samplers that deal a dataset, another sampler's indices, or whole batches out to the ranks of a distributed run.

The order is always a function of (seed, epoch): every rank draws the same one and takes its share. Rank ``r`` of ``n``
gets the elements ``r, r + n, r + 2n, ...``, so the ranks' batches at one step are together one stretch of that order.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from leyden.base.seed import isolate_rng
from leyden.loops.combined import sized_len

__all__ = [
    "DistributedBatchSampler",
    "DistributedSamplerWrapper",
    "RecordedBatchSampler",
    "UnpaddedDistributedSampler",
    "batch_indices",
    "is_shuffled",
    "set_epoch",
]


def _share_length(total: int, num_replicas: int, rank: int, pad: bool) -> int:
    return -(-total // num_replicas) if pad else len(range(rank, total, num_replicas))


def _deal(items: list[Any], num_replicas: int, rank: int, pad: bool) -> list[Any]:
    """This rank's share of ``items``; padding repeats them from the start until the ranks have the same number."""
    share = items[rank::num_replicas]
    if pad and items and len(share) < _share_length(len(items), num_replicas, rank, pad):
        share.append(items[(len(share) * num_replicas + rank) % len(items)])
    return share


def _draw(source: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """All that ``source`` yields, the same on every rank: a random one would else draw from each rank's own state."""
    with isolate_rng(include_cuda=False):
        _seed_all(seed + epoch)
        return list(source)


def _seed_all(seed: int) -> None:
    import numpy as np

    torch.default_generator.manual_seed(seed)  # the CPU's alone: samplers draw there, and CUDA's is not isolated
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _forward_epoch(source: object, epoch: int) -> None:
    set_source_epoch = getattr(source, "set_epoch", None)
    if callable(set_source_epoch):
        set_source_epoch(epoch)


class DistributedSamplerWrapper(DistributedSampler):
    """Deals out the indices of any sized sampler, in its order, the same number to every rank; for training.

    Args:
        sampler: What yields the indices; must have a finite ``__len__``.
        num_replicas: Number of ranks.
        rank: Which of them this is.
        seed: With the epoch, seeds the global generators while the sampler draws.

    Raises:
        TypeError: The sampler has no (finite) length.
    """

    pad = True

    def __init__(self, sampler: Any, num_replicas: int, rank: int, seed: int = 0) -> None:
        length = sized_len(sampler)
        if length is None or length == float("inf"):
            raise TypeError(
                f"The sampler {type(sampler).__name__} has no finite `__len__`, so it can't be dealt out to"
                f" {num_replicas} ranks. Define `__len__`, leave the sampler out of the DataLoader, or pass"
                " Trainer(use_distributed_sampler=False) and make it distributed yourself."
            )
        super().__init__(sampler, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed)
        self.sampler = sampler
        self.num_samples = _share_length(length, num_replicas, rank, self.pad)
        self.total_size = self.num_samples * num_replicas if self.pad else length

    def __iter__(self) -> Iterator[Any]:
        return iter(_deal(_draw(self.sampler, self.seed, self.epoch), self.num_replicas, self.rank, self.pad))

    def __len__(self) -> int:
        return _share_length(len(self.sampler), self.num_replicas, self.rank, self.pad)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        _forward_epoch(self.sampler, epoch)


class UnpaddedDistributedSampler(DistributedSamplerWrapper):
    """Deals out indices so that each is seen exactly once over all ranks; for evaluation and prediction.

    Some ranks may get one index more than others, and, of a dataset that is smaller than the number of ranks, none.

    Args:
        sampler: Any sized iterable of indices; ``range(len(dataset))`` for a dataset in order.
        num_replicas: Number of ranks.
        rank: Which of them this is.
        shuffle: Permute the positions by (seed, epoch).
        seed: See above; also seeds the global generators while the sampler draws.
    """

    pad = False

    def __init__(self, sampler: Any, num_replicas: int, rank: int, shuffle: bool = False, seed: int = 0) -> None:
        super().__init__(sampler, num_replicas, rank, seed)
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Any]:
        indices = _draw(self.sampler, self.seed, self.epoch)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = [indices[position] for position in torch.randperm(len(indices), generator=generator).tolist()]
        return iter(_deal(indices, self.num_replicas, self.rank, self.pad))


class _BatchSamplerProxy:
    """Stands in for a batch sampler; all that it doesn't define is the original's."""

    def __init__(self, batch_sampler: Any) -> None:
        self.wrapped = batch_sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "wrapped":  # not while being unpickled
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def set_epoch(self, epoch: int) -> None:
        _forward_epoch(self.wrapped, epoch)


class DistributedBatchSampler(_BatchSamplerProxy):
    """Deals out whole batches of a user's batch sampler, which may have composed them by any rule.

    Args:
        batch_sampler: What yields the batches of indices, the same on every rank.
        num_replicas: Number of ranks.
        rank: Which of them this is.
        pad: Repeat batches from the start until every rank has the same number (training needs that).
        seed: With the epoch, seeds the global generators while the batch sampler draws.
    """

    def __init__(self, batch_sampler: Any, num_replicas: int, rank: int, pad: bool, seed: int = 0) -> None:
        super().__init__(batch_sampler)
        self.num_replicas = num_replicas
        self.rank = rank
        self.pad = pad
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(_deal(_draw(self.wrapped, self.seed, self.epoch), self.num_replicas, self.rank, self.pad))

    def __len__(self) -> int:
        return _share_length(len(self.wrapped), self.num_replicas, self.rank, self.pad)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        super().set_epoch(epoch)


class RecordedBatchSampler(_BatchSamplerProxy):
    """Keeps the indices of the batches that a loader has asked for, until `take` asks for them; for prediction."""

    def __init__(self, batch_sampler: Any) -> None:
        super().__init__(batch_sampler)
        self._drawn: dict[int, list[int]] = {}

    def __iter__(self) -> Iterator[Any]:
        self._drawn = {}
        for batch_idx, indices in enumerate(self.wrapped):
            self._drawn[batch_idx] = list(indices)  # workers run ahead, so the last one drawn is not the one in hand
            yield indices

    def __len__(self) -> int:
        return len(self.wrapped)

    def take(self, batch_idx: int) -> list[int]:
        """The dataset indices of one batch of the running pass; forgets them, and those of the batches before it."""
        indices = self._drawn.get(batch_idx, [])
        for old in [key for key in self._drawn if key <= batch_idx]:
            del self._drawn[old]
        return indices


def batch_indices(loader: object, batch_idx: int) -> list[int] | None:
    """The dataset indices behind batch ``batch_idx`` of a loader prepared for prediction; ask once, in order.

    Returns:
        One index per sample; None when the loader doesn't draw batches of indices (no DataLoader, an IterableDataset,
        or ``batch_size=None``).
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler.take(batch_idx) if isinstance(batch_sampler, RecordedBatchSampler) else None


def is_shuffled(loader: object) -> bool:
    """Whether a loader draws its samples with a `RandomSampler`, as ``DataLoader(shuffle=True)`` does."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    if batch_sampler is not None:
        sampler = getattr(batch_sampler, "sampler", batch_sampler)  # a batch sampler of its own kind may have none
    return isinstance(sampler, RandomSampler)


def set_epoch(loader: object, epoch: int) -> None:
    """Tells a loader's sampler and batch sampler which epoch it is, where they want to know (``set_epoch``)."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    receivers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for receiver in {id(receiver): receiver for receiver in receivers}.values():  # samplers need not be hashable
        _forward_epoch(receiver, epoch)
