"""A simulated group: ranks are scripts, time is a number. It drives a real controller with 10,000 ranks in seconds.

A script is a generator function that takes the rank's `RankPlan` and yields what the rank does::

    def script(plan):
        yield Work(1.0)
        yield Report({"loss": 0.5}, files={f"{plan.rank}.pt": b"..."})
        if plan.rank == 3 and plan.attempt == 0:
            yield Die(exit_code=-9)

Nothing in here starts a process or imports torch.
"""

import heapq
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.train.groups import Event, Node, Placement
from leyden.train.messages import (
    CheckpointPart,
    CloseAgent,
    Committed,
    Died,
    Down,
    ErrorInfo,
    Failed,
    Finished,
    Hung,
    Metrics,
    RankPlan,
    Ready,
    StartRanks,
    StopRanks,
    Up,
)
from leyden.train.ports import Clock

__all__ = [
    "Barrier",
    "Die",
    "FakeGroup",
    "Hang",
    "LoseNode",
    "Raise",
    "Report",
    "Return",
    "Script",
    "SimulatedTime",
    "Step",
    "Work",
    "make_nodes",
]

EPOCH = 1_700_000_000.0


@dataclass(frozen=True)
class Work:
    """Computes for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Report:
    """Calls `report`; with ``files`` (path -> content) it comes with a checkpoint, {}: of which this rank has no part.

    Attributes:
        values: Metrics.
        files: None: no checkpoint.
        folder: ``checkpoint_dir_name``.
        upload_s: How long the upload takes.
    """

    values: Mapping[str, Any]
    files: Mapping[str, bytes] | None = None
    folder: str | None = None
    upload_s: float = 0.0


@dataclass(frozen=True)
class Barrier:
    """Waits for all ranks to get here; fails as a collective does when one of them ends before."""


@dataclass(frozen=True)
class Raise:
    """The function raises."""

    type: str
    text: str


@dataclass(frozen=True)
class Die:
    """The process ends at once."""

    exit_code: int
    reason: str = ""


@dataclass(frozen=True)
class Hang:
    """Does nothing any more."""


@dataclass(frozen=True)
class LoseNode:
    """The whole node goes, with all its ranks and its agent."""


@dataclass(frozen=True)
class Return:
    """The function returns this; a script that ends returns None."""

    value: Any


Step = Work | Report | Barrier | Raise | Die | Hang | LoseNode | Return
Script = Callable[[RankPlan], Iterator[Step]]


@dataclass
class SimulatedTime:
    """Time that only `FakeGroup.poll` moves."""

    now: float = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: EPOCH + self.now)


def make_nodes(count: int, ranks: int, first: int = 0) -> list[Node]:
    """Equal nodes ``node0``, ``node1``, ..., each with so many ranks."""
    return [
        Node(f"node{number}", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", ranks, (), ranks, (29500, 29501))
        for number in range(first, first + count)
    ]


@dataclass(slots=True, eq=False)
class _Rank:
    plan: RankPlan
    node: str
    steps: Iterator[Step]
    reports: int
    alive: bool = True
    waiting: bool = False  # in a barrier
    done: bool = False  # returned


@dataclass
class _World:
    """The ranks of one attempt, for barriers."""

    ranks: dict[int, _Rank] = field(default_factory=dict)
    waiting: int = 0
    broken: bool = False


class FakeGroup:
    """See the module. Events happen at simulated moments; `poll` moves the time to the next one.

    Args:
        nodes: Present from the start.
        script: What the ranks do.
        time: The clock, to share with the controller.
        promised: Places that may come later: a request for at most so many waits, for more is impossible.
        start_s: From StartRanks to Ready.
        at_start: What a rank does instead of becoming ready, if anything: a `Raise`, `Die`, `Hang` or `LoseNode`.
        store: Called with ``(folder, path, content)`` for each file of a checkpoint.
        hang_s: After so long without a step, `Hung` is sent; None: never.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        script: Script,
        time: SimulatedTime | None = None,
        *,
        promised: int = 0,
        start_s: float = 0.1,
        at_start: Callable[[RankPlan], Step | None] | None = None,
        store: Callable[[str, str, bytes], object] | None = None,
        hang_s: float | None = None,
    ) -> None:
        self.time = time or SimulatedTime()
        self.nodes = {node.id: node for node in nodes}
        self.sent: list[tuple[str, Down]] = []  # all but the ranks' plans, for tests
        self.plans: list[RankPlan] = []
        self.released = 0
        self._script = script
        self._promised = promised
        self._start_s = start_s
        self._at_start = at_start
        self._store = store
        self._hang_s = hang_s
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._arrived: list[Event] = []
        self._by_node: dict[str, list[_Rank]] = {}
        self._worlds: dict[int, _World] = {}
        self._by_type: dict[type, Callable[[_Rank, Any], None]] = {
            Work: lambda rank, step: self._later(step.seconds, lambda: self._next(rank)),
            Barrier: self._barrier,
            Raise: self._raise,
            Die: lambda rank, step: self._end(rank, step.exit_code, step.reason),
            Hang: self._hang,
            LoseNode: lambda rank, _: self.lose_node(rank.node),
            Return: lambda rank, step: self._finish(rank, step.value),
        }

    # ---- the protocol ------------------------------------------------------------------------------------------------

    def place(self, least: int, most: int, timeout: float) -> Placement:
        """See `WorkerGroup.place`; waits in simulated time."""
        places = self._places()
        if places < least and timeout > 0:
            self._advance(timeout, until=lambda: self._places() >= least)
            places = self._places()
        short = f"{least - places} more places; {places} are here, on {len(self.nodes)} nodes"
        if places < least and places + self._promised < least:
            return Placement(tuple(self.nodes.values()), f"{short}, and {self._promised} more can come", True)
        chosen: list[Node] = []
        for node in self.nodes.values():
            if sum(each.ranks for each in chosen) < most:
                chosen.append(node)
        return Placement(tuple(chosen), short if places < least else "")

    def send(self, node: str, message: Down) -> None:
        """See `WorkerGroup.send`."""
        if isinstance(message, StartRanks):
            self.plans.extend(message.plans)
            if node in self.nodes:
                for plan in message.plans:
                    self._start(node, plan)
            return
        self.sent.append((node, message))
        if isinstance(message, StopRanks | CloseAgent):
            for rank in self._by_node.get(node, ()):
                self._later(0.001, lambda rank=rank: self._end(rank, -15, "killed by the agent"))

    def poll(self, timeout: float) -> list[Event]:
        """See `WorkerGroup.poll`."""
        if not self._arrived:
            self._advance(timeout, until=lambda: bool(self._arrived))
        arrived, self._arrived = self._arrived, []
        return arrived

    def release(self) -> None:
        """See `WorkerGroup.release`."""
        self.released += 1
        for ranks in self._by_node.values():
            for rank in ranks:
                rank.alive = False
        self._by_node.clear()
        self._worlds.clear()

    # ---- faults from outside -----------------------------------------------------------------------------------------

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Has ``action`` happen at this simulated time."""
        self._later(moment - self.time.now, lambda: (action(), None)[1])

    def lose_node(self, node: str) -> None:
        """The node goes, without a word from its ranks."""
        if self.nodes.pop(node, None) is not None:
            for rank in self._by_node.pop(node, ()):
                if rank.alive:
                    rank.alive = False
                    self._break(rank)
            self._arrived.append(Event(node, None))

    def add_node(self, node: Node) -> None:
        """A node comes."""
        self.nodes[node.id] = node

    @property
    def alive(self) -> int:
        """Ranks that run."""
        return sum(rank.alive for ranks in self._by_node.values() for rank in ranks)

    def committed(self) -> list[Committed]:
        """The commits that agents were told of, each once."""
        return list({message.index: message for _, message in self.sent if isinstance(message, Committed)}.values())

    # ---- the simulation ----------------------------------------------------------------------------------------------

    def _places(self) -> int:
        return sum(node.ranks for node in self.nodes.values())

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (self.time.now + max(seconds, 0.0), self._number, action))

    def _advance(self, timeout: float, until: Callable[[], bool]) -> None:
        """Lets things happen until ``until`` holds, and then all else of the same moment; or the time is up."""
        end = self.time.now + timeout
        while self._agenda and self._agenda[0][0] <= end:
            if until() and self._agenda[0][0] > self.time.now:
                return
            moment, _, action = heapq.heappop(self._agenda)
            self.time.now = max(self.time.now, moment)
            action()
        if not until():
            self.time.now = end

    def _start(self, node: str, plan: RankPlan) -> None:
        rank = _Rank(plan, node, self._script(plan), plan.next_report)
        self._by_node.setdefault(node, []).append(rank)
        self._worlds.setdefault(plan.attempt, _World()).ranks[plan.rank] = rank
        self._later(self._start_s, lambda: self._begin(rank))

    def _begin(self, rank: _Rank) -> None:
        if not rank.alive:
            return
        instead = self._at_start(rank.plan) if self._at_start is not None else None
        if instead is not None:
            self._by_type[type(instead)](rank, instead)
            return
        self._say(rank, Ready(rank.plan.attempt, rank.plan.rank, 1000 + rank.plan.rank, self._wall()))
        self._next(rank)

    def _next(self, rank: _Rank) -> None:
        """Goes on to the next step that takes time."""
        while rank.alive:
            step = next(rank.steps, None)
            if isinstance(step, Report):
                attempt, index = rank.plan.attempt, rank.reports
                rank.reports += 1
                has_files = step.files is not None
                self._say(rank, Metrics(attempt, rank.plan.rank, index, step.values, has_files, self._wall()))
                if not has_files:
                    continue
                self._later(step.upload_s, lambda step=step, index=index: self._uploaded(rank, step, index))
            elif step is None:
                self._finish(rank, None)
            else:
                self._by_type[type(step)](rank, step)
            return

    def _uploaded(self, rank: _Rank, step: Report, index: int) -> None:
        if not rank.alive:
            return
        folder = step.folder or f"checkpoint_{index:06d}"
        files = step.files or {}
        if self._store is not None:
            for path, content in files.items():
                self._store(folder, path, content)
        sizes = {path: len(content) for path, content in files.items()}
        self._say(rank, CheckpointPart(rank.plan.attempt, rank.plan.rank, index, folder, sizes, self._wall()))
        self._next(rank)

    def _barrier(self, rank: _Rank, step: Barrier) -> None:
        del step
        world = self._worlds[rank.plan.attempt]
        rank.waiting, world.waiting = True, world.waiting + 1
        if world.broken:
            self._later(0.002, lambda: self._collective_fails(rank))
        elif world.waiting == rank.plan.world_size:
            world.waiting = 0
            for other in world.ranks.values():
                other.waiting = False
                self._later(0.0, lambda other=other: self._next(other))

    def _break(self, gone: _Rank) -> None:
        world = self._worlds.get(gone.plan.attempt)
        if world is not None and not world.broken and not gone.done:
            world.broken = True
            for rank in world.ranks.values():
                if rank.alive and rank.waiting:
                    self._later(0.002, lambda rank=rank: self._collective_fails(rank))

    def _collective_fails(self, rank: _Rank) -> None:
        if rank.alive:
            self._raise(rank, Raise("RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:1234"))

    def _raise(self, rank: _Rank, step: Raise) -> None:
        lines = f'Traceback (most recent call last):\n  File "train.py", line 1, in train\n{step.type}: {step.text}'
        error = ErrorInfo(step.type, step.text, lines, self._wall())
        self._say(rank, Failed(rank.plan.attempt, rank.plan.rank, error, (f"rank {rank.plan.rank} says", step.text)))
        self._end(rank, 1, "")

    def _hang(self, rank: _Rank, step: Hang) -> None:
        del step
        if self._hang_s is not None:
            seconds = self._hang_s
            plan = rank.plan
            message = Hung(plan.attempt, plan.rank, seconds, 'File "train.py", line 7 in wait')
            self._later(seconds, lambda: self._say(rank, message) if rank.alive else None)

    def _finish(self, rank: _Rank, value: Any) -> None:
        sent = pickle.dumps(value) if rank.plan.rank == 0 and value is not None else None
        rank.done = True
        self._say(rank, Finished(rank.plan.attempt, rank.plan.rank, sent, self._wall()))
        self._later(0.001, lambda: self._end(rank, 0, ""))

    def _end(self, rank: _Rank, exit_code: int, reason: str) -> None:
        if rank.alive:
            rank.alive = False
            plan = rank.plan
            self._say(rank, Died(plan.attempt, plan.rank, exit_code, (f"rank {plan.rank} says",), reason, self._wall()))
            self._break(rank)

    def _say(self, rank: _Rank, message: Up) -> None:
        self._arrived.append(Event(rank.node, message))

    def _wall(self) -> float:
        return EPOCH + self.time.now
