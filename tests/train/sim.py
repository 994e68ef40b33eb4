"""A run with simulated ranks and a run folder in memory, for tests of the controller."""

from collections import Counter

from leyden.train.controller import Controller
from leyden.train.failure import Budgets
from leyden.train.fake import EPOCH, FakeGroup, SimulatedTime, make_nodes
from leyden.train.plans import RunSpec
from leyden.train.scaling import Workers


class MemoryJournal:
    """What `ports.Journal` asks for, kept in lists."""

    def __init__(self, time=None, records=(), attempts=0):
        self.time = time or SimulatedTime()
        self.records = list(records)
        self.events = []
        self.reports = []
        self.statuses = []
        self.sweeps = 0
        self.attempts = attempts

    def latest(self):
        return self.records[-1] if self.records else None

    def next_attempt(self):
        return self.attempts

    def event(self, name, **fields):
        self.events.append({"event": name, "at": self.time.now, **fields})

    def metrics(self, message):
        self.reports.append(message)

    def commit(self, record):
        self.records.append(record)

    def sweep(self):
        self.sweeps += 1

    def status(self, status):
        self.statuses.append(status)

    def named(self, name):
        return [event for event in self.events if event["event"] == name]

    @property
    def states(self):
        moves = self.named("state")
        return [moves[0]["was"], *(move["to"] for move in moves)] if moves else []


class Run:
    """A controller with a `FakeGroup` of ``nodes`` times ``ranks`` places, and what came of it."""

    def __init__(
        self,
        script,
        nodes=2,
        ranks=2,
        *,
        workers=None,
        budgets=None,
        observer=None,
        journal=None,
        group=None,
        settings=None,
        **options,
    ):
        self.time = SimulatedTime()
        self.group = group or FakeGroup(make_nodes(nodes, ranks), script, self.time, **options)
        self.time = self.group.time
        self.journal = journal or MemoryJournal()
        self.journal.time = self.time
        self.output = []
        count = nodes * ranks
        spec = RunSpec(
            name="run",
            url="/runs/run",
            workers=workers or Workers(count, count),
            budgets=budgets or Budgets(),
            **(settings or {}),
        )
        self.controller = Controller(spec, self.group, self.journal, observer, self.time.clock, self.output.append)

    def run(self):
        self.controller.run()
        return self

    def until(self, condition, ticks=1000):
        """Ticks until ``condition()`` holds."""
        for _ in range(ticks):
            if condition():
                return self
            self.controller.tick()
        raise AssertionError(f"not reached in {ticks} ticks; {self.journal.events[-5:]}")

    @property
    def error(self):
        return self.controller.error

    @property
    def states(self):
        return self.journal.states

    @property
    def folders(self):
        return [record.folder for record in self.journal.records]

    def counts(self):
        """Reports by attempt and rank."""
        return Counter((each.attempt, each.rank) for each in self.journal.reports)


def wall(seconds):
    return EPOCH + seconds
