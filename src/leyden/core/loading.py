"""load_from_checkpoint: a module or datamodule from a checkpoint file."""

import ast
import csv
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leyden.base.log import rank_zero_warn
from leyden.core.hooks import is_overridden
from leyden.core.hparams import AttributeDict

__all__ = ["class_only", "load_datamodule", "load_module"]

# Written by LightningCLI: import paths, for which a checkpoint is not to be trusted.
_IMPORT_PATHS = ("_instantiator", "_class_path")


class _ClassOnly:
    """A classmethod that refuses to be called on an instance, where its result would be thrown away unseen."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return MethodType(self.method, owner)

        @wraps(self.method)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            name = f"{owner.__name__}.{self.method.__name__}"
            raise TypeError(
                f"`{name}` creates a new object, and would leave the instance that it is called on as it is: "
                f"call it on the class and use what it returns, `model = {name}(path)`"
            )

        return refuse


if TYPE_CHECKING:
    class_only = classmethod
else:
    class_only = _ClassOnly


def load_module(
    cls: type[Any],
    path: Any,
    map_location: Any = None,
    hparams_file: Any = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **overrides: Any,
) -> Any:
    """See `LightningModule.load_from_checkpoint`."""
    checkpoint = _read(cls, path, map_location, hparams_file, weights_only, overrides)
    model = cls(**_init_kwargs(cls, checkpoint, overrides))
    if model._strict_loading is not None and strict is not None and strict != model.strict_loading:
        raise ValueError(
            f"load_from_checkpoint(strict={strict!r}) contradicts strict_loading={model.strict_loading!r} of "
            f"{cls.__name__}: leave one of them out"
        )
    if is_overridden("configure_model", model):
        model.configure_model()
    model.on_load_checkpoint(checkpoint)
    _load_weights(model, checkpoint["state_dict"], model.strict_loading if strict is None else strict)
    device = next((value.device for value in checkpoint["state_dict"].values() if isinstance(value, Tensor)), None)
    if device is None:
        rank_zero_warn(f"{path!s} has an empty state dict: no weights were loaded")
        return model
    return model.to(device)


def load_datamodule(
    cls: type[Any],
    path: Any,
    map_location: Any = None,
    hparams_file: Any = None,
    weights_only: bool | None = None,
    **overrides: Any,
) -> Any:
    """See `LightningDataModule.load_from_checkpoint`."""
    checkpoint = _read(cls, path, map_location, hparams_file, weights_only, overrides)
    datamodule = cls(**_init_kwargs(cls, checkpoint, overrides))
    if cls.__qualname__ in checkpoint:
        datamodule.load_state_dict(checkpoint[cls.__qualname__])
    return datamodule


def _read(
    cls: type[Any], path: Any, map_location: Any, hparams_file: Any, weights_only: bool | None, overrides: dict
) -> dict[str, Any]:
    # The only imports of `core` from `checkpoint`, and on use: reading a file must not make `core` depend on formats.
    from leyden.checkpoint.io import load
    from leyden.checkpoint.schema import check, migrate

    checkpoint = migrate(check(load(path, map_location=map_location, weights_only=weights_only), str(path)))
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if hparams_file is not None:
        checkpoint[key] = load_hparams_file(hparams_file)
    # on_load_checkpoint sees what the object is created with.
    checkpoint.setdefault(key, {}).update(overrides)
    return checkpoint


def _init_kwargs(cls: type[Any], checkpoint: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The arguments to create ``cls`` with: the file's hyperparameters, and over them ``overrides``."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    loaded = checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY]
    whole = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    if whole in named:
        # They are the value of one argument, `def __init__(self, hparams)`, in which attributes are usual.
        kwargs = {whole: AttributeDict(loaded) if type(loaded) is dict else loaded}
    else:
        kwargs = {str(key): value for key, value in loaded.items() if key not in _IMPORT_PATHS}
    kwargs.update(overrides)
    # A class without an __init__ of its own has the base's, which takes any arguments only to hand them on.
    takes_all = not cls.__init__.__module__.startswith("leyden.core.") and any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )
    if not takes_all:
        kwargs = {key: value for key, value in kwargs.items() if key in named}
    missing = [name for name, p in named.items() if p.default is p.empty and name not in kwargs]
    if missing:
        example = ", ".join(f"{name}=..." for name in missing)
        raise TypeError(
            f"{cls.__name__}.__init__() needs {', '.join(map(repr, missing))}, which the checkpoint does not hold: "
            f"pass them, `{cls.__name__}.load_from_checkpoint(path, {example})`, or call `self.save_hyperparameters()` "
            "in __init__ so that the next checkpoints hold them"
        )
    return kwargs


def _load_weights(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    keys = model.load_state_dict(state_dict, strict=strict)
    # With strict=True, load_state_dict raised where one of these is not empty.
    if keys.missing_keys:
        rank_zero_warn(f"the checkpoint has no values for {keys.missing_keys}, which stay as the model was created")
    if keys.unexpected_keys:
        rank_zero_warn(f"the checkpoint has values for {keys.unexpected_keys}, which the model does not have")


def load_hparams_file(path: Any) -> dict[str, Any]:
    """Hyperparameters from a ``.yaml`` file, or from a ``.csv`` file with the columns key and value.

    Raises:
        ValueError: The file's name ends otherwise, or its content is no mapping.
    """
    import fsspec

    suffix = str(path).rpartition(".")[2].lower()
    if suffix not in ("csv", "yml", "yaml"):
        raise ValueError(f"hparams_file={str(path)!r} must end in .yaml, .yml or .csv")
    with fsspec.open(str(path), "r", newline="") as file:
        if suffix == "csv":
            return {row[0]: _literal(row[1]) for row in list(csv.reader(file))[1:]}  # pyright: ignore[reportArgumentType]
        hparams = _read_yaml(file)
    if not isinstance(hparams, dict):
        raise ValueError(f"{path!s} holds a {type(hparams).__name__}; hyperparameters are a mapping of names to values")
    return hparams


def _read_yaml(file: Any) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Plain values only, and tuples, which loggers write."""

    def to_tuple(loader: Any, node: Any) -> tuple:
        return tuple(loader.construct_sequence(node))

    Loader.add_constructor("tag:yaml.org,2002:python/tuple", to_tuple)
    return yaml.load(file, Loader) or {}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a plain word
