"""What a run costs its controller, by number of ranks: start, reports, a checkpoint, a death, a controller's restart.

The ranks are simulated (`leyden.train.fake`), 8 on a node, and say what real ones say. Controller, ledger and run
folder are the real ones, on a local disk. Counted is the controller's own time: its decisions, its files, unpickling
every message that arrives and pickling every one that leaves. Not counted: what ranks and agents do, and the network.

    python benchmarks/control_plane.py [--ranks 10,100,1000,10000] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import describe, machine, progress, say, table, write_json

from leyden.train.controller import Controller
from leyden.train.failure import Budgets
from leyden.train.fake import Die, FakeGroup, Report, SimulatedTime, Step, Work, make_nodes
from leyden.train.groups import Event, Placement
from leyden.train.ledger import Ledger
from leyden.train.messages import Down, RankPlan
from leyden.train.plans import RunSpec
from leyden.train.scaling import Workers
from leyden.train.states import State
from leyden.train.storage import Storage

RANKS_PER_NODE = 8
PHASES = {
    "start": "from nothing until all ranks are ready",
    "reports": "one report of every rank, kept",
    "commit": "a part of every rank, committed, all nodes told",
    "death": "one rank dies: the others ended, all ready again",
    "reopen": "a new controller reads the ledger, all ranks ready",
}
TOLERANCE = 1.5  # of the cost per rank, between the two largest sizes


class WiredGroup:
    """A `FakeGroup` whose messages are pickled, as on a wire; knows how much time was not the controller's."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group
        self.elsewhere = 0.0

    def place(self, least: int, most: int, timeout: float) -> Placement:
        return self._not_counted(lambda: self._group.place(least, most, timeout))

    def send(self, node: str, message: Down) -> None:
        data = pickle.dumps(message)
        self._not_counted(lambda: self._group.send(node, pickle.loads(data)))

    def poll(self, timeout: float) -> Sequence[Event]:
        packed = self._not_counted(lambda: [pickle.dumps(event) for event in self._group.poll(timeout)])
        return [pickle.loads(event) for event in packed]

    def release(self) -> None:
        self._not_counted(self._group.release)

    def _not_counted(self, action: Callable[[], Any]) -> Any:
        before = time.perf_counter()
        try:
            return action()
        finally:
            self.elsewhere += time.perf_counter() - before


class Stage:
    """A run of ``ranks`` ranks in ``folder``, driven from one phase to the next."""

    def __init__(self, ranks: int, folder: str) -> None:
        self.ranks = ranks
        self.storage = Storage(folder)
        simulated = SimulatedTime()
        nodes = make_nodes(-(-ranks // RANKS_PER_NODE), RANKS_PER_NODE)
        fake = FakeGroup(nodes, self._script, simulated, store=self._store)
        self.group = WiredGroup(fake)
        self.ledger = Ledger.open(self.storage, name="run")
        spec = RunSpec(
            name="run",
            url=self.storage.url,
            payload=b"x" * 10_000,
            workers=Workers(ranks, ranks),
            budgets=Budgets(failures=1),
        )
        self.controller = Controller(spec, self.group, self.ledger, clock=simulated.clock, write=lambda text: None)
        self.reports = 0
        self._count_reports()

    def _script(self, plan: RankPlan) -> Iterator[Step]:
        yield Work(10.0)
        yield Report({"loss": 0.5, "epoch": 1, "accuracy": 0.9})
        yield Work(10.0)
        yield Report({"loss": 0.4, "epoch": 2, "accuracy": 0.91}, {f"rank-{plan.rank}.pt": b"state"})
        yield Work(10.0)
        if plan.rank == self.ranks // 2 and plan.attempt == 0:
            yield Die(-9)
        yield Work(1e6)

    def _store(self, folder: str, path: str, content: bytes) -> None:
        target = Path(self.storage.url, folder)
        target.mkdir(exist_ok=True)
        (target / path).write_bytes(content)

    def _count_reports(self) -> None:
        keep = self.ledger.metrics

        def counted(message: Any) -> None:
            self.reports += 1
            keep(message)

        self.ledger.metrics = counted

    def timed(self, done: Callable[[], bool]) -> float:
        """Ticks until ``done()``; returns the controller's seconds."""
        before, elsewhere = time.perf_counter(), self.group.elsewhere
        while not done():
            if self.controller.tick() is State.ERRORED:
                raise SystemExit(f"the simulated run failed: {self.controller.error}")
        return time.perf_counter() - before - (self.group.elsewhere - elsewhere)

    def running(self, attempts: int) -> bool:
        return self.controller.state is State.RUNNING and self.ledger.next_attempt() == attempts


def measure(ranks: int) -> dict[str, float]:
    """Seconds of the controller in each of the `PHASES`."""
    with tempfile.TemporaryDirectory(prefix="leyden-control-plane-") as folder:
        stage = Stage(ranks, f"{folder}/run")
        seconds = {
            "start": stage.timed(lambda: stage.running(1)),
            "reports": stage.timed(lambda: stage.reports >= ranks),
            "commit": stage.timed(lambda: bool(stage.ledger.records)),
            "death": stage.timed(lambda: stage.running(2)),
        }
        stage.ledger.close()  # what a driver that is killed leaves is the same
        before = time.perf_counter()
        again = Stage(ranks, f"{folder}/run")
        opened = time.perf_counter() - before
        seconds["reopen"] = opened + again.timed(lambda: again.running(3))
        again.controller.abort("measured")
        again.ledger.close()
    return seconds


def growth(small: int, large: int, medians: dict[int, dict[str, float]]) -> dict[str, float]:
    """What a rank costs among ``large``, as a multiple of what it costs among ``small``, by phase; 1 is linear.

    The part that is the same for any number of ranks makes small groups look dear: take two sizes where it is small.
    """
    return {phase: (medians[large][phase] / large) / (medians[small][phase] / small) for phase in PHASES}


def main() -> int:
    parser = argparse.ArgumentParser(description="What a run costs its controller, by number of ranks.")
    parser.add_argument("--ranks", default="10,100,1000,10000", help="comma-separated, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers, each round's included, as JSON")
    options = parser.parse_args()
    logging.getLogger("leyden").setLevel(logging.ERROR)
    sizes = sorted(int(size) for size in options.ranks.split(","))
    rounds: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for number in range(options.rounds):
        for size in sizes:
            progress(f"round {number + 1} of {options.rounds}: {size} ranks")
            rounds[size].append(measure(size))
    medians = {
        size: {phase: statistics.median(each[phase] for each in rounds[size]) for phase in PHASES} for size in sizes
    }
    rows = [[f"{size:,}", *(f"{1000 * medians[size][phase]:.1f}" for phase in PHASES)] for size in sizes]
    say("Milliseconds of the controller, median of " + f"{options.rounds} rounds:\n")
    say(table(["ranks", *PHASES], rows))
    say("\n" + "\n".join(f"{phase}: {meaning}" for phase, meaning in PHASES.items()))
    payload: dict[str, Any] = {"machine": machine(), "rounds": rounds, "medians": medians}
    linear = True
    if len(sizes) > 1:
        found = growth(sizes[-2], sizes[-1], medians)
        payload["growth"] = found
        linear = all(each <= TOLERANCE for each in found.values())
        cost = ", ".join(f"{phase} x{each:.2f}" for phase, each in found.items())
        say(f"\nCost per rank at {sizes[-1]:,} ranks, against {sizes[-2]:,}: {cost}")
        say(f"Grows no faster than linearly (x{TOLERANCE} allowed for noise): {'yes' if linear else 'NO'}")
    say("\n" + describe(payload["machine"]))
    write_json(options.json, payload)
    return 0 if linear else 1


if __name__ == "__main__":
    sys.exit(main())
