"""``TorchTrainer(datasets=...)``: each worker's share of a dataset, for `leyden.train.get_dataset_shard`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch.utils.data import IterableDataset, Subset

__all__ = ["DataConfig", "DatasetSource", "dataset_sources"]


@dataclass(frozen=True)
class DataConfig:
    """How datasets are dealt out.

    Attributes:
        datasets_to_split: Names of those of which every worker gets a part; the others go to all workers whole.
    """

    datasets_to_split: Literal["all"] | Sequence[str] = "all"


@dataclass(frozen=True)
class DatasetSource:
    """A dataset on its way to the workers.

    Attributes:
        dataset: A dataset, or a function without arguments that makes one, in the worker.
        split: Whether workers get parts of it.
    """

    dataset: Any
    split: bool

    def shard(self, rank: int, world_size: int) -> Any:
        """This worker's part: every n-th sample from the rank-th on, the same number for all workers.

        Raises:
            TypeError: It is neither map-style nor iterable.
        """
        made: Any = self.dataset
        if not hasattr(made, "__iter__") and not hasattr(made, "__getitem__") and callable(made):
            made = self.dataset()
        if not self.split or world_size == 1:
            return made
        if hasattr(made, "__getitem__") and hasattr(made, "__len__"):
            # The few samples beyond the last full round are left out: a rank with one more would wait for the others.
            return Subset(made, range(rank, len(made) // world_size * world_size, world_size))
        if hasattr(made, "__iter__"):
            return _EveryNth(made, rank, world_size)
        raise TypeError(
            f"TorchTrainer(datasets=...): a {type(made).__qualname__} has neither __getitem__ and __len__ nor "
            "__iter__, so it can't be dealt out to workers"
        )


class _EveryNth(IterableDataset):
    def __init__(self, samples: Any, rank: int, world_size: int) -> None:
        self._samples = samples
        self._rank = rank
        self._world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._samples)
        while len(round_ := list(islice(samples, self._world_size))) == self._world_size:
            yield round_[self._rank]


def dataset_sources(
    datasets: Mapping[str, Any | Callable[[], Any]] | None, config: DataConfig | None
) -> dict[str, DatasetSource]:
    """What is sent to the workers for the arguments of `TorchTrainer`.

    Raises:
        ValueError: A name in ``datasets_to_split`` is no dataset's.
    """
    datasets, config = dict(datasets or {}), config or DataConfig()
    names = datasets if config.datasets_to_split == "all" else config.datasets_to_split
    unknown = sorted(set(names) - set(datasets))
    if unknown:
        raise ValueError(f"DataConfig(datasets_to_split={unknown}): there are only {sorted(datasets)}")
    return {name: DatasetSource(dataset, name in names) for name, dataset in datasets.items()}
