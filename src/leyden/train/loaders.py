"""`prepare_data_loader`: a user's DataLoader, dealt out to the workers and delivered on their devices."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from leyden.base.seed import isolate_rng
from leyden.base.tree import apply_to_collection, move_to_device

__all__ = ["DealtSampler", "deliver", "distribute"]


class DealtSampler(Sampler):
    """Deals out what any sampler, or batch sampler, yields: rank ``r`` of ``n`` takes items ``r``, ``r + n``, ...

    All ranks draw the same items, since the random state is a function of the epoch while they draw; the last items are
    repeated from the start until all ranks have the same number.

    Args:
        items: Yields indices, or lists of indices; has a length.
        num_replicas: Number of ranks.
        rank: Which of them this is.
        seed: Added to the epoch.
    """

    def __init__(self, items: Any, num_replicas: int, rank: int, seed: int = 0) -> None:
        self.items = items
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        with isolate_rng(include_cuda=False):
            torch.default_generator.manual_seed(self.seed + self.epoch)
            drawn = list(self.items)
        missing = len(self) * self.num_replicas - len(drawn)
        while drawn and missing > 0:
            drawn += drawn[:missing]
            missing = len(self) * self.num_replicas - len(drawn)
        return iter(drawn[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return -(-len(self.items) // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Call it at the start of each epoch, for another order in each."""
        self.epoch = epoch
        inner = getattr(self.items, "set_epoch", None)
        if callable(inner):
            inner(epoch)


def distribute(loader: DataLoader, num_replicas: int, rank: int) -> DataLoader:
    """A loader that is as ``loader`` in all but the samples it takes: this rank's share.

    ``.sampler.set_epoch(epoch)`` of the result shuffles anew. Loaders over an iterable dataset, and those that are
    distributed already, are returned as they are.

    Raises:
        TypeError: The sampler has no length, so it can't be dealt out.
    """
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
    if isinstance(loader.dataset, IterableDataset) or any(
        isinstance(each, (DistributedSampler, DealtSampler)) for each in samplers
    ):
        return loader
    options: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank}
    if loader.batch_sampler is not None and loader.batch_size is None:  # the user's own batches
        sampler = DealtSampler(_sized(loader.batch_sampler), **options)
        return _with_samplers(loader, sampler, sampler)
    if type(loader.sampler) in (SequentialSampler, RandomSampler) and not _draws_a_part(loader.sampler):
        sampler = DistributedSampler(loader.dataset, shuffle=type(loader.sampler) is RandomSampler, **options)
    else:
        sampler = DealtSampler(_sized(loader.sampler), **options)
    batches = None if loader.batch_size is None else BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return _with_samplers(loader, sampler, batches)


def _draws_a_part(sampler: Any) -> bool:
    """Whether a `RandomSampler` draws with replacement, or another number than there are."""
    return getattr(sampler, "replacement", False) or len(sampler) != len(sampler.data_source)


def _sized(sampler: Any) -> Any:
    if not hasattr(sampler, "__len__"):
        raise TypeError(
            f"{type(sampler).__name__} has no `__len__`, so it can't be dealt out to the workers: define it, or pass "
            "prepare_data_loader(add_dist_sampler=False) and make the sampler distributed yourself"
        )
    return sampler


def _with_samplers(loader: DataLoader, sampler: Any, batch_sampler: Any) -> DataLoader:
    # A copy, and not a new call: it keeps all arguments, also those that DataLoader learns in a later version, and the
    # class of a user's loader. DataLoader.__init__ derives nothing else from the samplers.
    new = copy.copy(loader)
    # past DataLoader.__setattr__, which forbids exactly this, for reasons that don't hold for a fresh copy
    new.__dict__.update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return new


def deliver(loader: Iterable[Any], device: torch.device, prefetch: bool) -> Any:
    """The loader, with its batches on ``device``; everything else of it is unchanged.

    Args:
        loader: Yields batches of tensors, in any nesting.
        device: Where they go. For the CPU the loader itself is returned.
        prefetch: On CUDA, copy the next batch while this one is computed on; needs ``pin_memory=True`` to be of use.
    """
    if device.type == "cpu":
        return loader
    return _Delivered(loader, device, prefetch and device.type == "cuda")


class _Delivered(DataLoader):
    """A DataLoader for ``isinstance``; all that it does is the wrapped loader's, but for the move."""

    def __init__(self, loader: Any, device: torch.device, prefetch: bool) -> None:
        self.__dict__.update(getattr(loader, "__dict__", {}))
        self.__dict__["_wrapped"] = (loader, device, prefetch)

    def __len__(self) -> int:
        return len(self._wrapped[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_wrapped" not in self.__dict__:  # not while it is being unpickled
            raise AttributeError(name)
        return getattr(self._wrapped[0], name)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        loader, device, prefetch = self._wrapped
        if not prefetch:
            for batch in loader:
                yield move_to_device(batch, device)
            return
        side = torch.cuda.Stream(device)
        ahead: list[Any] = []  # the one batch that was copied while the one before it was in use
        for batch in loader:
            with torch.cuda.stream(side):
                ahead.append(move_to_device(batch, device))
            if len(ahead) == 2:
                yield _arrived(ahead.pop(0), side, device)
        for batch in ahead:
            yield _arrived(batch, side, device)


def _arrived(batch: Any, side: Any, device: torch.device) -> Any:
    """Makes the current stream wait for the copy, and the allocator know that both streams use the memory."""
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    apply_to_collection(batch, torch.Tensor, lambda tensor: tensor.record_stream(current))
    return batch
