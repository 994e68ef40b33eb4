"""Lists the mismatches between two records of the same script."""

import difflib
import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from differential.differences import Difference

if TYPE_CHECKING:
    from differential.record import Record

__all__ = ["ABSENT", "Mismatch", "diff_records", "diff_values", "report", "unexplained"]


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


ABSENT = _Absent()


@dataclass(frozen=True)
class Mismatch:
    """One place where two records differ.

    Attributes:
        path: Where, e.g. ``facts/checkpoint/epoch`` or ``trace/-/C.on_fit_start()``: ``-`` marks an event that only
            the reference has, ``+`` one that only the other root has.
        left: The reference's value.
        right: The other root's value.
    """

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.left!r} != {self.right!r}"


def diff_records(left: "Record", right: "Record") -> list[Mismatch]:
    """All mismatches, those of the trace first."""
    found = list(_diff_traces(left.trace, right.trace))
    found.extend(diff_values(left.facts, right.facts, "facts"))
    return found


def diff_values(left: Any, right: Any, path: str = "") -> Iterator[Mismatch]:
    """Compares plain values as `record.plain` makes them, exactly: an int differs from a float, one bit counts."""
    if isinstance(left, dict) and isinstance(right, dict):
        if "raises" in left and "raises" in right:
            yield from _diff_errors(left, right, path)
            return
        for name in [*left, *(name for name in right if name not in left)]:
            yield from diff_values(left.get(name, ABSENT), right.get(name, ABSENT), f"{path}/{name}")
    elif isinstance(left, list) and isinstance(right, list):
        for index in range(max(len(left), len(right))):
            a = left[index] if index < len(left) else ABSENT
            b = right[index] if index < len(right) else ABSENT
            yield from diff_values(a, b, f"{path}/{index}")
    elif type(left) is not type(right) or left != right:
        yield Mismatch(path, left, right)


def _diff_errors(left: dict[str, Any], right: dict[str, Any], path: str) -> Iterator[Mismatch]:
    """The other root may raise a subclass of what the reference raises, and may explain more, never less."""
    if bool(left["raises"]) != bool(right["raises"]) or not set(left["raises"][:1]) <= set(right["raises"]):
        yield Mismatch(f"{path}/raises", left["raises"], right["raises"])
    if left["explains"] and not right["explains"]:
        yield Mismatch(f"{path}/explains", True, False)
    missing = [name for name in left["says"] if name not in right["says"]]
    if missing:
        yield Mismatch(f"{path}/says", left["says"], right["says"])


def _diff_traces(left: Sequence[str], right: Sequence[str]) -> Iterator[Mismatch]:
    if left == right:
        return
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        if tag == "equal":
            continue
        for index in range(a0, a1):
            yield Mismatch(f"trace/-/{left[index]}", f"event {index}", ABSENT)
        for index in range(b0, b1):
            yield Mismatch(f"trace/+/{right[index]}", ABSENT, f"event {index}")


def unexplained(
    name: str, mismatches: Iterable[Mismatch], differences: Sequence[Difference]
) -> tuple[list[Mismatch], list[Difference]]:
    """Splits off what the table of intended differences covers.

    Returns:
        The mismatches that no entry covers, and the entries for this script that covered nothing: an entry that has
        become unnecessary must go, or it hides the next mistake.
    """
    mine = [entry for entry in differences if fnmatch.fnmatchcase(name, entry.script)]
    used: set[Difference] = set()
    open_mismatches = []
    for mismatch in mismatches:
        covering = [entry for entry in mine if _covers(entry, mismatch)]
        used.update(covering)
        if not covering:
            open_mismatches.append(mismatch)
    stale = [entry for entry in mine if entry not in used and "*" not in entry.script]
    return open_mismatches, stale


def _covers(entry: Difference, mismatch: Mismatch) -> bool:
    if not fnmatch.fnmatchcase(mismatch.path, entry.path):
        return False
    if entry.rtol is None:
        return True
    try:
        return math.isclose(float(mismatch.left), float(mismatch.right), rel_tol=entry.rtol, abs_tol=1e-12)
    except (TypeError, ValueError):
        return False


def report(name: str, mismatches: Sequence[Mismatch], limit: int = 40) -> str:
    """A readable failure text, cut after ``limit`` lines."""
    lines = [f"script {name!r}: {len(mismatches)} differences from the reference", *map(str, mismatches[:limit])]
    if len(mismatches) > limit:
        lines.append(f"... and {len(mismatches) - limit} more")
    return "\n  ".join(lines)
