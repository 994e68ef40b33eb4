"""How long each action takes."""

import math
import time
from collections import defaultdict
from pathlib import Path

from leyden.profilers.profiler import Profiler

__all__ = ["SimpleProfiler"]


class SimpleProfiler(Profiler):
    """Mean and total duration of each action.

    Args:
        dirpath: Folder for the report; None: the logger's folder.
        filename: Name of the report without ``.txt``; None: it is logged instead.
        extended: Whether the number of calls and the share of the total time are shown.

    Raises:
        ValueError: When an action is started twice, or stopped and not started.

    Example:
        ``Trainer(profiler="simple")``
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        """An action begins."""
        if action_name in self.current_actions:
            raise ValueError(f"start({action_name!r}) again, without a stop({action_name!r}) between")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """An action ends."""
        end = time.perf_counter()
        start = self.current_actions.pop(action_name, None)
        if start is None:
            raise ValueError(f"stop({action_name!r}) without a start({action_name!r}) before it")
        self.recorded_durations[action_name].append(end - start)

    def summary(self) -> str:
        """A table, the most expensive action first; times in seconds."""
        total_time = time.perf_counter() - self.start_time
        sums = {action: math.fsum(durations) for action, durations in self.recorded_durations.items()}
        counts = {action: len(durations) for action, durations in self.recorded_durations.items()}
        if self.extended:
            rows = [["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]]
            rows.append(["Total", "-", str(sum(counts.values())), f"{total_time:.5}", "100 %"])
            for action in sorted(sums, key=lambda name: -sums[name]):
                total, count = sums[action], counts[action]
                share = 100 * total / total_time
                rows.append([action, f"{total / count:.5}", str(count), f"{total:.5}", f"{share:.5}"])
        else:
            rows = [["Action", "Mean duration (s)", "Total time (s)"]]
            for action in sorted(sums, key=lambda name: -sums[name] / counts[name]):
                rows.append([action, f"{sums[action] / counts[action]:.5}", f"{sums[action]:.5}"])
        return self._title() + "\n" + _table(rows, rules_after=(1, 2) if self.extended else (1,))


def _table(rows: list[list[str]], rules_after: tuple[int, ...]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "|  " + "  |  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + "  |" for row in rows
    ]
    rule = "-" * len(lines[0])
    out = [rule]
    for number, line in enumerate(lines, 1):
        out.append(line)
        if number in rules_after:
            out.append(rule)
    return "\n".join([*out, rule]) + "\n"
