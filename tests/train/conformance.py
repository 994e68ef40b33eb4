"""What every `WorkerGroup` must do, as one suite: a subclass of `GroupSuite` for each of them, in `test_conformance`.

A test is a script (see `leyden.train.fake`). A simulated group plays it itself; a real one runs `perform(script)`, a
training function that does in a process what the script says. Controller, ledger and storage are the real ones.
"""

import builtins
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from leyden.train.controller import Controller
from leyden.train.failure import Budgets, Kind, WorkerGroupError
from leyden.train.fake import Barrier, Die, FakeGroup, Hang, LoseNode, Raise, Report, Return, SimulatedTime, Work
from leyden.train.fake import make_nodes as fake_nodes
from leyden.train.ledger import Ledger
from leyden.train.payload import load_value, pack_payload
from leyden.train.plans import RunSpec
from leyden.train.ports import Clock
from leyden.train.scaling import Workers
from leyden.train.states import State
from leyden.train.storage import Storage

HANG_S = 1.5


def perform(script, pids):
    """The training function that does what ``script`` says; each rank leaves its process id in the folder ``pids``."""

    def train():
        from leyden.train import session

        plan = session.current().plan
        Path(pids, f"{plan.attempt}-{plan.rank}").write_text(str(os.getpid()))
        for step in script(plan):
            if isinstance(step, Return):
                return step.value
            _do(step)
        return None

    return train


def _do(step):
    if isinstance(step, Work):
        time.sleep(step.seconds)
    elif isinstance(step, Report):
        _report(step)
    elif isinstance(step, Barrier):
        import torch.distributed as dist

        dist.barrier()
    elif isinstance(step, Raise):
        raise getattr(builtins, step.type)(step.text)
    elif isinstance(step, Die):
        os._exit(step.exit_code) if step.exit_code >= 0 else os.kill(os.getpid(), -step.exit_code)
        time.sleep(60)
    elif isinstance(step, LoseNode):
        os.kill(_parent(os.getppid()), 9)  # rank <- warm process <- agent
        time.sleep(60)
    elif isinstance(step, Hang):
        time.sleep(600)


def _report(step):
    from leyden.train.artifacts import Checkpoint
    from leyden.train.context import report

    if step.files is None:
        report(step.values)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, content in step.files.items():
            Path(folder, name).write_bytes(content)
        upload = _slowly(step.upload_s) if step.upload_s else None
        report(step.values, Checkpoint(folder), checkpoint_dir_name=step.folder, checkpoint_upload_fn=upload)


def _slowly(seconds):
    def upload(checkpoint, name):
        from leyden.train import session
        from leyden.train.artifacts import Checkpoint

        time.sleep(seconds)
        target = session.current().storage.url_of(name)
        shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
        return Checkpoint(target)

    return upload


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class SimulatedRun:
    """Runs scripts in a `FakeGroup`; its time is simulated."""

    def __init__(self, folder):
        self.folder = folder
        self.time = SimulatedTime()
        self.clock = self.time.clock

    def group(self, script, nodes, ranks):
        def store(name, path, content):
            Path(self.folder, name).mkdir(parents=True, exist_ok=True)
            Path(self.folder, name, path).write_bytes(content)

        self._group = FakeGroup(fake_nodes(nodes, ranks), script, self.time, store=store, hang_s=HANG_S)
        return self._group

    def payload(self, script):
        return b""

    def survivors(self):
        return self._group.alive

    def node_comes_back(self):
        """After a `LoseNode`: a simulated node stays away until it is added."""
        for node in fake_nodes(1, 2, first=90):
            self._group.add_node(node)


class RealRun:
    """Runs scripts in real processes; ``make_group(nodes, ranks)`` gives the group."""

    def __init__(self, folder, make_group):
        self.folder = folder
        self.clock = Clock()
        self._make_group = make_group
        self._pids = Path(tempfile.mkdtemp(prefix="leyden-pids-"))

    def group(self, script, nodes, ranks):
        return self._make_group(nodes, ranks)

    def payload(self, script):
        return pack_payload(perform(script, str(self._pids)))

    def survivors(self):
        return sum(_running(int(path.read_text())) for path in self._pids.iterdir() if path.read_text())

    def node_comes_back(self):
        pass


class Outcome:
    """What a run left."""

    def __init__(self, controller, ledger, seconds, survivors):
        self.state = controller.state
        self.error = controller.error
        self.value = load_value(controller.value)
        self.records = ledger.records
        self.latest = ledger.latest()
        self.seconds = seconds
        self.survivors = survivors
        self.result = ledger.finish(self.error, self.value)
        self.rows = ledger.storage.read_lines("metrics.jsonl")
        self.events = ledger.storage.read_lines("events.jsonl")
        self.storage = ledger.storage

    def reports(self, rank, attempt=0):
        return [row["values"] for row in self.rows if (row["rank"], row["attempt"]) == (rank, attempt)]

    def moves(self):
        return [event["to"] for event in self.events if event["event"] == "state"]

    def files(self, record):
        return {path: self.storage.read(f"{record.folder}/{path}") for path in record_files(self, record)}


def record_files(outcome, record):
    return [path for path in outcome.storage.files(record.folder) if not path.startswith(".")]


class GroupSuite:
    """The tests. A subclass has a fixture ``backend``: a `SimulatedRun` or `RealRun` for a fresh folder."""

    nodes, ranks = 1, 2

    def start(self, backend, script, *, failures=0, hang=False, ranks=None, **settings):
        """A controller that is ready to tick, its group and its ledger."""
        count = ranks or self.ranks
        storage = Storage(str(backend.folder))
        ledger = Ledger.open(storage, name="run", resume="auto")
        spec = RunSpec(
            name="run",
            url=storage.url,
            payload=backend.payload(script),
            workers=Workers(count * self.nodes, count * self.nodes),
            budgets=Budgets(failures=failures),
            log_folder=storage.url_of("logs"),
            hang_timeout_s=HANG_S if hang else 0.0,
            timeout_s=60.0,
            **settings,
        )
        group = backend.group(script, self.nodes, count)
        return Controller(spec, group, ledger, None, backend.clock, lambda text: None), group, ledger

    def run(self, backend, script, **options):
        controller, _, ledger = self.start(backend, script, **options)
        before = backend.clock.monotonic()
        controller.run()
        return Outcome(controller, ledger, backend.clock.monotonic() - before, backend.survivors())

    # ---- who is who --------------------------------------------------------------------------------------------------

    def test_every_rank_knows_who_it_is(self, backend):
        def script(plan):
            yield Report({"plan": [plan.rank, plan.world_size, plan.local_rank, plan.local_world_size]})
            yield Return([plan.attempt, plan.checkpoint, plan.next_report])

        outcome = self.run(backend, script)
        assert outcome.state is State.FINISHED
        assert outcome.value == [0, None, 0]
        for rank in range(self.ranks):
            assert outcome.reports(rank) == [{"plan": [rank, self.ranks, rank, self.ranks]}]
        assert outcome.moves() == ["SCHEDULING", "RUNNING", "SHUTTING_DOWN", "FINISHED"]

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def test_metrics_of_one_rank_wait_for_no_other(self, backend):
        def script(plan):
            for step in range(200 if plan.rank == 0 else 1):
                yield Report({"step": step})

        outcome = self.run(backend, script)
        assert [values["step"] for values in outcome.reports(0)] == list(range(200))
        assert outcome.reports(1) == [{"step": 0}]
        assert outcome.result.metrics == {"step": 199}

    @pytest.mark.parametrize("step", [Die(-9), Die(7), Raise("ValueError", "x")])
    def test_metrics_sent_just_before_the_end_are_kept(self, backend, step):
        def script(plan):
            for number in range(100):
                yield Report({"step": number})
            if plan.rank == 1:
                yield step

        outcome = self.run(backend, script)
        assert outcome.state is State.ERRORED
        assert len(outcome.reports(1)) == 100
        assert outcome.result.metrics is not None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
    def test_a_checkpoint_has_the_files_of_the_ranks_that_gave_some(self, backend, who):
        def script(plan):
            own = {f"rank-{plan.rank}": b"state of %d" % plan.rank}
            yield Report({"loss": plan.rank}, own if plan.rank in who else None)

        outcome = self.run(backend, script)
        (record,) = outcome.records
        assert (record.folder, record.index, record.world_size) == ("checkpoint_000000", 0, self.ranks)
        assert outcome.files(record) == {f"rank-{rank}": b"state of %d" % rank for rank in who}
        assert record.metrics == {"loss": 0}

    def test_several_checkpoints_and_a_folder_of_ones_own(self, backend):
        def script(plan):
            yield Report({"n": 0}, {f"{plan.rank}": b"a"})
            yield Report({"n": 1})
            yield Report({"n": 2}, {f"{plan.rank}": b"b"}, folder="mine")

        outcome = self.run(backend, script)
        assert [(record.index, record.folder) for record in outcome.records] == [(0, "checkpoint_000000"), (2, "mine")]
        assert outcome.latest.folder == "mine"

    def test_a_checkpoint_that_lacks_a_part_is_never_committed(self, backend):
        def script(plan):
            yield Report({}, {f"{plan.rank}": b"a"})
            if plan.rank == 1:
                yield Die(-9)
            yield Report({}, {f"{plan.rank}": b"b"})
            yield Barrier()

        outcome = self.run(backend, script)
        assert [record.folder for record in outcome.records] == ["checkpoint_000000"]

    def test_a_checkpoint_reported_just_before_a_crash_is_kept(self, backend):
        def script(plan):
            if plan.checkpoint is None:
                yield Report({}, {f"{plan.rank}": b"a"}, upload_s=0.5 * plan.rank)
                yield Raise("ValueError", "late") if plan.rank == 0 else Work(60.0)
            yield Return(plan.checkpoint)

        outcome = self.run(backend, script, failures=1)
        assert outcome.value == "checkpoint_000000"
        assert outcome.seconds < 20

    # ---- failures ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("step", "kind", "words"),
        [
            (Raise("ValueError", "bad batch"), Kind.ERROR, "ValueError: bad batch"),
            (Die(-9), Kind.EXIT, "killed by SIGKILL"),
            (Die(3), Kind.EXIT, "exit code 3"),
            (Die(0), Kind.EXIT, "before the training function returned"),
        ],
    )
    def test_one_rank_fails_while_the_others_sit_in_a_collective(self, backend, step, kind, words):
        def script(plan):
            yield Report({"here": True})
            yield step if plan.rank == 1 else Barrier()

        outcome = self.run(backend, script)
        assert isinstance(outcome.error, WorkerGroupError)
        first = str(outcome.error).splitlines()[0]
        assert first.startswith(f"Rank 1 of {self.ranks}")
        assert words in first
        rank, error = next(iter(outcome.error.worker_failures.items()))
        assert (rank, error.kind) == (1, kind)
        assert outcome.survivors == 0
        assert outcome.seconds < 20
        assert outcome.moves()[-2:] == ["SHUTTING_DOWN", "ERRORED"]

    def test_an_error_comes_with_its_traceback_and_type(self, backend):
        def script(plan):
            yield Raise("KeyError", "missing") if plan.rank == 1 else Work(60.0)

        error = self.run(backend, script).error
        assert isinstance(error.worker_failures[1], KeyError)
        assert "Traceback (most recent call last)" in str(error)
        assert "Traceback of rank 1" in str(error)

    def test_a_restart_goes_on_from_the_last_commit(self, backend):
        def script(plan):
            start = 0 if plan.checkpoint is None else int(plan.checkpoint[-6:]) + 1
            for epoch in range(start, 4):
                yield Report({"epoch": epoch}, {f"{plan.rank}": b"%d" % epoch})
                yield Barrier()
                if (epoch, plan.attempt, plan.rank) == (1, 0, 1):
                    yield Die(-9)
                yield Barrier()
            yield Return([plan.attempt, plan.checkpoint, plan.next_report])

        outcome = self.run(backend, script, failures=1)
        assert outcome.state is State.FINISHED
        assert outcome.value == [1, "checkpoint_000001", 2]
        assert [record.index for record in outcome.records] == [0, 1, 2, 3]
        assert outcome.moves().count("RESTARTING") == 1
        assert [row["epoch"] for row in outcome.result.metrics_history] == [0, 1, 2, 3]

    def test_the_budget_ends(self, backend):
        def script(plan):
            yield Raise("ValueError", f"attempt {plan.attempt}") if plan.rank == 0 else Barrier()

        outcome = self.run(backend, script, failures=2)
        assert outcome.state is State.ERRORED
        assert "attempt 2" in str(outcome.error).splitlines()[0]
        assert outcome.moves().count("RESTARTING") == 2

    def test_a_hang_is_found(self, backend):
        def script(plan):
            yield Report({})
            yield Hang() if plan.rank == 1 else Return(1)

        outcome = self.run(backend, script, hang=True)
        assert "no progress for" in str(outcome.error).splitlines()[0]
        assert "Stack of rank 1" in str(outcome.error)
        assert outcome.survivors == 0

    def test_a_lost_node_is_a_failure_like_others(self, backend):
        def script(plan):
            yield Report({}, {f"{plan.rank}": b"a"})
            yield Barrier()
            if plan.attempt == 0:
                yield Work(0.5)  # for the commit
                yield LoseNode() if plan.rank == 0 else Work(60.0)
            yield Return(plan.checkpoint)

        controller, _, ledger = self.start(backend, script, failures=1)
        before = backend.clock.monotonic()
        while controller.state not in (State.RESTARTING, State.FINISHED, State.ERRORED):
            controller.tick()
        backend.node_comes_back()
        controller.run()
        outcome = Outcome(controller, ledger, backend.clock.monotonic() - before, backend.survivors())
        assert outcome.state is State.FINISHED, outcome.error
        assert outcome.value == "checkpoint_000000"
        assert any("is gone" in event.get("what", "") for event in outcome.events)
        assert outcome.survivors == 0

    # ---- ends --------------------------------------------------------------------------------------------------------

    def test_abort_leaves_nothing_behind(self, backend):
        def script(plan):
            yield Report({"here": True}, {f"{plan.rank}": b"a"})
            yield Work(600.0)

        controller, group, ledger = self.start(backend, script)
        while not ledger.records:
            controller.tick()
        before = backend.clock.monotonic()
        controller.abort("test")
        assert backend.clock.monotonic() - before < 5
        assert controller.state is State.ABORTED
        group.release()  # may be called twice
        assert backend.survivors() == 0
        assert ledger.run["status"] == "aborted"
        assert ledger.finish().metrics == {"here": True}

    def test_a_run_goes_on_where_an_aborted_one_stopped(self, backend):
        def script(plan):
            if plan.checkpoint is None:
                yield Report({"part": 1}, {f"{plan.rank}": b"a"})
                yield Work(600.0)
            yield Report({"part": 2})
            yield Return([plan.attempt, plan.checkpoint, plan.next_report])

        controller, _, ledger = self.start(backend, script)
        while not ledger.records:
            controller.tick()
        controller.abort("test")
        ledger.finish()
        outcome = self.run(backend, script)
        assert outcome.value == [1, "checkpoint_000000", 1]
        assert [row["part"] for row in outcome.result.metrics_history] == [1, 2]
