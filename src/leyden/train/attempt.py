"""One start of the group: which rank runs where, and what each of them has said of its life."""

from collections.abc import Mapping, Sequence

from leyden.train.failure import Failure, Kind, is_collateral
from leyden.train.failure_text import exit_text
from leyden.train.messages import Died, Failed, Finished, Hung, Ready, Up
from leyden.train.scaling import Share

__all__ = ["Attempt"]


class Attempt:
    """What is known of the ranks of one attempt. Costs a constant per message.

    Args:
        number: 0 for the first start of the run.
        shares: Nodes with their ranks.
        started: Monotonic time of the start.
    """

    def __init__(self, number: int, shares: Sequence[Share], started: float) -> None:
        self.number = number
        self.shares = {share.node.id: share for share in shares}
        self.world_size = sum(share.count for share in shares)
        self.started = started
        self.stopped: float | None = None  # monotonic time of StopRanks
        self.failures: list[Failure] = []
        self.first_failure_seen: float | None = None
        self.value: bytes | None = None
        self._node_of = [share.node.id for share in shares for _ in range(share.count)]
        self._stop_time = 0.0  # of the wall clock, to compare with messages
        self._ready: set[int] = set()
        self._finished: set[int] = set()
        self._failed: set[int] = set()
        self.gone: set[int] = set()

    @property
    def all_ready(self) -> bool:
        return len(self._ready) == self.world_size

    @property
    def all_finished(self) -> bool:
        return len(self._finished) == self.world_size

    @property
    def all_gone(self) -> bool:
        return len(self.gone) == self.world_size

    @property
    def not_ready(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._ready]

    @property
    def only_echoes(self) -> bool:
        """Whether all failures so far look like those of collectives whose other end is gone."""
        return all(is_collateral(each) for each in self.failures)

    @property
    def lost(self) -> set[int]:
        """Ranks of which no more can be expected."""
        return self.gone | self._failed

    def node_ranks(self) -> Mapping[str, int]:
        return {name: share.node_rank for name, share in self.shares.items()}

    def take(self, node: str, message: Up | None, now: float, wall: float) -> None:
        """Takes what is said of a rank's life; None: the node is gone. Other messages are left alone.

        Args:
            node: Where it comes from.
            message: Of this attempt.
            now: Monotonic time.
            wall: The same moment in seconds since the epoch.
        """
        if message is None:
            self._node_gone(node, now, wall)
        elif isinstance(message, Ready):
            self._ready.add(message.rank)
        elif isinstance(message, Finished):
            self._finished.add(message.rank)
            if message.rank == 0:
                self.value = message.value
        elif isinstance(message, Failed):
            self.fail(message, now)
        elif isinstance(message, Died):
            self._died(message, now)
        elif isinstance(message, Hung):
            self._hung(message, now, wall)

    def stop(self, now: float, wall: float) -> None:
        """The ranks are being ended: how they end after ``wall`` says nothing about them."""
        self.stopped, self._stop_time = now, wall

    def fail(self, message: Failed, now: float) -> None:
        """A rank's function, or an upload, raised."""
        error = message.error
        if self._after_stop(error.time):
            return
        self._add(
            Failure(
                rank=message.rank,
                kind=Kind.ERROR,
                time=error.time,
                type=error.type,
                text=error.text,
                traceback=error.traceback,
                log_tail=message.log_tail,
            ),
            now,
        )

    def _died(self, message: Died, now: float) -> None:
        self.gone.add(message.rank)
        if message.rank in self._finished or message.rank in self._failed:
            return
        by_itself = message.exit_code < 0 and not message.reason.startswith("killed by the agent")
        if self._after_stop(message.time) and not by_itself:
            return
        self._add(
            Failure(
                rank=message.rank,
                kind=Kind.EXIT,
                time=message.time,
                text=exit_text(message.exit_code, message.reason),
                log_tail=message.log_tail,
                exit_code=message.exit_code,
            ),
            now,
        )

    def _hung(self, message: Hung, now: float, wall: float) -> None:
        if self.stopped is None and message.rank not in self._finished:
            text = f"no progress for {message.seconds:.0f} s"
            # It stopped before it was noticed: that moment counts when the first failure is looked for.
            self._add(Failure(message.rank, Kind.HANG, wall - message.seconds, text=text, traceback=message.stack), now)

    def _node_gone(self, node: str, now: float, wall: float) -> None:
        share = self.shares.get(node)
        if share is None:
            return
        for rank in share.ranks:
            if rank not in self.gone:
                self.gone.add(rank)
                if rank not in self._finished and rank not in self._failed and self.stopped is None:
                    self._add(Failure(rank, Kind.NODE, wall, text=f"node {node} is gone"), now)

    def start_timed_out(self, seconds: float, now: float, wall: float) -> None:
        """The ranks that are not ready have failed."""
        ready = len(self._ready)
        text = f"not ready {seconds:.0f} s after its start, when {ready} of {self.world_size} ranks were"
        for rank in self.not_ready:
            self._add(Failure(rank, Kind.HANG, wall, text=text), now)

    def _after_stop(self, time: float) -> bool:
        return self.stopped is not None and time >= self._stop_time

    def _add(self, failure: Failure, now: float) -> None:
        rank = failure.rank
        self._failed.add(rank)
        if self.first_failure_seen is None:
            self.first_failure_seen = now
        known = {**vars(failure), "ready": rank in self._ready, "node": self._node_of[rank]}
        self.failures.append(Failure(**known))
