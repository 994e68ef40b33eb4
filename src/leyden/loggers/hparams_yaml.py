"""Hyperparameters for loggers: as a dict, flat, as text, and in ``hparams.yaml``."""

import inspect
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from torch import Tensor

from leyden.base import files
from leyden.base.log import rank_zero_warn

__all__ = [
    "convert_params",
    "flatten_dict",
    "sanitize_params",
    "save_hparams_to_yaml",
]

_LONGEST_REPR = 200


def convert_params(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """Hyperparameters as a mapping: a `Namespace` becomes its dict, None an empty one, others stay."""
    if params is None:
        return {}
    return vars(params) if isinstance(params, Namespace) else params  # pyright: ignore[reportReturnType]


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """One level instead of many: ``{"a": {"b": 1}}`` -> ``{"a/b": 1}``; lists of dicts get their index as a level."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        elif isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, MutableMapping):
            flat |= flatten_dict(value, delimiter, name)
        elif isinstance(value, list) and all(isinstance(item, MutableMapping) for item in value):
            for index, item in enumerate(value):
                flat |= flatten_dict(item, delimiter, f"{name}{delimiter}{index}")
        else:
            flat[name] = value
    return flat


def _numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ()


def sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with bool, int, float, str and tensors as they are, numpy scalars as numbers, all else as ``str``."""
    clean: dict[str, Any] = {}
    for key, value in params.items():
        if _numpy_scalar(value):
            value = value.item()
        clean[key] = value if type(value) in (bool, int, float, str, Tensor) else str(value)
    return clean


def _yaml_ready(value: Any) -> Any:
    """The value out of types that every YAML reader knows, and tuples; names or text for objects."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return _yaml_ready(asdict(value))
    if isinstance(value, Namespace):
        return _yaml_ready(vars(value))
    if isinstance(value, Mapping):
        return {_yaml_ready(key): _yaml_ready(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_yaml_ready(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [_yaml_ready(item) for item in value]
    return _yaml_leaf(value)


def _yaml_leaf(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= _LONGEST_REPR else f"Tensor{tuple(value.shape)}"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # a subclass, such as numpy.float64
            return kind(value)
    if _numpy_scalar(value):
        return value.item()
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return text if len(text) <= _LONGEST_REPR else f"{type(value).__module__}.{type(value).__qualname__}"


def _save_with_omegaconf(path: str, hparams: Any) -> bool:
    """Writes hyperparameters that hold OmegaConf objects, resolved; False when there is nothing of OmegaConf."""
    if not any(type(value).__module__.partition(".")[0] == "omegaconf" for value in (hparams, *hparams.values())):
        return False
    from omegaconf import OmegaConf

    def plain(value: Any) -> Any:
        return OmegaConf.to_container(deepcopy(value), resolve=True) if OmegaConf.is_config(value) else value

    whole = plain(hparams)
    _dump(path, {key: plain(value) for key, value in whole.items()})
    return True


def _dump(path: str, hparams: Mapping[str, Any]) -> None:
    import yaml

    text = yaml.dump(_yaml_ready(dict(hparams)))

    def write(file: BinaryIO) -> None:
        file.write(text.encode())

    files.atomic_write(path, write)


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Mapping[str, Any] | Namespace) -> None:
    """Writes hyperparameters as YAML.

    Plain values and containers of them are written as they are (a tuple as ``!!python/tuple``). Enum members,
    classes and functions are written by name, other objects as their ``repr``, or as their type when that is long, so
    that reading the file never needs their code.

    Args:
        config_yaml: Local path or URL; its folder must exist.
        hparams: Mapping, `Namespace` or OmegaConf config.

    Raises:
        RuntimeError: If the folder is not there.
        TypeError: If ``hparams`` is not a mapping.
    """
    folder = files.parent(config_yaml)
    if folder and not files.is_dir(folder):
        raise RuntimeError(f"can't write {config_yaml}: the folder {folder} is not there; create it first")
    hparams = convert_params(hparams)
    if not hasattr(hparams, "items"):
        raise TypeError(f"hparams must be a dictionary, not {type(hparams).__name__}")
    if not _save_with_omegaconf(str(config_yaml), hparams):
        try:
            _dump(str(config_yaml), hparams)
        except (RecursionError, ValueError) as error:
            rank_zero_warn(f"{config_yaml} was not written: the hyperparameters hold {error}")
