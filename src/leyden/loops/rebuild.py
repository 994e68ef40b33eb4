"""A DataLoader again, with another sampler: a copy where that is certain to be right, else a new call of its class."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from leyden.base.errors import MisconfigurationException

__all__ = ["capture_loader_args", "copy_loader", "has_own_batch_sampler", "index_sampler", "rebuild_loader"]

_ARGS = "_leyden_init_args"  # (args, kwargs) of the call that made the loader
_SET_LATER = "_leyden_set_later"  # [(name, value)] of the attributes that were set after that call

_LOADER_PARAMETERS = {
    name: parameter for name, parameter in inspect.signature(DataLoader.__init__).parameters.items() if name != "self"
}


@contextmanager
def capture_loader_args() -> Iterator[None]:
    """Context: a DataLoader subclass that is called in it remembers its arguments, and what was set on it afterwards.

    It can then be made again with another sampler, whatever its ``__init__`` does with the arguments. Only classes that
    have an ``__init__`` of their own need that; outside of this context they are as the user wrote them.
    """
    inits = {cls: cls.__init__ for cls in _subclasses(DataLoader) if "__init__" in vars(cls)}
    own_setattr: Any = DataLoader.__setattr__

    def remember_attribute(loader: DataLoader, name: str, value: Any) -> None:
        own_setattr(loader, name, value)
        later = loader.__dict__.get(_SET_LATER)
        if later is not None:
            later.append((name, value))

    for cls, init in inits.items():
        cls.__init__ = _remembering(init)
    DataLoader.__setattr__ = remember_attribute  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        DataLoader.__setattr__ = own_setattr
        for cls, init in inits.items():
            cls.__init__ = init


def _subclasses(cls: type) -> set[type]:
    direct = set(cls.__subclasses__())
    return direct.union(*map(_subclasses, direct))


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def remembering_init(loader: Any, *args: Any, **kwargs: Any) -> None:
        state = loader.__dict__
        outermost = _ARGS not in state  # the `__init__` of a base class gets what the subclass made of the arguments
        if outermost:
            state[_ARGS] = (args, dict(kwargs))
        init(loader, *args, **kwargs)
        if outermost:
            state[_SET_LATER] = []

    return remembering_init


def has_own_batch_sampler(loader: DataLoader) -> bool:
    """Whether the user passed a batch sampler that is more than torch's `BatchSampler` around a sampler."""
    # a DataLoader that made its batch sampler itself knows its batch size
    return loader.batch_sampler is not None and loader.batch_size is None and not _is_plain(loader.batch_sampler)


def index_sampler(loader: DataLoader) -> Any:
    """The sampler of single indices behind a loader, also when the user wrapped it in a plain `BatchSampler`."""
    if loader.batch_size is None and _is_plain(loader.batch_sampler):
        return loader.batch_sampler.sampler  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    return loader.sampler


def _is_plain(batch_sampler: object) -> bool:
    return type(batch_sampler) is BatchSampler


def rebuild_loader(loader: DataLoader, sampler: Any = None, batch_sampler: Any = None) -> DataLoader:
    """Returns a loader like ``loader`` that draws from ``sampler``, or takes its batches from ``batch_sampler``.

    Args:
        loader: Left as it is.
        sampler: Yields dataset indices; batch size and ``drop_last`` stay.
        batch_sampler: Yields lists of dataset indices; give this or ``sampler``.

    Raises:
        MisconfigurationException: The loader's class has an ``__init__`` of its own that can't be called again with
            another sampler; the message names what is missing.
    """
    if batch_sampler is None and loader.batch_size is None and _is_plain(loader.batch_sampler):
        plain: Any = loader.batch_sampler
        batch_sampler = BatchSampler(sampler, plain.batch_size, plain.drop_last)
    if type(loader).__init__ is DataLoader.__init__:
        return copy_loader(loader, sampler, batch_sampler)
    return _call_again(loader, sampler, batch_sampler)


def copy_loader(loader: DataLoader, sampler: Any = None, batch_sampler: Any = None) -> DataLoader:
    """`rebuild_loader` without a call: right for DataLoader, whose ``__init__`` derives nothing else from a sampler.

    In a subclass, what its ``__init__`` made of the old sampler stays.
    """
    if batch_sampler is None and loader.batch_size is not None:
        batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    new = copy.copy(loader)
    # past DataLoader.__setattr__, which forbids exactly this, for good reasons that don't hold for a fresh copy
    new.__dict__["sampler"] = loader.sampler if sampler is None else sampler
    new.__dict__["batch_sampler"] = batch_sampler
    new.__dict__["_iterator"] = None
    return new


def _call_again(loader: DataLoader, sampler: Any, batch_sampler: Any) -> DataLoader:
    """Calls the loader's class with the arguments of the first call, or with what the attributes tell of them."""
    cls = type(loader)
    parameters = dict(inspect.signature(cls.__init__).parameters)
    del parameters[next(iter(parameters))]  # self
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    captured = loader.__dict__.get(_ARGS)
    if captured is not None:
        args, kwargs = _by_name(captured[0], captured[1], parameters)
    else:
        args, kwargs = (), _from_attributes(loader, parameters, takes_any)

    needed, neutral = _injected(sampler, batch_sampler)
    refused = [] if takes_any else sorted(set(needed) - set(parameters))
    if refused:
        raise MisconfigurationException(
            f"The sampler of a {cls.__name__} has to be replaced, but its `__init__` takes no"
            f" {' and no '.join(map(repr, refused))}. Add {'it' if len(refused) == 1 else 'them'} to its parameters (or"
            " `**kwargs`) and pass them on to DataLoader, or pass Trainer(use_distributed_sampler=False) and make the"
            " loader distributed yourself."
        )
    kwargs.update(needed)
    for name, value in neutral.items():
        if name in parameters:
            kwargs[name] = value  # the class's own default may be another one
        else:
            kwargs.pop(name, None)
    try:
        new = cls(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(
            f"The sampler of a {cls.__name__} has to be replaced, but calling the class again with"
            f" {', '.join(sorted(kwargs))} failed: {error}. Let its `__init__` take these as DataLoader does, or pass"
            " Trainer(use_distributed_sampler=False) and make the loader distributed yourself."
        ) from error
    for name, value in _set_later(loader, new):
        object.__setattr__(new, name, value)
    return new


def _injected(sampler: Any, batch_sampler: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that a rebuilt loader gets, and the values of those that exclude them."""
    if batch_sampler is not None:
        return (
            {"batch_sampler": batch_sampler},
            {"batch_size": 1, "shuffle": False, "sampler": None, "drop_last": False},
        )
    return {"sampler": sampler}, {"shuffle": False, "batch_sampler": None}


def _by_name(
    args: tuple[Any, ...], kwargs: dict[str, Any], parameters: dict[str, inspect.Parameter]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turns positional arguments into named ones, so that another sampler can't collide with them."""
    names = []
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL and not names:
            names = list(_LOADER_PARAMETERS)  # `__init__(self, *args, **kwargs)`: they are DataLoader's
            break
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    if len(args) > len(names):  # further ones have no name: then all must stay where they are
        return args, dict(kwargs)
    return (), {**dict(zip(names, args, strict=False)), **kwargs}


def _from_attributes(loader: DataLoader, parameters: dict[str, inspect.Parameter], takes_any: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    missing = []
    wanted = {**_LOADER_PARAMETERS, **parameters} if takes_any else parameters
    injected = {"sampler", "batch_sampler", "shuffle"}
    for name, parameter in wanted.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in injected:
            continue
        required = parameter.default is parameter.empty
        if hasattr(loader, name):
            value = getattr(loader, name)
            if required or value is not parameter.default:
                found[name] = value
        elif required:
            missing.append(name)
    if missing:
        cls = type(loader).__name__
        raise MisconfigurationException(
            f"The sampler of a {cls} has to be replaced, but the arguments {missing} of its `__init__` are not known:"
            f" it keeps no attributes of these names. Create the {cls} inside the `*_dataloader` method of your module"
            f" or datamodule, or set {', '.join(f'self.{name}' for name in missing)} in its `__init__`, or pass"
            " Trainer(use_distributed_sampler=False) and make the loader distributed yourself."
        )
    return found


def _set_later(loader: DataLoader, new: DataLoader) -> list[tuple[str, Any]]:
    if _ARGS in loader.__dict__:
        return loader.__dict__.get(_SET_LATER, [])
    return [(name, value) for name, value in vars(loader).items() if name not in vars(new)]
