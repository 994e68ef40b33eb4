"""The worker that an orchestrator made of this process: how a `Trainer` inside it finds its ranks and reports.

The orchestrator sets it, the framework reads it; neither imports the other.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from leyden.dist.env import DistInfo, ExternalEnvironment

__all__ = [
    "CheckpointNote",
    "TrainWorkerEnvironment",
    "Worker",
    "begin_fit",
    "current",
    "fit_number",
    "set_current",
    "start_checkpoint",
]

_NOTE = ".leyden-fit.json"


@dataclass(frozen=True)
class Worker:
    """What a training framework needs to know of the worker that it runs in.

    Attributes:
        info: Ranks, sizes and the address of rank 0.
        device: The device of this rank, as torch spells it.
        report: Sends metrics and, if there is one, a folder with checkpoint files: ``report(metrics, folder)``. Returns
            when the folder may be changed again. The ranks need not call it together.
        latest_checkpoint: A local folder with the files of the last committed checkpoint; None where there is none.
        stop_requested: Whether the orchestrator asks the ranks to end at their next boundary.
        run_name: The same for all ranks and restarts of a run.
    """

    info: DistInfo
    device: str
    report: Callable[[Mapping[str, Any], str | None], None]
    latest_checkpoint: Callable[[], str | None]
    stop_requested: Callable[[], bool]
    run_name: str = ""


_current: Worker | None = None
_fits = 0
_start: list[str | None] = []  # what `start_checkpoint` found, once it was asked


def current() -> Worker | None:
    """The worker of this process; None outside of an orchestrated run."""
    return _current


def set_current(worker: Worker | None) -> None:
    """Called by the orchestrator before it runs the user's function, and with None after it."""
    global _current, _fits
    _current = worker
    _fits = 0
    _start.clear()


def begin_fit() -> None:
    """Counts a call of ``Trainer.fit``, so that `fit_number` tells it from others of the same script."""
    global _fits
    _fits += 1


def fit_number() -> int:
    """Which fit of this worker runs, from 1.

    After a restart the user's function runs from its top again, and a checkpoint belongs to the fit of the same number.
    """
    return _fits


def start_checkpoint() -> str | None:
    """The worker's latest checkpoint as it was when this was first asked, so that all ranks mean the same one."""
    if _current is not None and not _start:
        _start.append(_current.latest_checkpoint())
    return _start[0] if _start else None


@dataclass(frozen=True)
class CheckpointNote:
    """What a Trainer writes into a folder that it reports, so that it can go on from there after a restart.

    Attributes:
        fit: Which of the worker's fits wrote the folder, see `fit_number`.
        file: Name of the file in the folder that the fit can go on from; None where there are weights only.
        original: The path under which the training script knows the file; ``""`` if there is none.
    """

    fit: int
    file: str | None
    original: str = ""

    def write(self, folder: str) -> None:
        """Puts the note into ``folder``."""
        with open(os.path.join(folder, _NOTE), "w", encoding="utf-8") as stream:
            json.dump({"fit": self.fit, "file": self.file, "original": self.original}, stream)

    @classmethod
    def read(cls, folder: str) -> "CheckpointNote | None":
        """The note in ``folder``; None where no Trainer wrote it."""
        path = os.path.join(folder, _NOTE)
        if not os.path.isfile(path):
            return None
        with open(path, encoding="utf-8") as stream:
            found = json.load(stream)
        return cls(found["fit"], found["file"], found.get("original", ""))


class TrainWorkerEnvironment(ExternalEnvironment):
    """Started by `leyden.train`: ranks, sizes and the device are those of the `current` worker."""

    @property
    def worker(self) -> Worker:
        """The worker of this process.

        Raises:
            RuntimeError: This process is no worker.
        """
        if _current is None:
            raise RuntimeError(
                f"{type(self).__name__} knows its ranks only inside the training function that a TorchTrainer runs: "
                "build the Trainer there, or leave this plugin out"
            )
        return _current

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return self.worker.info.main_address

    @property
    def main_port(self) -> int:
        """Port on that host."""
        return self.worker.info.main_port

    @staticmethod
    def detect() -> bool:
        """True inside a worker."""
        return _current is not None

    def world_size(self) -> int:
        """Number of workers."""
        return self.worker.info.world_size

    def global_rank(self) -> int:
        """Rank of this worker."""
        return self.worker.info.global_rank

    def local_rank(self) -> int:
        """Rank of this worker on its node."""
        return self.worker.info.local_rank

    def node_rank(self) -> int:
        """Rank of this worker's node."""
        return self.worker.info.node_rank

    def devices(self) -> list[torch.device]:
        """One device per worker of this node; the one at this worker's local rank is its own."""
        info, own = self.worker.info, torch.device(self.worker.device)
        found = [own if own.index is None else torch.device(own.type, rank) for rank in range(info.local_world_size)]
        found[info.local_rank] = own
        return found
