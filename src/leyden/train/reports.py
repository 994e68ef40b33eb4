"""Reports on their way into the run folder: metrics at once, a checkpoint when every rank's part of it is there.

Work is constant per message, and linear in the ranks once per checkpoint; memory is that of the open checkpoints.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

from leyden.train.messages import CheckpointPart, Metrics
from leyden.train.records import Record

__all__ = ["Reports", "Round", "WrongFolderError"]

MAX_OPEN_ROUNDS = 1000


class WrongFolderError(ValueError):
    """A rank put its part of a checkpoint into another folder than the ranks before it."""


@dataclass(frozen=True)
class Round:
    """The metrics of every rank at one report, by rank ({} where a rank has none), and the folder of its checkpoint."""

    index: int
    metrics: Sequence[Mapping[str, Any]]
    folder: str | None


@dataclass
class _Open:
    """A checkpoint that some rank has announced."""

    index: int
    since: float
    reported: int  # ranks that have sent this report, or will never send it
    metrics: Mapping[str, Any]
    folder: str = ""
    announced: set[int] = field(default_factory=set)  # ranks that will send a part
    parts: dict[int, Mapping[str, int]] = field(default_factory=dict)
    warned: bool = False


class Reports:
    """The reports of one attempt.

    Args:
        attempt: Number of the attempt.
        world_size: Its ranks.
        next_report: Index of each rank's first report.
        rounds: Whether to collect the metrics of all ranks for `take_rounds`; costs memory while ranks are uneven.
    """

    def __init__(self, attempt: int, world_size: int, next_report: int, rounds: bool = False) -> None:
        self._attempt = attempt
        self._world_size = world_size
        self._next = [next_report] * world_size
        self._finished = bytearray(world_size)
        self._open: dict[int, _Open] = {}
        self._rank_zero: dict[int, Mapping[str, Any]] = {}  # by index, the latest ones
        self._rounds: dict[int, dict[int, Mapping[str, Any]]] | None = {} if rounds else None
        self._done_rounds: list[Round] = []

    def add_metrics(self, message: Metrics, now: float) -> bool:
        """Takes a report; False when it was seen before."""
        rank, index = message.rank, message.index
        if index < self._next[rank]:
            return False
        self._next[rank] = index + 1
        if rank == 0:
            self._rank_zero[index] = message.values
            if len(self._rank_zero) > MAX_OPEN_ROUNDS:
                del self._rank_zero[next(iter(self._rank_zero))]
        opened = self._open.get(index)
        if opened is not None:
            opened.reported += 1
            if rank == 0:
                opened.metrics = message.values
        elif message.has_checkpoint:
            past = sum(each > index or gone for each, gone in zip(self._next, self._finished, strict=True))
            values = self._rank_zero.get(index, message.values)
            opened = self._open[index] = _Open(index, now, past, values)
        if opened is not None and message.has_checkpoint:
            opened.announced.add(rank)
        if self._rounds is not None:
            self._collect_round(message)
        return True

    def add_part(self, message: CheckpointPart) -> None:
        """Takes a rank's part of a checkpoint, whose `Metrics` came before.

        Raises:
            WrongFolderError: Another rank's part of the same report is in another folder.
        """
        opened = self._open.get(message.index)
        if opened is None:
            return  # of a report that was committed already: sent twice
        if opened.folder and opened.folder != message.folder:
            raise WrongFolderError(
                f"report {message.index}: rank {message.rank} put its checkpoint into {message.folder!r}, other ranks "
                f"into {opened.folder!r}; pass the same checkpoint_dir_name on every rank"
            )
        opened.folder = message.folder
        opened.parts[message.rank] = message.files

    def finish(self, rank: int) -> None:
        """This rank reports no more."""
        if not self._finished[rank]:
            self._finished[rank] = 1
            for opened in self._open.values():
                opened.reported += opened.index >= self._next[rank]

    def take_commits(self, time: float) -> list[Record]:
        """Checkpoints that are whole now, in the order of their reports; each is returned once.

        Args:
            time: Of the commit, in seconds since the epoch.
        """
        found: list[Record] = []
        while self._open:
            # A later one waits for an earlier one, so that the latest is always the furthest.
            opened = self._open[min(self._open)]
            if opened.reported < self._world_size or len(opened.parts) < len(opened.announced):
                break
            del self._open[opened.index]
            self._rank_zero.pop(opened.index, None)
            record = Record(
                index=opened.index,
                folder=opened.folder,
                metrics=opened.metrics,
                time=time,
                attempt=self._attempt,
                world_size=self._world_size,
                parts=opened.parts,
            )
            found.append(record)
            self._close_round(opened.index, opened.folder)
        return found

    def take_rounds(self, last: bool = False) -> list[Round]:
        """Reports that all ranks have made, checkpoint committed; with ``last`` also those that lack ranks."""
        if last and self._rounds:
            for index in sorted(set(self._rounds) - set(self._open)):
                self._close_round(index, None)
        done, self._done_rounds = self._done_rounds, []
        return done

    def unfinished(self, gone: AbstractSet[int]) -> Literal["", "reports", "uploads"]:
        """What the first open checkpoint lacks, when the ranks ``gone`` are not alive.

        Returns:
            "uploads": nothing but uploads that live ranks are making; "reports": live ranks have yet to make the
            report, which they may never do; "": no checkpoint is open, or it needs something of a rank that is gone.
        """
        if not self._open:
            return ""
        first = self._open[min(self._open)]
        if not gone.isdisjoint(first.announced - first.parts.keys()):
            return ""
        if first.reported == self._world_size:
            return "uploads"
        made = all(self._next[rank] > first.index or self._finished[rank] for rank in gone)
        return "reports" if made else ""

    def lagging(self, before: float) -> list[tuple[int, list[int]]]:
        """Checkpoints announced before this time: ``(index, ranks that are missing)``; each is returned once."""
        found = []
        for opened in self._open.values():
            if opened.since < before and not opened.warned:
                opened.warned = True
                late = [
                    rank
                    for rank in range(self._world_size)
                    if (self._next[rank] <= opened.index and not self._finished[rank])
                    or (rank in opened.announced and rank not in opened.parts)
                ]
                found.append((opened.index, late))
        return found

    def _collect_round(self, message: Metrics) -> None:
        assert self._rounds is not None
        found = self._rounds.setdefault(message.index, {})
        found[message.rank] = message.values
        if len(found) == self._world_size and message.index not in self._open:
            self._close_round(message.index, None)
        elif len(self._rounds) > MAX_OPEN_ROUNDS:
            oldest = next((index for index in self._rounds if index not in self._open), None)
            if oldest is not None:
                self._close_round(oldest, None)

    def _close_round(self, index: int, folder: str | None) -> None:
        if self._rounds is not None:
            found = self._rounds.pop(index, {})
            values = [found.get(rank, {}) for rank in range(self._world_size)]
            self._done_rounds.append(Round(index, values, folder))
