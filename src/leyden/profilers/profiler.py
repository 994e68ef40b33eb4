"""The profiler interface, and the profiler that measures nothing."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leyden.base import files
from leyden.base.log import log

__all__ = ["PassThroughProfiler", "Profiler"]

_UNSAFE_IN_FILE_NAMES = re.compile(r"[\\/:*?\"<>|\s_]+")


class Profiler(ABC):
    """Base class of profilers, also of your own: implement `start`, `stop` and `summary`.

    Args:
        dirpath: Folder for reports; None: the logger's folder.
        filename: Name of the report without its ending; None: the report is logged instead.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._local_rank: int | None = None
        self._stage: str | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """An action begins."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """An action ends."""

    def summary(self) -> str:
        """The report; empty for none."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Brackets an action: ``with trainer.profiler.profile("load"): ...``."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    @property
    def local_rank(self) -> int:
        """Rank on this machine; 0 before `setup`."""
        return self._local_rank or 0

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run begins.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: Rank on this machine.
            log_dir: Folder for reports if none was given.
        """
        self._stage = stage
        self._local_rank = local_rank
        self.dirpath = self.dirpath or log_dir

    def teardown(self, stage: str | None) -> None:  # noqa: B027
        """A run ended, well or not: lets go of what the profiler holds."""

    def describe(self) -> None:
        """Writes the report to ``dirpath/STAGE-FILENAME-RANK.txt``, or logs it on rank 0; then `teardown`."""
        summary = self.summary()
        if summary and self.filename and self.dirpath:
            self._append(summary)
        elif summary and self.local_rank == 0:
            log.info(summary)
        self.teardown(stage=self._stage)

    def _append(self, summary: str) -> None:
        folder = os.fspath(self.dirpath or "")
        files.makedirs(folder)
        path = files.join(folder, self._prepare_filename())
        if files.is_local(path):
            with open(files.local_path(path), "a") as file:
                file.write(summary)
        else:
            with files.get_filesystem(path).open(path, "a") as file:
                file.write(summary)

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """``STAGE-FILENAME-RANK-ACTION.EXTENSION``, of what there is, without what a file system refuses."""
        parts = (self._stage, self.filename, None if self._local_rank is None else str(self._local_rank), action_name)
        base = _UNSAFE_IN_FILE_NAMES.sub("_", "-".join(part for part in parts if part))
        return (base or "profile") + extension

    def _title(self) -> str:
        return f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"


class PassThroughProfiler(Profiler):
    """Measures nothing; what ``trainer.profiler`` is when no profiler was asked for."""

    @property
    def does_nothing(self) -> bool:
        """Whether loops may leave this profiler out; a subclass may well do something."""
        return type(self) is PassThroughProfiler

    def start(self, action_name: str) -> None:
        """Does nothing."""

    def stop(self, action_name: str) -> None:
        """Does nothing."""
