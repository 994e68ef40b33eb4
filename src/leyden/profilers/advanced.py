"""How long each Python function takes within each action."""

import cProfile
import io
import os
import pstats
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from leyden.base import files
from leyden.base.errors import MisconfigurationException
from leyden.profilers.profiler import Profiler

__all__ = ["AdvancedProfiler"]


class AdvancedProfiler(Profiler):
    """Time per Python function within each action, by cProfile.

    Args:
        dirpath: Folder for the report; None: the logger's folder.
        filename: Name of the report without ``.txt``; None: it is logged instead.
        line_count_restriction: Functions shown per action: a fraction (float, 0 to 1) or a number (int).
        dump_stats: Whether to write a ``.prof`` file per action, for snakeviz and the like.

    Raises:
        ValueError: When an action is stopped and was not started.

    Example:
        ``Trainer(profiler=AdvancedProfiler(filename="profile"))``
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self.profiled_actions: dict[str, cProfile.Profile] = defaultdict(cProfile.Profile)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        """An action begins; those around it are not measured until it ends, as Python has one profile at a time."""
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions[action_name].enable()

    def stop(self, action_name: str) -> None:
        """An action ends; the one around it goes on."""
        if action_name not in self.profiled_actions:
            raise ValueError(f"stop({action_name!r}) without a start({action_name!r}) before it")
        self.profiled_actions[action_name].disable()
        if action_name in self._running:
            self._running.remove(action_name)
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        """One table per action, functions by cumulative time."""
        parts = [self._title()]
        for action, profile in self.profiled_actions.items():
            profile.disable()
            if self.dump_stats:
                self._dump(action, profile)
            rank = "" if self._local_rank is None else f" rank: {self._local_rank}"
            parts.append(f"Profile stats for: {action}{rank}")
            text = io.StringIO()
            stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative")
            stats.print_stats(self.line_count_restriction)
            parts.append(text.getvalue())
        return "\n".join(parts)

    def _dump(self, action: str, profile: cProfile.Profile) -> None:
        if not self.dirpath:
            raise MisconfigurationException("AdvancedProfiler(dump_stats=True) has no folder: pass dirpath")
        folder = os.fspath(self.dirpath)
        files.makedirs(folder)
        with tempfile.TemporaryDirectory() as here:
            local = os.path.join(here, "stats.prof")
            profile.dump_stats(local)
            data = Path(local).read_bytes()
        path = files.join(folder, self._prepare_filename(action_name=action, extension=".prof"))
        files.atomic_write(path, lambda file: _write(file, data))

    def teardown(self, stage: str | None) -> None:
        """Forgets what was measured."""
        self._running.clear()
        self.profiled_actions.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        # A running profile can't be sent to another process.
        arguments = (self.dirpath, self.filename, self.line_count_restriction, self.dump_stats)
        return (type(self), arguments)


def _write(file: Any, data: bytes) -> None:
    file.write(data)
