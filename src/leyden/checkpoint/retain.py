"""Which checkpoints to keep: pure decisions over scores; nothing here touches a file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Entry", "Mode", "best", "is_better", "qualifies", "rankable", "retain", "worst"]

Mode = Literal["min", "max", "newest"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One saved checkpoint.

    Attributes:
        path: Where it is.
        score: The monitored value, never NaN (see `rankable`); not looked at in mode "newest".
    """

    path: str
    score: float = 0.0


def rankable(score: float, mode: Mode) -> float:
    """``score``, or the worst value there is when it is NaN: a diverged run must not look like the best one."""
    if not math.isnan(score):
        return score
    return -math.inf if mode == "max" else math.inf


def is_better(score: float, than: float, mode: Mode) -> bool:
    """Whether ``score`` is strictly better; equal is not, and NaN never is. The newer of two always is."""
    if mode == "newest":
        return True
    return score > than if mode == "max" else score < than


def worst(entries: Sequence[Entry], mode: Mode) -> Entry:
    """The entry to give up first; of equal ones the oldest. ``entries`` are in the order they were saved."""
    if mode == "newest":
        return entries[0]
    return min(entries, key=lambda each: each.score) if mode == "max" else max(entries, key=lambda each: each.score)


def best(entries: Sequence[Entry], mode: Mode) -> Entry:
    """The entry to give up last; of equal ones the oldest. ``entries`` are in the order they were saved."""
    if mode == "newest":
        return entries[-1]
    return max(entries, key=lambda each: each.score) if mode == "max" else min(entries, key=lambda each: each.score)


def qualifies(score: float, entries: Sequence[Entry], k: int, mode: Mode) -> bool:
    """Whether a checkpoint with this score would be kept beside ``entries``.

    Args:
        score: Its monitored value; NaN qualifies only while there is room.
        entries: What is kept now, oldest first.
        k: How many may be kept; -1 for all.
        mode: "min": low scores are good; "max": high ones; "newest": recent ones, whatever they score.
    """
    if k == -1:
        return True
    if k == 0:
        return False
    return len(entries) < k or is_better(score, worst(entries, mode).score, mode)


def retain(entries: Sequence[Entry], k: int, mode: Mode) -> tuple[list[Entry], list[Entry]]:
    """Splits ``entries`` (oldest first) into ``(keep, drop)``: at most ``k`` are kept, all of them for -1.

    Both keep the order of ``entries`` among themselves, except that the first to give up comes first in ``drop``.
    """
    keep = list(entries)
    drop: list[Entry] = []
    while k != -1 and len(keep) > k:
        loser = worst(keep, mode)
        keep.remove(loser)
        drop.append(loser)
    return keep, drop
