"""What a script writes down about a run, reduced to plain data that has no root-specific parts in it."""

import csv
import enum
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Record", "plain", "summary"]

# An exception is compared by the first of its classes that a user of both roots can name in an `except`.
NAMED_ERRORS = {"MisconfigurationException", "SIGTERMException"}
# Two roots write their own version here.
VERSION_KEY = "pytorch-lightning_version"
CHECKPOINT_KEYS = [
    "epoch",
    "global_step",
    "state_dict",
    "loops",
    "callbacks",
    "optimizer_states",
    "lr_schedulers",
    "hyper_parameters",
]
ROOTS = ("lightning.pytorch", "leyden")


class Record:
    """The record of one run: ``trace`` is an ordered list of events, ``facts`` a dict of named values.

    Args:
        folder: The run's folder; paths below it are written relative to it.
        root: Name of the root; written as ``<root>``.
    """

    def __init__(self, folder: Path, root: str) -> None:
        self.folder = folder
        self.root = root
        self.trace: list[str] = []
        self.facts: dict[str, Any] = {}

    def event(self, name: str, **details: Any) -> None:
        """Appends one event; tensors among the details are shortened to shape and sum."""
        text = ", ".join(f"{key}={self.text(summary(value))}" for key, value in details.items())
        self.trace.append(f"{name}({text})")

    def fact(self, key: str, value: Any) -> None:
        """Stores a value under a name that is used once per run."""
        if key in self.facts:
            raise KeyError(f"fact {key!r} is recorded twice in one run: give it another name")
        self.facts[key] = self._clean(plain(value))

    def weights(self, module: torch.nn.Module, key: str = "weights") -> None:
        """Stores every parameter and buffer, bit for bit."""
        self.fact(key, dict(module.state_dict()))

    def metrics(self, trainer: Any, key: str = "") -> None:
        """Stores the three metric views of a trainer."""
        for view in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            self.fact(_join(key, view), dict(getattr(trainer, view)))

    def counters(self, trainer: Any, key: str = "") -> None:
        """Stores where a trainer stands: state, steps, epochs, batches."""
        fit = trainer.fit_loop
        self.fact(
            _join(key, "counters"),
            {
                "fn": trainer.state.fn,
                "status": trainer.state.status,
                "stage": trainer.state.stage,
                "global_step": trainer.global_step,
                "current_epoch": trainer.current_epoch,
                "limits": [trainer.min_epochs, trainer.max_epochs, trainer.min_steps, trainer.max_steps],
                "should_stop": trainer.should_stop,
                "train_batches": trainer.num_training_batches,
                "val_batches": list(trainer.num_val_batches),
                "batches_that_stepped": fit.epoch_loop._batches_that_stepped,
                "epochs": _progress(fit.epoch_progress.current),
                "batches": _progress(fit.epoch_loop.batch_progress.current),
            },
        )

    def result(self, trainer: Any, key: str = "") -> None:
        """Stores counters, metrics and the module's weights: what most scripts want at their end."""
        self.counters(trainer, key)
        self.metrics(trainer, key)
        self.weights(trainer.lightning_module, _join(key, "weights"))

    def files(self, folder: Path | None = None, key: str = "files") -> None:
        """Stores the names of all files under a folder, links marked."""
        base = self.folder if folder is None else folder
        names = sorted(
            path.relative_to(base).as_posix() + (" (link)" if path.is_symlink() else "")
            for path in base.rglob("*")
            if path.is_file() or path.is_symlink()
        )
        # TensorBoard puts host name, time and process id into a file's name.
        self.fact(key, [name.split("events.out")[0] + "events" if "events.out" in name else name for name in names])

    def csv(self, folder: Path, key: str = "csv") -> None:
        """Stores the rows that a CSVLogger wrote to ``folder/metrics.csv``; empty cells are left out."""
        with (folder / "metrics.csv").open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [{name: cell for name, cell in row.items() if cell != ""} for row in reader]
            self.fact(key, {"columns": sorted(reader.fieldnames or []), "rows": rows})

    def checkpoint(self, path: str | Path, key: str = "checkpoint") -> None:
        """Stores the whole content of a checkpoint file."""
        content = torch.load(path, map_location="cpu", weights_only=False)
        if VERSION_KEY in content:
            content[VERSION_KEY] = "<version>"
        self.fact(key, content)

    def error(
        self, key: str, function: Callable[[], Any], names: Iterable[str] = (), *, any_kind: bool = False
    ) -> bool:
        """Calls a function and stores how it fails, or that it does not; returns whether it failed.

        Args:
            key: Name of the fact.
            function: What to call; an interrupt counts as a failure too.
            names: Words of which the other root's message must have those that the reference's has.
            any_kind: The reference fails by accident here (an AttributeError deep inside, say): any error will do.
        """
        try:
            function()
        except BaseException as failure:
            message = str(failure)
            self.fact(
                key,
                {
                    "raises": ["Exception"] if any_kind else error_names(failure),
                    "explains": len(message) >= 12,
                    "says": [name for name in names if name in message],
                },
            )
            return True
        self.fact(key, {"raises": [], "explains": False, "says": []})
        return False

    def warned(self, key: str, function: Callable[[], Any], names: Iterable[str]) -> None:
        """Calls a function and stores which of the given words its warnings have in them."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        said = " ".join(str(warning.message) for warning in caught)
        self.fact(key, [name for name in names if name in said])

    def text(self, value: Any) -> str:
        return self._replace(value if isinstance(value, str) else repr(value))

    def _replace(self, text: str) -> str:
        text = text.replace(str(self.folder.resolve()), "<tmp>").replace(str(self.folder), "<tmp>")
        for root in ROOTS:
            text = text.replace(root, "<root>")
        return text

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._replace(value)
        if isinstance(value, dict):
            return {self._replace(name): self._clean(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._clean(item) for item in value]
        return value


def error_names(failure: BaseException) -> list[str]:
    """The classes of an exception that both roots have, nearest first."""
    return [
        cls.__name__
        for cls in type(failure).__mro__
        if cls is not object and (cls.__module__ == "builtins" or cls.__name__ in NAMED_ERRORS)
    ]


def plain(value: Any) -> Any:
    """Reduces a value to None, bool, int, float, str, list and dict, losing no digit."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _number(float(value))
    if isinstance(value, Tensor):
        return _array(
            str(value.dtype).removeprefix("torch."), list(value.shape), value.detach().cpu().double().flatten()
        )
    if isinstance(value, np.ndarray):
        return _array(str(value.dtype), list(value.shape), torch.as_tensor(value).double().flatten())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, Path | timedelta | torch.device | torch.dtype):
        return str(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"<{value.__name__}>"
    return f"<{type(value).__name__}>"


def summary(value: Any) -> Any:
    """A short text-friendly form for traces; a change of any one element still shows in the sum."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return _Word(f"{kind}{list(value.shape)}:{value.detach().double().sum().item()!r}")
    if isinstance(value, Mapping):
        if "state_dict" in value and "loops" in value:
            # The content of a checkpoint belongs into a fact; a root may have keys of its own.
            return _Word("<checkpoint: " + " ".join(key for key in CHECKPOINT_KEYS if key in value) + ">")
        return {str(k): summary(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [summary(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, BaseException):
        return _Word(f"{error_names(value)[0]}")
    if isinstance(value, torch.optim.Optimizer) or hasattr(value, "param_groups"):
        return _Word(_torch_name(value, "torch.optim"))
    if isinstance(value, torch.device):
        return str(value)
    simple = plain(value)
    return _Word(simple) if isinstance(simple, str) and simple.startswith("<") else simple


class _Word(str):
    """Text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _torch_name(value: Any, package: str) -> str:
    """A root may wrap an optimizer in a class of its own: name torch's class under it."""
    for cls in value.__class__.__mro__:  # not type(value): a wrapper may say that it is what it wraps
        if cls.__module__.startswith(package):
            return cls.__name__
    return type(value).__name__


def _array(dtype: str, shape: list[int], values: Tensor) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "values": [_number(number) for number in values.tolist()]}


def _number(number: float) -> float | str:
    # NaN differs from itself, which would make two equal records differ.
    return number if math.isfinite(number) else str(number)


def _progress(state: Any) -> dict[str, int]:
    return {name: getattr(state, name) for name in ("ready", "started", "processed", "completed")}


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
