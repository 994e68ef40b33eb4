"""The logger interface, a logger that does nothing, and what loggers with version folders share."""

import functools
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from leyden.base import files
from leyden.base.log import rank_zero_only

__all__ = ["DummyExperiment", "DummyLogger", "Logger", "VersionedLogger", "plain_number", "rank_zero_experiment"]

# Between two writes that nobody asked for by name: a disk or network is not touched at every logged step.
SAVE_INTERVAL_S = 1.0


class Logger(ABC):
    """Base class of experiment loggers.

    A subclass implements `name`, `version`, `log_metrics` and `log_hyperparams`, decorates the methods that write with
    ``rank_zero_only`` and the property ``experiment`` with `rank_zero_experiment`.
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment: a group of runs."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """What tells this run from the others of the experiment."""

    @property
    def root_dir(self) -> str | None:
        """Folder of all versions of the experiment; None for a logger that keeps nothing on disk."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Folder of this version; None for a logger that keeps nothing on disk."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Folder under which everything is kept; None for a logger that keeps nothing on disk."""
        return None

    @property
    def group_separator(self) -> str:
        """What stands between the parts of a metric's name that the logger shows as groups."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Records metrics.

        Args:
            metrics: Name -> value.
            step: Position on the x axis.
        """

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Records hyperparameters."""

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:  # noqa: B027
        """Records the graph of the model, for loggers that can show one."""

    def save(self) -> None:  # noqa: B027
        """Makes what was logged visible to readers. Called after every `log_metrics`; may do it less often."""

    def finalize(self, status: str) -> None:
        """Ends the run: everything logged is on disk (or sent) when this returns.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:  # noqa: B027
        """Called after a checkpoint callback has written a file; the callback holds its path and score."""


class DummyExperiment:
    """Takes any call, index and assignment, and does nothing: the experiment of every rank but zero."""

    def nop(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self.nop

    def __getitem__(self, index: Any) -> "DummyExperiment":
        return self

    def __setitem__(self, *args: Any, **kwargs: Any) -> None:
        return None


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator for a logger's ``experiment``: the real one on global rank zero, a `DummyExperiment` elsewhere."""

    @functools.wraps(fn)
    def experiment(self: Any) -> Any:
        if rank_zero_only.rank > 0:  # pyright: ignore[reportFunctionMemberAccess]
            return DummyExperiment()
        return fn(self)

    return experiment


class DummyLogger(Logger):
    """Stands in for the user's loggers where nothing may be logged (``fast_dev_run``); any method may be called."""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        """An object that takes any call."""
        return self._experiment

    @property
    def name(self) -> str:
        """Empty."""
        return ""

    @property
    def version(self) -> str:
        """Empty."""
        return ""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def __getitem__(self, index: int) -> "DummyLogger":
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle ask for protocol methods and mean it
            raise AttributeError(name)
        return DummyExperiment.nop.__get__(self._experiment)


class VersionedLogger(Logger):
    """A logger that keeps each run in ``save_dir/name/version_N``.

    Args:
        save_dir: Local folder or URL.
        name: Folder below it for the experiment; None or ``""`` for none.
        version: Int N for ``version_N``, str for exactly that folder name, None for the next free N.
        prefix: Put before each metric name, with a ``-``.
    """

    LOGGER_JOIN_CHAR = "-"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, save_dir: str | Path, name: str | None, version: int | str | None, prefix: str) -> None:
        super().__init__()
        self._save_dir = os.fspath(save_dir)
        self._name = name or ""
        self._version = version
        self._prefix = prefix
        self._experiment: Any = None

    @property
    def name(self) -> str:
        """Name of the experiment; ``""`` when there is none."""
        return self._name

    @property
    def version(self) -> int | str:
        """The given version, else one more than the highest ``version_N`` that was there when first asked."""
        if self._version is None:
            self._version = self._next_version()
        return self._version

    @property
    def save_dir(self) -> str:
        """As given."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """``save_dir/name``."""
        return files.join(self._save_dir, self._name)

    @property
    def log_dir(self) -> str:
        """``save_dir/name/version_N``, or ``save_dir/name/VERSION`` for a version that is a string."""
        version = self.version
        return files.join(self.root_dir, version if isinstance(version, str) else f"version_{version}")

    def _next_version(self) -> int:
        taken = []
        for path in files.list_dir(self.root_dir):
            word, _, rest = os.path.basename(path.rstrip("/")).partition("_")
            number = rest.split("_")[0]
            if word == "version" and number.isdigit() and files.is_dir(path):
                taken.append(int(number))
        return max(taken, default=-1) + 1

    def _prefixed(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._prefix:
            return metrics
        return {f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}": value for name, value in metrics.items()}

    def __getstate__(self) -> dict[str, Any]:
        # Open files and writer threads stay in the process that made them.
        return {**self.__dict__, "_experiment": None}


def plain_number(name: str, value: Any) -> Any:
    """A value that stays what it is: a tensor on the CPU becomes a number, one elsewhere a copy that is read later.

    A tensor on a device is not read here because that would stop the host until the device has caught up; it is
    copied because its owner may change it in place before it is read.

    Raises:
        ValueError: For a tensor that is not one number.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"can't log {name}: a tensor of shape {tuple(value.shape)} is not one number; reduce it first")
    return value.item() if value.device.type == "cpu" else value.detach().clone()
