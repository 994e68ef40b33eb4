"""CombinedLoader against Lightning's, item by item."""

import pickle
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader as Reference
from torch.utils.data import DataLoader, IterableDataset

from leyden.loops.combined import CombinedLoader, sized_len

MODES = ["min_size", "max_size_cycle", "max_size", "sequential"]
Pair = namedtuple("Pair", ["left", "right"])


class Numbers(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def loader(count: int, batch_size: int = 2, shuffle: bool = False) -> DataLoader:
    return DataLoader(list(range(count)), batch_size=batch_size, shuffle=shuffle)


COLLECTIONS = {
    "one loader": lambda: loader(5),
    "one range": lambda: range(3),
    "list of numbers": lambda: [1, 2, 3],
    "empty list": lambda: [],
    "list": lambda: [loader(5), loader(12), loader(3)],
    "one in a list": lambda: [loader(5)],
    "one in a dict": lambda: {"a": loader(5)},
    "dict": lambda: {"b": loader(7), "a": loader(2)},
    "nested": lambda: {"a": [loader(5), (loader(3), range(4))], "b": Pair(loader(9), [7, 8])},
    "ordered": lambda: OrderedDict([("z", loader(3)), ("a", loader(6))]),
    "default": lambda: defaultdict(list, {"z": loader(3), "a": loader(6)}),
    "with an empty one": lambda: [loader(4), []],
    "tuple": lambda: (loader(4), "abc"),
    "several epochs": lambda: [loader(2), loader(12)],
}


def plain(item: Any) -> Any:
    """Tensors as lists, so that items compare with ``==``; types of containers stay."""
    if isinstance(item, torch.Tensor):
        return item.tolist()
    if isinstance(item, dict):
        return type(item).__name__, [(key, plain(value)) for key, value in item.items()]
    if isinstance(item, (list, tuple)):
        return type(item).__name__, [plain(value) for value in item]
    return item


def run(cls: type, make: Any, mode: str, limits: Any = None) -> tuple[Any, Any]:
    combined = cls(make(), mode)
    combined.limits = limits
    try:
        items = [plain(item) for item in combined]
        length = len(combined)
    except Exception as error:
        return type(error), None
    return items, length


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COLLECTIONS)
def test_same_items_and_length(name: str, mode: str) -> None:
    make = COLLECTIONS[name]
    assert run(CombinedLoader, make, mode) == run(Reference, make, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limits", [0, 1, 2, float("inf"), [1, 4, 0], [0, 0, 2], [100, 1, 1], None])
def test_limits(mode: str, limits: Any) -> None:
    make = COLLECTIONS["list"]
    assert run(CombinedLoader, make, mode, limits) == run(Reference, make, mode, limits)


@pytest.mark.parametrize("mode", MODES)
def test_unsized(mode: str) -> None:
    def make() -> Any:
        return [DataLoader(Numbers(5), batch_size=2), loader(12)]

    ours, theirs = CombinedLoader(make(), mode), Reference(make(), mode)
    assert [plain(item) for item in ours] == [plain(item) for item in theirs]
    assert sized_len(ours) == (6 if mode == "min_size" else None)
    if mode != "min_size":
        with pytest.raises(TypeError, match="no length"):
            len(ours)
        with pytest.raises(TypeError):
            len(theirs)
        assert ours.num_batches == float("inf")
    ours.limits = 4
    iter(ours)
    theirs.limits = 4
    iter(theirs)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("mode", MODES)
def test_draws_the_same_random_numbers(mode: str) -> None:
    """The iterators are made in the same order and at the same time: shuffled batches and the state after agree."""
    results = []
    for cls in (CombinedLoader, Reference):
        torch.manual_seed(3)
        combined = cls([loader(7, shuffle=True), loader(4, shuffle=True)], mode)
        iter(combined)
        before = torch.get_rng_state()
        items = [plain(item) for item in combined]
        results.append((before.tolist(), items, torch.get_rng_state().tolist()))
    assert results[0] == results[1]


def test_batches_is_the_same_pass_with_less_overhead() -> None:
    combined = CombinedLoader(COLLECTIONS["nested"](), "max_size_cycle")
    assert [plain(item) for item in combined.batches()] == [plain(item) for item in combined]


def test_new_pass_starts_over() -> None:
    combined = CombinedLoader(loader(6))
    assert next(iter(combined))[1] == 0
    assert next(combined)[1] == 1
    assert [index for _, index, _ in combined] == [0, 1, 2]


def test_views_keep_the_nesting() -> None:
    collection = COLLECTIONS["nested"]()
    ours, theirs = CombinedLoader(collection), Reference(collection)
    assert ours.flattened == theirs.flattened
    assert ours.iterables is collection
    for view in ("sampler", "batch_sampler"):
        assert getattr(ours, view) == getattr(theirs, view)
    assert ours.mode == "min_size"
    assert ours.limits is None
    ours.limits = 3
    assert ours.limits == [3] * 5


def test_flattened_can_be_replaced() -> None:
    combined = CombinedLoader({"a": loader(4), "b": [loader(2)]})
    first, second = range(3), range(9)
    combined.flattened = [first, second]
    assert combined.iterables == {"a": first, "b": [second]}
    assert [item for item, _, _ in combined] == [{"a": i, "b": [i]} for i in range(3)]
    with pytest.raises(ValueError, match="Got 1 iterables for a CombinedLoader of 2"):
        combined.flattened = [first]


def test_errors() -> None:
    with pytest.raises(ValueError, match="mode='foo' is not a mode"):
        CombinedLoader([1], "foo")  # pyright: ignore[reportArgumentType]
    combined = CombinedLoader([loader(3), loader(4)])
    with pytest.raises(RuntimeError, match="iter"):
        len(combined)
    with pytest.raises(RuntimeError, match="iter"):
        next(combined)
    with pytest.raises(ValueError, match="Got 3 limits for 2 iterables"):
        combined.limits = [1, 2, 3]
    with pytest.raises(TypeError):
        iter(CombinedLoader(3))


def test_an_error_in_a_loader_comes_through() -> None:
    def broken() -> Any:
        yield 1
        raise OSError("disk")

    combined = CombinedLoader([broken(), range(5)])
    iter(combined)
    assert next(combined) == ([1, 0], 0, 0)
    with pytest.raises(OSError, match="disk"):
        next(combined)


def test_dataset_length() -> None:
    for mode in MODES:
        collection = [loader(5), DataLoader(Numbers(3)), loader(12)]
        assert CombinedLoader(collection, mode).dataset_length == Reference(collection, mode)._dataset_length()
    with pytest.raises(NotImplementedError, match="iterable-style"):
        _ = CombinedLoader(DataLoader(Numbers(3))).dataset_length


class Stateful:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_states() -> None:
    one, two = Stateful(), Stateful()
    two.position = 7
    combined = CombinedLoader([one, loader(3), two])
    states = combined.state_dicts()
    assert states == [{"position": 0}, {"position": 7}]
    combined.load_state_dicts(states[::-1])
    assert (one.position, two.position) == (7, 0)
    combined.load_state_dicts([])
    with pytest.raises(RuntimeError, match="states of 1 loaders, but 2"):
        combined.load_state_dicts(states[:1])


def test_pickles_while_it_runs() -> None:
    combined = CombinedLoader(COLLECTIONS["dict"](), "max_size")
    next(iter(combined))
    copy = pickle.loads(pickle.dumps(combined))
    assert [plain(item) for item in copy] == [plain(item) for item in combined]


def test_reset_stops_workers() -> None:
    workers = DataLoader(range(8), num_workers=1, persistent_workers=True)
    combined = CombinedLoader([workers, workers], "sequential")
    next(iter(combined))
    processes = workers._iterator._workers
    assert processes[0].is_alive()
    combined.reset()
    assert workers._iterator is None
    assert not processes[0].is_alive()
    with pytest.raises(RuntimeError):
        len(combined)
