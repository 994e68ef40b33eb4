"""Hyperparameters: what a module or datamodule was created with, kept for loggers and checkpoints."""

import copy
import dataclasses
import inspect
import pickle
from argparse import Namespace
from collections.abc import MutableMapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from leyden.base.log import rank_zero_warn
from leyden.base.registry import did_you_mean

__all__ = ["AttributeDict", "HyperparametersMixin"]


class AttributeDict(dict):
    """A dict whose items are attributes too.

    Example:
        hparams = AttributeDict(lr=0.1); hparams.lr == hparams["lr"]
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            hint = "" if key.startswith("__") else f"; {did_you_mean(key, map(str, self))}"
            raise AttributeError(f"Missing attribute {key!r}{hint}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        if key not in self:
            raise AttributeError(f"Missing attribute {key!r}")
        del self[key]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str, self)]

    def __repr__(self) -> str:
        """One aligned line per item."""
        width = max((len(str(key)) for key in self), default=0)
        return "\n".join(f'"{key}":{" " * (width - len(str(key)))} {value}' for key, value in self.items())


class HyperparametersMixin:
    """Gives a class `save_hyperparameters` and `hparams`."""

    __jit_unused_properties__ = ["hparams", "hparams_initial"]

    #: Whether the trainer sends the hyperparameters to its loggers.
    _log_hyperparams = False

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keeps the arguments of ``__init__`` in ``self.hparams``, for checkpoints and loggers.

        Call it in ``__init__``; it sees the arguments of the ``__init__`` methods of subclasses too. A value that was
        changed before the call is kept as changed.

        Args:
            *args: Names of the arguments to keep; or one dict, ``Namespace``, dataclass or OmegaConf container with
                the hyperparameters themselves. Default: all arguments.
            ignore: Names of arguments to leave out.
            frame: The frame of the ``__init__`` to read. Default: the caller's.
            logger: Whether loggers get them.

        Raises:
            KeyError: A name is not an argument.
            ValueError: The hyperparameters are of a type that can't be kept.
        """
        self._log_hyperparams = logger
        if len(args) == 1 and not isinstance(args[0], nn.Module) and not args[0]:
            return
        if frame is None:
            here = inspect.currentframe()
            frame = None if here is None else here.f_back
        ignored = {ignore} if isinstance(ignore, str) else {name for name in ignore or () if isinstance(name, str)}
        given = {key: value for key, value in _given_arguments(self, frame).items() if key not in ignored}
        name, hparams = _select(args, given)
        # Straight into __dict__: nn.Module would register a module as a sub-module.
        self.__dict__["_hparams_name"] = name
        self._set_hparams(hparams)
        self.remove_ignored_hparams(list(ignored))
        for key, value in self.hparams.items():
            if isinstance(value, nn.Module):
                rank_zero_warn(
                    f"the hyperparameter {key!r} is an nn.Module, whose weights a checkpoint has anyway: leave it out, "
                    f"`self.save_hyperparameters(ignore=[{key!r}])`",
                    stacklevel=5,
                )
        self.__dict__["_hparams_initial"] = _copy(self.hparams)

    @property
    def hparams(self) -> Any:
        """The kept hyperparameters; may be changed. Items are attributes too: ``self.hparams.lr``."""
        if "_hparams" not in self.__dict__:
            self.__dict__["_hparams"] = AttributeDict()
        return self.__dict__["_hparams"]

    @property
    def hparams_initial(self) -> Any:
        """A copy of the hyperparameters as they were when `save_hyperparameters` was last called."""
        return _copy(self.__dict__.get("_hparams_initial", AttributeDict()))

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Drops these names from `hparams`."""
        for name in ignore_list:
            self.hparams.pop(name, None)

    def _set_hparams(self, hparams: Any) -> None:
        """Adds to `hparams`; replaces it where one of the two is a container of another kind, such as OmegaConf's."""
        hparams = _to_container(hparams)
        if isinstance(hparams, dict) and isinstance(self.hparams, dict):
            self.hparams.update(hparams)
        else:
            self.__dict__["_hparams"] = hparams


def _select(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[str | None, Any]:
    """``(name, hparams)``: the hyperparameters meant by ``args``, and the argument of ``__init__`` that they are."""
    if not args:
        return ("kwargs" if given else None), given
    containers = [arg for arg in args if not isinstance(arg, str)]
    if len(containers) == 1:
        return _name_of(containers[0], given), containers[0]
    if containers:
        raise ValueError(
            f"save_hyperparameters got {len(containers)} containers: pass names of arguments, or a single container"
        )
    for name in args:
        if name not in given:
            raise KeyError(f"save_hyperparameters({name!r}): not an argument of __init__; {did_you_mean(name, given)}")
    return "kwargs", {name: given[name] for name in args}


def _name_of(container: Any, given: dict[str, Any]) -> str | None:
    for name, value in given.items():
        if value is container:
            return name
    for name, value in given.items():  # a copy of the argument, with more in it or not
        if type(value) is type(container) and isinstance(value, (dict, Namespace)) and value == container:
            return name
    return None


def _to_container(hparams: Any) -> MutableMapping[str, Any]:
    if isinstance(hparams, Namespace):
        return AttributeDict(vars(hparams))
    if dataclasses.is_dataclass(hparams) and not isinstance(hparams, type):
        return AttributeDict({field.name: getattr(hparams, field.name) for field in dataclasses.fields(hparams)})
    if isinstance(hparams, dict):
        return AttributeDict(hparams)
    if isinstance(hparams, MutableMapping):
        return hparams
    raise ValueError(
        f"save_hyperparameters can't keep a {type(hparams).__name__}: "
        "pass a dict, Namespace, dataclass or OmegaConf container, or names of arguments"
    )


def _given_arguments(obj: Any, frame: FrameType | None) -> dict[str, Any]:
    """The arguments that ``obj`` is being created with, over all ``__init__`` methods on the stack; outer ones win."""
    if dataclasses.is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}
    arguments: dict[str, Any] = {}
    inside = False
    while frame is not None:
        own = _init_arguments(obj, frame)
        if own is not None:
            inside = True
            arguments.update(own)
        elif inside:
            break  # beyond the call that creates `obj`; another object's __init__ is none of its business
        frame = frame.f_back
    return arguments


def _init_arguments(obj: Any, frame: FrameType) -> dict[str, Any] | None:
    """The arguments of ``frame`` if it runs an ``__init__`` of ``obj``."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return None
    local = frame.f_locals
    if local.get(code.co_varnames[0]) is not obj:
        return None
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = {name: local[name] for name in code.co_varnames[1:count] if name in local}
    if code.co_flags & inspect.CO_VARARGS:
        count += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        arguments.update(local.get(code.co_varnames[count], {}))
    return arguments


def _copy(hparams: Any) -> Any:
    """A deep copy; of a dict, values that can't be copied stay the same objects."""
    if not isinstance(hparams, AttributeDict):
        return copy.deepcopy(hparams)
    return AttributeDict({key: _copy_value(value) for key, value in hparams.items()})


def _copy_value(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError, AttributeError, ValueError, copy.Error, pickle.PickleError):
        # Open files, locks, non-leaf tensors: the copy is only there to see later changes.
        return value
