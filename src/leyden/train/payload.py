"""What the user's function travels in, and which part of it can't travel."""

import inspect
import io
import os
import pickle
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["UnpicklableValue", "call_with_config", "dump_value", "load_value", "pack_payload", "unpack_payload"]

_BIG = 10 * 2**20
_DEPTH = 6


@dataclass(frozen=True)
class UnpicklableValue:
    """Stands for a return value that can't leave its process.

    Attributes:
        type: Qualified name of its type.
        text: Its ``repr``, shortened.
        traceback: Why it can't be pickled.
    """

    type: str
    text: str
    traceback: str


def pack_payload(
    train_func: Callable[..., Any], config: Mapping[str, Any] | None = None, datasets: Mapping[str, Any] | None = None
) -> bytes:
    """Serialises the function with all it refers to.

    Args:
        train_func: Called in every rank, with ``config`` where it takes an argument.
        config: Its argument; None: none was given.
        datasets: For `get_dataset_shard`.

    Raises:
        TypeError: Something can't be pickled; names it by its path in the object.
    """
    parts = {"train_func": train_func, "train_loop_config": config, "datasets": dict(datasets or {})}
    data = {name: _dumps(part, name) for name, part in parts.items()}
    for name, advice in (
        ("train_loop_config", "pass a path or a name, and load the object inside the training function"),
        ("train_func", "load it inside the function instead of referring to an object outside"),
    ):
        if len(data[name]) > _BIG:
            culprit = _biggest(parts[name], name)
            warnings.warn(
                f"{culprit} makes {name} {len(data[name]) / 2**20:.0f} MiB when serialised (over 10 MiB), and every "
                f"rank gets a copy of it: {advice}",
                stacklevel=3,
            )
    paths = [os.path.abspath(path) if path else os.getcwd() for path in sys.path]
    return pickle.dumps((paths, os.getcwd(), data["train_func"], data["train_loop_config"], data["datasets"]))


def unpack_payload(payload: bytes) -> tuple[Callable[..., Any], Any, Mapping[str, Any]]:
    """In a rank: makes the driver's modules importable, then loads what `pack_payload` was given."""
    paths, folder, *parts = pickle.loads(payload)
    sys.path.extend(path for path in paths if path not in sys.path)
    if os.path.isdir(folder):
        os.chdir(folder)
    return tuple(pickle.loads(part) for part in parts)  # pyright: ignore[reportReturnType]


def call_with_config(train_func: Callable[..., Any], config: Any) -> Any:
    """Calls the user's function with ``config`` if it takes an argument, without if it takes none.

    Raises:
        TypeError: It needs more than one argument.
    """
    try:
        parameters = list(inspect.signature(train_func).parameters.values())
    except (TypeError, ValueError):  # a callable of C has no signature
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        raise TypeError(
            f"the training function needs {len(needed)} arguments ({', '.join(needed)}), but it is called with one, "
            "train_loop_config; put the values into that"
        )
    if needed or (positional and config is not None):
        return train_func({} if config is None else config)
    return train_func()


def dump_value(value: Any) -> bytes | None:
    """A return value as bytes; one that can't be pickled as an `UnpicklableValue`; None as None."""
    if value is None:
        return None
    try:
        return _by_value(value)
    except Exception as error:
        kind = type(value)
        stand_in = UnpicklableValue(
            f"{kind.__module__}.{kind.__qualname__}", _short(value), "".join(traceback.format_exception(error))
        )
        return pickle.dumps(stand_in)


def load_value(data: bytes | None) -> Any:
    """In the driver: what `dump_value` was given, or an `UnpicklableValue`."""
    if data is None:
        return None
    try:
        return pickle.loads(data)
    except Exception as error:  # e.g. a tensor of a device that only the workers have
        return UnpicklableValue("?", "?", "".join(traceback.format_exception(error)))


def _by_value(value: Any) -> bytes:
    """`cloudpickle.dumps`, but functions keep the name of their file, for tracebacks that show their lines."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        dispatch_table = {**cloudpickle.Pickler.dispatch_table, types.CodeType: _reduce_code}

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    import cloudpickle

    make, arguments, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    named = (code.co_filename if isinstance(each, str) and each == "<dynamic-code>" else each for each in arguments)
    return (make, tuple(named), *rest)


def _dumps(part: Any, name: str) -> bytes:
    try:
        return _by_value(part)
    except Exception as error:
        path, culprit = _culprit(part, name, _DEPTH)
        raise TypeError(
            f"{path} can't be sent to the workers: {_short(culprit)} (a {type(culprit).__qualname__}) can't be pickled "
            f"({type(error).__name__}: {error}); create it inside the training function instead"
        ) from error


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= 200 else text[:197] + "..."


def _culprit(value: Any, path: str, depth: int) -> tuple[str, Any]:
    """Walks down to the smallest part that fails by itself."""
    if depth:
        for name, part in _parts(value, path):
            if _size(part) is None:
                return _culprit(part, name, depth - 1)
    return path, value


def _biggest(value: Any, path: str) -> str:
    sizes = {name: _size(part) or 0 for name, part in _parts(value, path)}
    name = max(sizes, key=lambda key: sizes[key], default=path)
    return name if sizes.get(name, 0) > _BIG // 2 else path


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    """What an object consists of, with the words that lead to it."""
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    if inspect.ismethod(value):
        return [(f"{path}.__self__", value.__self__), (f"{path}.__func__", value.__func__)]
    if inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        outer = {**names.globals, **names.nonlocals}
        found = [(f"{path} -> variable {name!r}", part) for name, part in outer.items() if not inspect.ismodule(part)]
        defaults = inspect.signature(value).parameters.values()
        return found + [(f"{path} -> default of {p.name!r}", p.default) for p in defaults if p.default is not p.empty]
    if isinstance(getattr(value, "func", None), Callable) and hasattr(value, "keywords"):  # functools.partial
        return [(f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict) and not isinstance(value, type):
        return [(f"{path}.{name}", part) for name, part in state.items()]
    return []


def _size(value: Any) -> int | None:
    try:
        return len(_by_value(value))
    except Exception:  # any error means that this part is one that fails
        return None
