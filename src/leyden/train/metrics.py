"""What may be reported: plain values, and scalars of array libraries, which are turned into plain ones."""

from collections.abc import Mapping
from typing import Any

__all__ = ["plain_metrics"]

_PLAIN = frozenset({float, int, str, bool, type(None)})


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copies metrics, with scalars of numpy, torch and the like as Python numbers.

    Raises:
        TypeError: A value has no plain form; names it by its path.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report() takes a dict of metrics, not a {_kind(metrics)}; e.g. report({{'loss': 0.1}})")
    plain = {}
    for key, value in metrics.items():
        if type(key) is not str:
            key = _name(key, "metrics")
        plain[key] = value if type(value) in _PLAIN else _plain(value, f"metrics[{key!r}]")
    return plain


def _plain(value: Any, path: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_name(key, path): _plain(part, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, f"{path}[{index}]") for index, part in enumerate(value)]
    for kind in (bool, int, float, str):  # their subclasses: enums, numpy.float64
        if isinstance(value, kind):
            return kind(value)
    item = getattr(value, "item", None)
    if callable(item):
        count = _count(value)
        if count == 1:
            return _plain(item(), path)
        shape = getattr(value, "shape", None)
        raise TypeError(
            f"{path} is a {_kind(value)} of shape {tuple(shape) if shape is not None else '?'}; report() takes single "
            "numbers: reduce it (e.g. .mean()), or pass .tolist() to report all of its values"
        )
    raise TypeError(
        f"{path} is a {_kind(value)}, which can't be reported; report() takes numbers, strings, booleans, None, numpy "
        "and tensor scalars, and nested dicts and lists of these"
    )


def _count(value: Any) -> int | None:
    numel = getattr(value, "numel", None)
    return numel() if callable(numel) else getattr(value, "size", None)  # pyright: ignore[reportReturnType]


def _name(key: Any, path: str) -> str:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int) and not isinstance(key, bool):  # class numbers
        return str(key)
    raise TypeError(f"{path} has the key {key!r}, a {_kind(key)}; the names of metrics are strings")


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
