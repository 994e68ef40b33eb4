"""`CombinedLoader`: several loaders, in any nesting of dicts, lists and tuples, read as one stream of batches."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

from typing_extensions import Self

__all__ = ["CombinedLoader", "CombinedMode", "sized_len"]

CombinedMode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
Triplet = tuple[Any, int, int]  # batch, batch_idx, dataloader_idx

_INF = float("inf")
_MAPPINGS = (dict, OrderedDict, defaultdict)


def sized_len(loader: object) -> int | None:
    """The number of batches (or items) that an object says it has; None when it has no length."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):
        return None


class CombinedLoader(Iterable[Triplet]):
    """Reads several iterables as one; each item is ``(batch, batch_idx, dataloader_idx)``.

    Args:
        iterables: One iterable, or dicts, lists and tuples of them in any nesting. A container that holds only numbers
            or strings is itself an iterable of batches.
        mode: What one batch is and where the stream ends.

            - ``"min_size"``: a batch of every iterable; ends with the shortest.
            - ``"max_size_cycle"``: the same, starting shorter iterables again; ends with the longest.
            - ``"max_size"``: the same, with None in the place of an exhausted iterable; ends with the longest.
            - ``"sequential"``: one iterable after the other; ``batch_idx`` starts at 0 for each of them and
              ``dataloader_idx`` says which one it is.

            In all modes but ``"sequential"`` a batch has the nesting of ``iterables`` and ``dataloader_idx`` is 0.

    Raises:
        ValueError: The mode is unknown.
    """

    def __init__(self, iterables: Any, mode: CombinedMode = "min_size") -> None:
        if mode not in get_args(CombinedMode):
            raise ValueError(
                f"mode={mode!r} is not a mode of CombinedLoader; use one of {list(get_args(CombinedMode))}."
            )
        self._iterables = iterables
        self._flattened: list[Any] = []
        self._spec = _flatten(iterables, self._flattened)
        self._mode: CombinedMode = mode
        self._limits: list[int | float] | None = None
        self._iterator: Iterator[Triplet] | None = None

    @property
    def mode(self) -> CombinedMode:
        """How the iterables are combined."""
        return self._mode

    @property
    def iterables(self) -> Any:
        """The iterables in their nesting."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """The iterables as a flat list; assign a list of the same length to replace them."""
        return self._flattened

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        if len(flattened) != len(self._flattened):
            raise ValueError(
                f"Got {len(flattened)} iterables for a CombinedLoader of {len(self._flattened)}; their number is fixed."
            )
        self._iterables = _unflatten(self._spec, iter(flattened))
        self._flattened = flattened

    @property
    def sampler(self) -> Any:
        """The iterables' samplers in the same nesting; None where one has none."""
        return self._map(lambda loader: getattr(loader, "sampler", None))

    @property
    def batch_sampler(self) -> Any:
        """The iterables' batch samplers in the same nesting; None where one has none."""
        return self._map(lambda loader: getattr(loader, "batch_sampler", None))

    @property
    def limits(self) -> list[int | float] | None:
        """The most batches to count per iterable; assign one number for all of them, a list, or None.

        They shorten `len`; iteration itself stops at them in ``"sequential"`` mode only.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, (int, float)):
            limits = [limits] * len(self._flattened)
        elif limits is not None and len(limits) != len(self._flattened):
            raise ValueError(
                f"Got {len(limits)} limits for {len(self._flattened)} iterables; give one number, or one per iterable."
            )
        self._limits = limits

    @property
    def num_batches(self) -> int | float:
        """The number of batches in one pass, within the limits; infinity when an iterable that decides has no length.

        Unlike `len` it can be read before the iteration starts.
        """
        lengths = [_INF if (length := sized_len(it)) is None else length for it in self._flattened]
        limits = self._limits if self._limits is not None else [_INF] * len(lengths)
        bounded = [min(pair) for pair in zip(lengths, limits, strict=True)]
        if self._mode == "min_size":
            return min(bounded)
        return sum(bounded) if self._mode == "sequential" else max(bounded)

    @property
    def dataset_length(self) -> int:
        """The number of samples in all datasets together, combined as the mode combines batches.

        Raises:
            NotImplementedError: No dataset has a length.
        """
        sizes = [sized_len(getattr(loader, "dataset", None)) for loader in self._flattened]
        known = [size for size in sizes if size is not None]
        if not known:
            raise NotImplementedError(
                "No dataset behind this CombinedLoader has a length: they are all iterable-style."
            )
        return {"min_size": min, "sequential": sum}.get(self._mode, max)(known)

    def __len__(self) -> int:
        if self._iterator is None:
            raise RuntimeError("The length is known after `iter(combined_loader)`; call that first.")
        length = self.num_batches
        if length == _INF:
            raise TypeError("This CombinedLoader has no length: one of its iterables defines no `__len__`.")
        return int(length)

    def __iter__(self) -> Self:
        self._iterator = self.batches()
        return self

    def __next__(self) -> Triplet:
        if self._iterator is None:
            raise RuntimeError("Nothing to read yet; call `iter(combined_loader)` first.")
        return next(self._iterator)

    def batches(self) -> Iterator[Triplet]:
        """Starts a new pass and returns its iterator, which costs one call less per batch than `__next__`.

        The iterators of the iterables are made now, not at the first batch: a loader's iterator draws from the global
        random state when it is made, and starts its workers.
        """
        if self._mode == "sequential":
            self._iterator = _sequential(self._flattened, self._limits, iter(self._flattened[0]))
            return self._iterator
        iterators = [iter(iterable) for iterable in self._flattened]
        if self._spec is None:  # one iterable: the modes are the same, and a batch needs no nesting
            self._iterator = _single(iterators.pop())
        elif self._mode == "min_size":
            self._iterator = _min_size(iterators, self._nest)
        elif self._mode == "max_size":
            self._iterator = _max_size(iterators, self._nest)
        else:
            self._iterator = _max_size_cycle(self._flattened, iterators, self._nest)
        return self._iterator

    def reset(self) -> None:
        """Ends the pass, if any, and stops the iterables' workers."""
        if self._iterator is not None:
            self._iterator.close()  # pyright: ignore[reportAttributeAccessIssue]  # it is a generator
            self._iterator = None
        for loader in self._flattened:
            if hasattr(loader, "_iterator"):  # a DataLoader keeps the iterator whose workers persist
                shutdown = getattr(loader._iterator, "_shutdown_workers", None)
                if shutdown is not None:
                    shutdown()
                loader._iterator = None

    def state_dicts(self) -> list[dict[str, Any]]:
        """The states of the iterables that have one (``state_dict`` and ``load_state_dict``), in order."""
        return [loader.state_dict() for loader in self._stateful()]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Gives the stateful iterables their states back.

        Raises:
            RuntimeError: The number of states is not the number of stateful iterables.
        """
        if not states:
            return
        loaders = self._stateful()
        if len(loaders) != len(states):
            raise RuntimeError(
                f"The checkpoint holds the states of {len(states)} loaders, but {len(loaders)} of the current ones keep"
                " a state; pass the same loaders as in the run that wrote it."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    def _stateful(self) -> list[Any]:
        return [it for it in self._flattened if hasattr(it, "state_dict") and hasattr(it, "load_state_dict")]

    def _map(self, function: Callable[[Any], Any]) -> Any:
        return _unflatten(self._spec, iter([function(loader) for loader in self._flattened]))

    def _nest(self, batches: list[Any]) -> Any:
        return _unflatten(self._spec, iter(batches))

    def __getstate__(self) -> dict[str, Any]:
        # A running iterator can't be pickled; the copy in another process starts its own pass.
        return {**self.__dict__, "_iterator": None}


# The passes. Each is a generator over iterators that were made beforehand. A StopIteration must not leave a generator
# (Python would turn it into a RuntimeError), so each `next` is guarded.


def _single(iterator: Iterator[Any]) -> Iterator[Triplet]:
    for batch_idx, batch in enumerate(iterator):
        yield batch, batch_idx, 0


def _min_size(iterators: list[Iterator[Any]], nest: Callable[[list[Any]], Any]) -> Iterator[Triplet]:
    batch_idx = 0
    while True:
        try:
            batches = [next(iterator) for iterator in iterators]
        except StopIteration:
            return
        yield nest(batches), batch_idx, 0
        batch_idx += 1


def _max_size(iterators: list[Iterator[Any]], nest: Callable[[list[Any]], Any]) -> Iterator[Triplet]:
    batch_idx = 0
    ended = object()
    while True:
        batches = [next(iterator, ended) for iterator in iterators]
        if all(batch is ended for batch in batches):
            return
        yield nest([None if batch is ended else batch for batch in batches]), batch_idx, 0
        batch_idx += 1


def _max_size_cycle(
    iterables: list[Any], iterators: list[Iterator[Any]], nest: Callable[[list[Any]], Any]
) -> Iterator[Triplet]:
    batch_idx = 0
    consumed = [False] * len(iterators)
    while True:
        batches = []
        try:
            for index in range(len(iterators)):
                try:
                    batch = next(iterators[index])
                except StopIteration:
                    consumed[index] = True
                    if all(consumed):
                        return
                    iterators[index] = iter(iterables[index])
                    batch = next(iterators[index])  # an empty iterable ends the pass here
                batches.append(batch)
        except StopIteration:
            return
        yield nest(batches), batch_idx, 0
        batch_idx += 1


def _sequential(iterables: list[Any], limits: list[int | float] | None, iterator: Iterator[Any]) -> Iterator[Triplet]:
    for index, iterable in enumerate(iterables):
        if index > 0:  # made only now: the workers of all loaders at once would be too many
            iterator = iter(iterable)
        limit = _INF if limits is None else limits[index]
        batch_idx = 0
        while batch_idx < limit:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            yield batch, batch_idx, index
            batch_idx += 1


# The nesting. A spec is None for a leaf, else (container type, what else it needs, the children's specs).


def _is_namedtuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def _flatten(tree: Any, leaves: list[Any]) -> tuple[type, Any, list[Any]] | None:
    """Appends the leaves of ``tree`` to ``leaves``, depth first, and returns the spec that puts them back."""
    kind, context = type(tree), None
    if kind in _MAPPINGS:
        children = list(tree.values())
        context = (list(tree), tree.default_factory if kind is defaultdict else None)
    elif kind in (list, tuple) or _is_namedtuple(tree):
        children = list(tree)
    else:
        children = []
    if all(isinstance(child, (int, float, str)) for child in children):
        leaves.append(tree)
        return None
    return kind, context, [_flatten(child, leaves) for child in children]


def _unflatten(spec: tuple[type, Any, list[Any]] | None, leaves: Iterator[Any]) -> Any:
    if spec is None:
        return next(leaves)
    kind, context, parts = spec
    children = [_unflatten(part, leaves) for part in parts]
    if context is not None:
        keys, factory = context
        pairs = zip(keys, children, strict=True)
        return defaultdict(factory, pairs) if kind is defaultdict else kind(pairs)
    if kind in (list, tuple):
        return kind(children)
    return kind(*children)  # a named tuple
