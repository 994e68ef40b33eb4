"""Readers of the Trainer's arguments: each takes a value and its name and returns the value in its one form."""

import functools
import inspect
import os
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, TypeVar

from leyden.base.errors import MisconfigurationException, PossibleUserWarning, raise_all
from leyden.base.log import rank_zero_info, rank_zero_warn
from leyden.base.registry import did_you_mean

__all__ = [
    "Problems",
    "as_list",
    "barebones_conflicts",
    "batch_limit",
    "clip_algorithm",
    "duration",
    "env_defaults",
    "explain_limit",
    "integer",
    "is_interactive",
    "loop_limits",
    "validation_interval",
]

F = TypeVar("F", bound=Callable[..., Any])

_ENV_PREFIX = "PL_TRAINER_"  # Lightning's, so that job scripts keep working

# Arguments of earlier Lightning versions, which are still found in scripts and answers, and what does their work now.
_GONE = {
    "amp_backend": "torch's own is used; leave it out",
    "auto_lr_find": "look for a learning rate before, and pass it to the module",
    "auto_scale_batch_size": "look for a batch size before, and pass it to the datamodule",
    "auto_select_gpus": "pass devices=n, or devices=find_usable_cuda_devices(n) of leyden.accelerators",
    "checkpoint_callback": "use enable_checkpointing, and callbacks=[ModelCheckpoint(...)]",
    "gpus": "use accelerator='gpu', devices=...",
    "multiple_trainloader_mode": "pass CombinedLoader(loaders, mode=...) as the training loader",
    "num_processes": "use accelerator='cpu', devices=...",
    "progress_bar_refresh_rate": "use enable_progress_bar=False, or callbacks=[TQDMProgressBar(refresh_rate=...)]",
    "replace_sampler_ddp": "use use_distributed_sampler",
    "resume_from_checkpoint": "use trainer.fit(model, ckpt_path=...)",
    "stochastic_weight_avg": "it is a callback",
    "terminate_on_nan": "use detect_anomaly=True, or EarlyStopping(monitor, check_finite=True)",
    "tpu_cores": "TPUs are not supported",
    "track_grad_norm": "log leyden.utilities.grad_norm(self, 2) in on_before_optimizer_step",
    "weights_save_path": "use ModelCheckpoint(dirpath=...), or default_root_dir",
    "weights_summary": "use enable_model_summary, or callbacks=[ModelSummary(max_depth=...)]",
}


class Problems:
    """Collects what is wrong with arguments, to raise all of it at once."""

    def __init__(self) -> None:
        self._found: list[tuple[type[Exception], str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, kind: type[Exception], message: str) -> None:
        """Notes one problem."""
        self._found.append((kind, message))

    def extend(self, other: "Problems") -> None:
        """Notes the problems of another collection."""
        self._found += other._found

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Context: an error about arguments in the block is noted, and what follows the block goes on."""
        try:
            yield
        except (MisconfigurationException, TypeError, ValueError) as error:
            kind = next(kind for kind in (MisconfigurationException, TypeError, ValueError) if isinstance(error, kind))
            self.add(kind, str(error))

    def raise_found(self, what: str) -> None:
        """Raises one error for all problems: of their type if they have the same, else `MisconfigurationException`."""
        kinds = {kind for kind, _ in self._found}
        try:
            raise_all([message for _, message in self._found], what)
        except MisconfigurationException as error:
            if kinds == {MisconfigurationException} or len(kinds) > 1:
                raise
            raise kinds.pop()(str(error)) from None


def env_defaults(init: F) -> F:
    """Decorator of ``Trainer.__init__``: arguments may be positional, and unset ones come from the environment.

    The variable of the argument ``max_epochs`` is ``PL_TRAINER_MAX_EPOCHS``; its value is read as a Python literal, or
    else as a string. An empty variable is an unset one.
    """
    names = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def init_with_defaults(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(names):
            raise TypeError(f"Trainer takes at most {len(names)} arguments, got {len(args)}; pass them by name.")
        for name, value in zip(names, args, strict=False):
            if name in kwargs:
                raise TypeError(f"Trainer got two values for {name!r}, one by position; pass arguments by name.")
            kwargs[name] = value
        if unknown := [name for name in kwargs if name not in names]:
            hints = (f"{name!r}: {_GONE.get(name) or did_you_mean(name, names)}" for name in unknown)
            raise TypeError(f"Trainer got an unexpected keyword argument {'; '.join(hints)}")
        for name in names:
            text = os.environ.get(_ENV_PREFIX + name.upper())
            if text and name not in kwargs:
                kwargs[name] = _literal(text)
        init(self, **kwargs)

    return init_with_defaults  # pyright: ignore[reportReturnType]


def _literal(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def is_interactive() -> bool:
    """Whether this is a notebook or an interactive Python, where scripts can't be started again."""
    return hasattr(sys, "ps1")


def as_list(value: Any, kind: type, name: str) -> list[Any]:
    """Reads None, one object, or several of them, into a new list.

    Raises:
        TypeError: It holds something that is not a ``kind``.
    """
    if value is None:
        return []
    if isinstance(value, kind):
        return [value]
    items = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    for item in items:
        if not isinstance(item, kind):
            hint = ""
            if isinstance(item, type) and issubclass(item, kind):
                hint = f" It is the class: pass an instance, {item.__name__}(...)."
            elif type(item).__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
                hint = f" It comes from {type(item).__module__}; import it from leyden instead."
            raise TypeError(f"{name} holds {item!r}, which is no {kind.__name__}.{hint}")
    return items


def integer(
    value: Any, name: str, minimum: int, hint: str = "", wrong_type: type[Exception] = TypeError, unset: bool = True
) -> Any:
    """Reads a whole number; 1e5 is one, and None stays None where ``unset`` allows it.

    Raises:
        wrong_type: It is not a whole number.
        MisconfigurationException: It is less than ``minimum``.
    """
    hint = f" {hint}" if hint else ""
    if value is None and unset:
        return None
    if not isinstance(value, Real) or value != value or value % 1 != 0:
        raise wrong_type(f"{name}={value!r} must be an int >= {minimum}.{hint}")
    if value < minimum:
        raise MisconfigurationException(f"{name}={value!r} must be an int >= {minimum}.{hint}")
    return int(value)  # pyright: ignore[reportArgumentType]


def batch_limit(value: Any, name: str) -> int | float:
    """Reads ``limit_*_batches`` and its like: an int counts batches, a float from 0.0 to 1.0 is a fraction.

    Returns:
        An int or a float, which mean different things: 1 is one batch, 1.0 all of them. None gives 1.0.

    Raises:
        TypeError: It is no number.
        MisconfigurationException: It is neither a fraction nor a count.
    """
    if value is None:
        return 1.0
    if isinstance(value, Integral):
        number: int | float = int(value)
    elif isinstance(value, Real):
        number = float(value)
    else:
        raise TypeError(f"{name}={value!r} must be an int (batches) or a float from 0.0 to 1.0 (a fraction of them).")
    if 0 <= number <= 1:
        return number
    if number > 1 and number % 1 == 0:
        return int(number)
    raise MisconfigurationException(
        f"{name}={value!r} must be a fraction from 0.0 to 1.0, or a number of batches as an int."
    )


def duration(value: Any, name: str) -> timedelta | None:
    """Reads a length of time: ``"DD:HH:MM:SS"``, a timedelta, a dict of timedelta's arguments, or None.

    Raises:
        TypeError: It is something else, or the dict has a key that timedelta doesn't know.
        MisconfigurationException: The string has another form, or the time is not positive.
    """
    forms = "pass 'DD:HH:MM:SS', a datetime.timedelta, or a dict like {'hours': 2}"
    if value is None:
        return None
    if isinstance(value, timedelta):
        time = value
    elif isinstance(value, dict):
        try:
            time = timedelta(**value)
        except TypeError as error:
            raise TypeError(f"{name}={value!r} is not a length of time ({error}); {forms}.") from None
    elif isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
            raise MisconfigurationException(f"{name}={value!r} is not a length of time; {forms}.")
        days, hours, minutes, seconds = map(int, parts)
        time = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    else:
        raise TypeError(f"{name}={value!r} is not a length of time; {forms}.")
    if time < timedelta(0):
        raise MisconfigurationException(f"{name}={value!r} is negative; {forms}.")
    return time


def validation_interval(value: Any, every_n_epochs: int | None) -> tuple[int | float, timedelta | None]:
    """Reads ``val_check_interval``.

    Args:
        value: A fraction of the epoch, a number of batches, or a length of time.
        every_n_epochs: ``check_val_every_n_epoch``; None counts batches across epochs, which a fraction can't.

    Returns:
        The interval in batches (int) or as a fraction (float), and the time, if it is one: the interval is then 1.0.

    Raises:
        MisconfigurationException: The value is out of range, or a fraction while batches are counted across epochs.
    """
    name = "val_check_interval"
    if isinstance(value, (str, dict, timedelta)):
        return 1.0, duration(value, name)
    if every_n_epochs is None and isinstance(value, float):
        raise MisconfigurationException(
            f"{name}={value!r} is a fraction of an epoch, but check_val_every_n_epoch=None counts across epochs; pass a"
            " number of batches (an int) or a length of time ('DD:HH:MM:SS', a timedelta or a dict)."
        )
    interval = batch_limit(value, name)
    if isinstance(interval, int) and interval == 0:
        raise MisconfigurationException(f"{name}=0 never ends a wait; pass limit_val_batches=0 to turn validation off.")
    return interval, None


def clip_algorithm(value: Any) -> str | None:
    """Reads ``gradient_clip_algorithm``: ``"norm"``, ``"value"`` or None."""
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in ("norm", "value"):
        raise MisconfigurationException(f"gradient_clip_algorithm={value!r} is unknown; use 'norm' or 'value'.")
    return value.lower()


def barebones_conflicts(arguments: dict[str, Any]) -> list[str]:
    """What ``barebones=True`` turns off but the other arguments ask for, one message each."""
    costs = {
        "enable_checkpointing": "checkpoints",
        "logger": "logging",
        "enable_progress_bar": "the progress bar",
        "log_every_n_steps": "logging",
        "enable_model_summary": "the model summary",
        "num_sanity_val_steps": "sanity checking",
        "fast_dev_run": "a development run",
        "detect_anomaly": "anomaly detection",
        "profiler": "profiling",
    }
    return [
        f"{name}={arguments[name]!r} conflicts with barebones=True, which measures raw speed without {cost}; leave out"
        " one of the two."
        for name, cost in costs.items()
        if arguments[name] is not None and (arguments[name] or name == "profiler")
    ]


def loop_limits(
    max_epochs: int | None, min_epochs: int | None, max_steps: int, min_steps: int | None, has_timer: bool
) -> tuple[int, int]:
    """The number of epochs to train for, from what the user set; warns when nothing bounds the training.

    Args:
        max_epochs: -1 is no bound, None not set.
        min_epochs: None is not set.
        max_steps: -1 is no bound.
        min_steps: None is not set.
        has_timer: A `Timer` callback, or ``max_time``, bounds the training.

    Returns:
        ``(min_epochs, max_epochs)``; ``max_epochs`` -1 is no bound.
    """
    if max_epochs is None and (max_steps != -1 or has_timer):
        max_epochs = -1
    elif max_epochs is None:
        max_epochs = 1000
        rank_zero_warn(
            "neither max_epochs, max_steps nor max_time is given: training ends after 1000 epochs. Pass max_epochs=-1 "
            "for no limit.",
            category=PossibleUserWarning,
        )
    if min_epochs is None:
        # a stop asked for at the start of fit is then weighed against min_steps, once an epoch has begun
        min_epochs = 0 if min_steps is None else 1
    return min_epochs, max_epochs


def explain_limit(value: Any, name: str) -> None:
    """Says what 1 and 1.0 were understood as, where the user passed one of them: they are easily mixed up."""
    if value == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = isinstance(value, float)
        if name == "val_check_interval":
            meaning = "validation runs at the end of the epoch" if whole else "validation runs after every batch"
        else:
            meaning = "all batches are used" if whole else "one batch is used"
        rank_zero_info("Trainer(%s=%r): %s.", name, value, meaning)
