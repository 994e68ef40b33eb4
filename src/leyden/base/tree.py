"""Trees of data (nested containers of tensors): map a function, move to a device, read sizes and scalars."""

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leyden.base.errors import MisconfigurationException
from leyden.base.log import warn_once

__all__ = ["apply_to_collection", "extract_batch_size", "move_to_device", "to_scalars", "to_tensors"]

# Sequences to Python, single values to us.
_ATOMS = (str, bytes, bytearray, memoryview, range)
# `non_blocking` brings nothing here, and on MPS it has returned data that was not copied yet.
_BLOCKING_DEVICES = ("cpu", "mps")


def apply_to_collection(
    data: Any,
    dtype: Any,
    function: Callable[..., Any],
    *args: Any,
    wrong_dtype: Any = None,
    include_none: bool = True,
    allow_frozen: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls ``function(element, *args, **kwargs)`` on each element of type ``dtype``; containers keep their type.

    Containers are mappings, named tuples, dataclass instances and sequences (strings, bytes and ranges are not).

    Args:
        data: A nested container, or a single element.
        dtype: A type, a tuple of types, or an ABC: which elements to map.
        function: What to call on them.
        *args: Passed on to ``function``.
        wrong_dtype: Types to leave alone although they are instances of ``dtype``.
        include_none: False drops results that are None from mappings and sequences.
        allow_frozen: False refuses frozen dataclasses with a ``ValueError``.
        **kwargs: Passed on to ``function``.

    Returns:
        The same structure with mapped elements. Elements of other types are the same objects as before.
    """

    def visit(item: Any) -> Any:
        if isinstance(item, dtype) and (wrong_dtype is None or not isinstance(item, wrong_dtype)):
            return function(item, *args, **kwargs)
        return _map_children(item, visit, include_none=include_none, allow_frozen=allow_frozen)

    return visit(data)


def _map_children(data: Any, visit: Callable[[Any], Any], include_none: bool = True, allow_frozen: bool = True) -> Any:
    """Rebuilds a container from ``visit(child)`` of its children; returns anything else as it is."""
    cls: Any = type(data)
    if isinstance(data, _ATOMS):
        return data
    if isinstance(data, Mapping):
        pairs = [(key, visit(value)) for key, value in data.items()]
        kept: Any = {key: value for key, value in pairs if include_none or value is not None}
        if cls is dict:
            return kept
        return cls(data.default_factory, kept) if isinstance(data, defaultdict) else cls(kept)
    if isinstance(data, Sequence):
        items = [value for value in map(visit, data) if include_none or value is not None]
        return cls(*items) if isinstance(data, tuple) and hasattr(data, "_fields") else cls(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _map_dataclass(data, visit, include_none, allow_frozen)
    return data


def _map_dataclass(data: Any, visit: Callable[[Any], Any], include_none: bool, allow_frozen: bool) -> Any:
    if not allow_frozen and data.__dataclass_params__.frozen:
        raise ValueError(f"{type(data).__name__} is a frozen dataclass, which can't be rebuilt with other values here")
    result = copy.copy(data)
    for field in dataclasses.fields(data):
        if not field.init:
            continue
        value = visit(getattr(data, field.name))
        if include_none or value is not None:
            # Past a frozen class's own __setattr__: `result` is a copy that nobody else has seen.
            object.__setattr__(result, field.name, value)
    for name in dir(type(data)):
        # A cached property may hold what was computed from the old values.
        if isinstance(getattr(type(data), name, None), functools.cached_property):
            vars(result).pop(name, None)
    return result


def move_to_device(data: Any, device: torch.device | str | int) -> Any:
    """Moves every tensor, and every object that has a method ``to(device)``, in ``data``.

    Copies to CUDA are asked for without blocking, which takes effect for pinned memory.

    Returns:
        The same structure on ``device``. What needs no move stays the same object, containers included.
    """
    target: torch.device = device if isinstance(device, torch.device) else torch.device(device)
    return _move(data, target, target.type not in _BLOCKING_DEVICES)


def _move(data: Any, device: torch.device, non_blocking: bool) -> Any:
    cls = type(data)
    if cls is Tensor:
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    if cls is tuple or cls is list:
        # Tensors are handled in place: this runs once per batch, and a call per tensor is what it would cost.
        moved = [
            (item if item.device == device else item.to(device, non_blocking=non_blocking))
            if type(item) is Tensor
            else _move(item, device, non_blocking)
            for item in data
        ]
        for old, new in zip(data, moved, strict=True):
            if old is not new:
                return moved if cls is list else tuple(moved)
        return data
    if cls is dict:
        moved = {key: _move(value, device, non_blocking) for key, value in data.items()}
        for key, old in data.items():
            if old is not moved[key]:
                return moved
        return data
    if data is None or cls is str or cls is int or cls is float or cls is bool:
        return data
    if callable(getattr(cls, "to", None)):
        result = data.to(device, non_blocking=non_blocking) if isinstance(data, Tensor) else data.to(device)
        return data if result is None else result  # modules and some batch classes move in place
    return _map_children(data, lambda item: _move(item, device, non_blocking))


def to_tensors(data: Any, device: torch.device | str) -> Any:
    """Turns the numbers and numpy arrays in ``data`` into tensors, and moves all tensors to ``device``.

    bool becomes uint8, int int32, float float32; an array keeps its dtype.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, bool):
            return torch.tensor(value, dtype=torch.uint8)
        if isinstance(value, int):
            return torch.tensor(value, dtype=torch.int)
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float)
        if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
            return torch.as_tensor(value)
        return _map_children(value, convert)

    return move_to_device(convert(data), device)


def extract_batch_size(batch: Any) -> int:
    """The batch size of ``batch``: dimension 0 of the first tensor found depth first; 1 for a 0-d tensor.

    Warns once per process where tensors disagree.

    Raises:
        MisconfigurationException: There is no tensor in ``batch``.
        RecursionError: ``batch`` contains itself.
    """
    if type(batch) is Tensor:
        return batch.size(0) if batch.ndim else 1
    first: int | None = None
    try:
        for size in _tensor_sizes(batch):
            if first is None:
                first = size
            elif size != first:
                warn_once(
                    f"The batch size for averaging is not certain: the tensors of this batch have first dimensions "
                    f"{first} and {size}; {first} is used. Pass the right one: `self.log(..., batch_size=n)`.",
                    key="ambiguous batch size",
                )
                break
    except RecursionError:
        raise RecursionError(f"{_NO_BATCH_SIZE} ({type(batch).__name__} contains itself)") from None
    if first is None:
        raise MisconfigurationException(f"{_NO_BATCH_SIZE} ({type(batch).__name__} holds no tensor)")
    return first


_NO_BATCH_SIZE = "The batch size can't be read from the batch; pass it: `self.log(..., batch_size=n)`."


def _tensor_sizes(data: Any) -> Iterator[int]:
    if isinstance(data, Tensor):
        yield data.size(0) if data.ndim else 1
    elif isinstance(data, _ATOMS):
        return
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _tensor_sizes(value)
    elif isinstance(data, Iterable) and not isinstance(data, Iterator):
        # An iterator would be used up by looking into it.
        for value in data:
            yield from _tensor_sizes(value)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from _tensor_sizes(getattr(data, field.name))


def to_scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Turns one-element tensors into Python numbers, with one copy to the host per device.

    Args:
        metrics: Name -> tensor with one element, number, or a nested mapping of these.

    Raises:
        ValueError: A tensor has more than one element, or none.
    """
    result: dict[str, Any] = {}
    remote: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"metric {name!r} has shape {tuple(value.shape)}; a metric must have one element, e.g. its mean()"
                )
            if value.device.type == "cpu":
                value = value.item()
            else:
                remote.setdefault(value.device, []).append((name, value))
        elif isinstance(value, Mapping):
            value = to_scalars(value)
        result[name] = value  # remote ones too: this fixes the order of the names
    for pairs in remote.values():
        result.update(zip([name for name, _ in pairs], _scalars([tensor for _, tensor in pairs]), strict=True))
    return result


def _scalars(tensors: list[Tensor]) -> list[int | float | bool | complex]:
    """The values of one-element tensors of one device, in one copy that keeps the bits of every dtype."""
    if len(tensors) == 1:
        return [tensors[0].item()]
    # Widest first, so that each element lies at a multiple of its own size in the packed bytes.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    packed = torch.cat([tensors[index].detach().resolve_conj().reshape(1).view(torch.uint8) for index in order]).cpu()
    values: list[Any] = [None] * len(tensors)
    offset = 0
    for index in order:
        width = tensors[index].element_size()
        values[index] = packed[offset : offset + width].view(tensors[index].dtype).item()
        offset += width
    return values
