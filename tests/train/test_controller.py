"""The controller's states, with simulated ranks: everything here takes milliseconds."""

import pickle
import signal
from itertools import pairwise

import pytest
from sim import MemoryJournal, Run

from leyden.train.failure import Budgets, ControllerError, Kind, PlacementError, WorkerGroupError
from leyden.train.fake import Barrier, Die, FakeGroup, Hang, LoseNode, Raise, Report, Return, Work, make_nodes
from leyden.train.groups import Event
from leyden.train.messages import Metrics, Output, StopRanks
from leyden.train.records import Record
from leyden.train.scaling import Workers
from leyden.train.states import ENDED, NEXT, State, check_move

GOOD = ["INIT", "SCHEDULING", "RUNNING", "SHUTTING_DOWN", "FINISHED"]
RESTART = ["RESTARTING", "SCHEDULING", "RUNNING"]
FAILED = ["SHUTTING_DOWN", "ERRORED"]


def epochs(count, crash=None, folder=None, upload_s=0.0):
    """``count`` epochs that report a checkpoint of all ranks; ``crash(plan, epoch)`` gives a step to fail with."""

    def script(plan):
        start = 0 if plan.checkpoint is None else int(plan.checkpoint[-6:]) + 1
        for epoch in range(start, count):
            yield Work(1.0)
            yield Report({"epoch": epoch}, {f"{plan.rank}.pt": b"state"}, folder, upload_s)
            step = crash(plan, epoch) if crash is not None else None
            if step is not None:
                yield step
            yield Barrier()
        yield Return(plan.attempt)

    return script


def crash_at(epoch, rank=1, attempts=(0,), step=Die(-9)):
    return lambda plan, at: step if (at, plan.rank) == (epoch, rank) and plan.attempt in attempts else None


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_state_is_in_the_table_and_only_ended_ones_lead_nowhere():
    assert set(NEXT) == set(State)
    assert {state for state, following in NEXT.items() if not following} == ENDED
    for state in set(State) - ENDED - {State.SHUTTING_DOWN}:
        assert State.SHUTTING_DOWN in NEXT[state], f"a run must be able to end from {state}"


def test_a_move_that_is_not_in_the_table_is_a_bug():
    check_move(State.RUNNING, State.RESTARTING)
    with pytest.raises(AssertionError, match="FINISHED -> RUNNING is no transition; from FINISHED: none"):
        check_move(State.FINISHED, State.RUNNING)


# ---- runs that go well -----------------------------------------------------------------------------------------------


def test_a_run_from_start_to_end():
    run = Run(epochs(3)).run()
    assert run.states == GOOD
    assert run.error is None
    assert run.folders == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000002"]
    assert set(run.counts().values()) == {3}
    assert pickle.loads(run.controller.value) == 0
    assert run.journal.statuses == ["running", "finished"]
    assert (run.group.alive, run.group.released > 0) == (0, True)


def test_every_move_is_one_event_with_its_reason():
    run = Run(epochs(1, crash_at(0)), budgets=Budgets(failures=1)).run()
    moves = run.journal.named("state")
    assert all(move["why"] for move in moves[:-1])
    assert all(before["to"] == after["was"] for before, after in pairwise(moves))
    assert {State(move["to"]) in NEXT[State(move["was"])] for move in moves} == {True}


def test_a_commit_holds_the_parts_of_all_ranks_and_the_metrics_of_rank_zero():
    def script(plan):
        yield Report({"loss": plan.rank}, {f"{plan.rank}.pt": b"x" * plan.rank})

    (record,) = Run(script).run().journal.records
    assert record.parts == {rank: {f"{rank}.pt": rank} for rank in range(4)}
    assert (record.metrics, record.index, record.world_size, record.attempt) == ({"loss": 0}, 0, 4, 0)


@pytest.mark.parametrize("who", [{0}, {2}, {1, 3}])
def test_a_checkpoint_of_some_ranks(who):
    def script(plan):
        yield Work(plan.rank)
        yield Report({"from": plan.rank}, {"f": b""} if plan.rank in who else None)

    (record,) = Run(script).run().journal.records
    assert set(record.parts) == who
    assert record.metrics == {"from": 0}


def test_a_checkpoint_is_committed_when_the_last_part_is_there_and_not_before():
    def script(plan):
        yield Report({}, {"f": b""}, upload_s=10.0 if plan.rank == 3 else 0.0)
        yield Work(100.0)

    run = Run(script).run()
    assert run.journal.records[0].time == pytest.approx(run.group.time.clock.wall() - 100.0, abs=1.0)
    assert [message.folder for message in run.group.committed()] == ["checkpoint_000000"]


def test_metrics_need_no_other_rank():
    """Only rank 0 reports, and often; nobody waits, nothing is kept in memory for it."""

    def script(plan):
        for step in range(5000 if plan.rank == 0 else 0):
            yield Report({"step": step})
        yield Work(1.0)

    run = Run(script).run()
    assert [each.index for each in run.journal.reports] == list(range(5000))
    assert run.states == GOOD


def test_uneven_reports_are_committed_when_the_others_have_returned():
    def script(plan):
        for _ in range(3 if plan.rank == 0 else 1):
            yield Report({}, {f"{plan.rank}": b""})

    run = Run(script).run()
    assert [sorted(record.parts) for record in run.journal.records] == [[0, 1, 2, 3], [0], [0]]


def test_commits_stay_in_order():
    """Rank 1 is slow with the first checkpoint, which the second one has no part of."""

    def script(plan):
        if plan.rank == 1:
            yield Report({}, {"a": b""}, upload_s=5.0)
            yield Report({})
        else:
            yield Report({})
            yield Report({}, {"b": b""})

    assert Run(script).run().folders == ["checkpoint_000000", "checkpoint_000001"]


def test_ranks_that_lag_are_named_once():
    def script(plan):
        yield Work(200.0 if plan.rank in (1, 2) else 0.0)
        yield Report({}, {"f": b""})

    run = Run(script).run()
    assert [event["ranks"] for event in run.journal.named("lagging")] == [[1, 2]]
    assert run.states == GOOD


def test_output_of_rank_zero_is_shown():
    run = Run(epochs(1))
    run.until(lambda: run.controller.state is State.RUNNING)
    run.group._arrived.append(Event("node0", Output(0, "hello\n")))
    run.run()
    assert run.output == ["hello\n"]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_from_the_last_commit():
    run = Run(epochs(4, crash_at(1)), budgets=Budgets(failures=1)).run()
    assert run.states == [*GOOD[:3], *RESTART, *GOOD[3:]]
    assert [plan.checkpoint for plan in run.group.plans[4:]] == ["checkpoint_000001"] * 4
    assert [plan.next_report for plan in run.group.plans[4:]] == [2] * 4
    assert run.folders == [f"checkpoint_00000{number}" for number in range(4)]
    assert run.journal.sweeps == 1
    assert pickle.loads(run.controller.value) == 1


def test_reports_sent_just_before_a_crash_are_kept():
    def script(plan):
        for step in range(10):
            yield Report({"step": step})
        yield Die(-9) if plan.rank == 2 else Hang()

    run = Run(script).run()
    assert set(run.counts().values()) == {10}
    assert isinstance(run.error, WorkerGroupError)


def test_a_checkpoint_reported_just_before_a_crash_is_kept():
    """Rank 0 raises right after its part is stored; the others are given the time to store theirs."""

    def script(plan):
        if plan.attempt == 0:
            yield Report({}, {f"{plan.rank}": b""}, upload_s=3.0 * plan.rank)
            yield Raise("ValueError", "late") if plan.rank == 0 else Hang()

    run = Run(script, budgets=Budgets(failures=1)).run()
    assert run.folders == ["checkpoint_000000"]
    assert run.group.plans[-1].checkpoint == "checkpoint_000000"


def test_but_not_longer_than_the_grace_and_not_for_what_can_never_come():
    def slow(plan):
        yield Report({}, {f"{plan.rank}": b""}, upload_s=1000.0 * (plan.rank == 1))
        yield Raise("ValueError", "late") if plan.rank == 0 else Hang()

    run = Run(slow).run()
    assert run.folders == []
    assert 10 < run.time.now < 20

    def dies_in_upload(plan):
        yield Report({}, {f"{plan.rank}": b""}, upload_s=0.1) if plan.rank else Report({}, {"0": b""}, upload_s=1000.0)

    run = Run(dies_in_upload)
    run.group.at(1.0, lambda: run.group.lose_node("node0"))
    assert run.run().folders == []
    assert run.time.now < 5


def test_the_first_failure_in_time_is_named_though_another_was_heard_first():
    def script(plan):
        yield Work(1.0)
        yield Die(-9) if plan.rank == 3 else Barrier()

    run = Run(script)
    run.group.at(1.0995, lambda: run.group._raise(run.group._worlds[0].ranks[0], Raise("RuntimeError", "NCCL error")))
    error = run.run().error
    assert str(error).startswith("Rank 3 of 4 on node1 failed first: killed by SIGKILL")
    assert list(error.worker_failures) == [3, 0]


def test_survivors_are_ended_at_once_and_what_they_say_is_no_failure():
    run = Run(epochs(3, crash_at(1))).run()
    assert [type(message) for _, message in run.group.sent if isinstance(message, StopRanks)] == [StopRanks] * 2
    assert list(run.error.worker_failures) == [1]
    assert run.group.alive == 0
    assert run.time.now < 3


def test_a_rank_in_a_collective_does_not_outlive_the_others_error():
    def script(plan):
        yield Raise("ValueError", "bad batch") if plan.rank == 2 else Barrier()

    run = Run(script).run()
    assert "ValueError: bad batch" in str(run.error).splitlines()[0]
    assert isinstance(run.error.worker_failures[2], ValueError)
    assert 'File "train.py"' in str(run.error)
    assert "rank 2 says" in str(run.error)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Die(-9, "out of memory"), "killed by SIGKILL (out of memory)"),
        (Die(3), "exit code 3"),
        (Die(0), "exit code 0 before the training function returned"),
        (Raise("KeyError", "'x'"), "KeyError: 'x'"),
        (LoseNode(), "node node0 is gone"),
        (Hang(), "no progress for 30 s"),
    ],
)
def test_every_way_to_fail_is_told_apart(step, words):
    run = Run(epochs(2, crash_at(0, step=step)), hang_s=30.0).run()
    assert words in str(run.error).splitlines()[0]
    assert run.states == [*GOOD[:3], *FAILED]
    assert run.journal.statuses[-1] == "errored"


def test_a_hang_shows_the_stack():
    run = Run(epochs(2, crash_at(0, step=Hang())), hang_s=30.0).run()
    assert 'Stack of rank 1:\n  File "train.py", line 7 in wait' in str(run.error)
    assert run.error.worker_failures[1].kind is Kind.HANG


def test_the_budget_is_spent_and_then_the_last_failure_raised():
    run = Run(epochs(9, lambda plan, epoch: Die(-9) if plan.rank == 0 else None), budgets=Budgets(failures=3)).run()
    assert run.states.count("RESTARTING") == 3
    assert "max_failures=3, and this was failure 4" in str(run.error)
    assert run.folders == [f"checkpoint_00000{number}" for number in range(4)]


def test_a_crash_after_returning_changes_nothing():
    def script(plan):
        yield Work(1.0)
        yield Return(7)

    run = Run(script)
    run.group.at(1.1005, lambda: run.group._end(run.group._worlds[0].ranks[1], -11, ""))
    assert run.run().states == GOOD


def test_messages_of_earlier_attempts_are_of_no_interest():
    run = Run(epochs(3, crash_at(1)), budgets=Budgets(failures=1))
    run.until(lambda: run.controller.state is State.RUNNING and run.controller._number == 1)
    before = len(run.journal.reports)
    run.group._arrived.append(Event("node0", Metrics(0, 0, 99, {}, False, 0.0)))
    run.controller.tick()
    assert all(each.index != 99 for each in run.journal.reports[before:])


def test_a_stuck_rank_is_given_up():
    class Stuck(FakeGroup):
        def send(self, node, message):
            if not isinstance(message, StopRanks) or node != "node1":
                super().send(node, message)

    run = Run(None, group=Stuck(make_nodes(2, 2), epochs(3, crash_at(1))), budgets=Budgets(failures=1)).run()
    assert run.states == [*GOOD[:3], *RESTART, *GOOD[3:]]


# ---- starts ----------------------------------------------------------------------------------------------------------


def test_start_failures_back_off_and_end():
    run = Run(epochs(1), at_start=lambda plan: Die(1) if plan.rank == 2 else None).run()
    starts = [event["at"] for event in run.journal.named("start")]
    assert [round(after - before) for before, after in pairwise(starts)] == [1, 2, 4]
    assert run.states == ["INIT", "SCHEDULING", *["RESTARTING", "SCHEDULING"] * 3, *FAILED]
    assert str(run.error).startswith("Rank 2 of 4 on node1 failed while starting")
    assert "controller_failure_limit=3" in str(run.error)


def test_a_start_that_succeeds_clears_the_count():
    def at_start(plan):
        return Die(1) if plan.rank == 0 and plan.attempt in (0, 1, 3, 4) else None

    script = epochs(2, crash_at(0, attempts=(2,)))
    budgets = Budgets(failures=1, starts=2)
    run = Run(script, at_start=at_start, budgets=budgets).run()
    assert run.error is None
    assert run.states.count("RESTARTING") == 5


def test_each_attempt_meets_at_another_port():
    run = Run(epochs(1), at_start=lambda plan: Die(1) if plan.attempt == 0 else None).run()
    assert [plan.master_port for plan in run.group.plans] == [29500] * 4 + [29501] * 4


def test_a_start_that_takes_too_long_names_who_is_missing():
    run = Run(epochs(1), at_start=lambda plan: Hang() if plan.rank in (1, 3) else None, budgets=Budgets(starts=0)).run()
    assert "Rank 1 of 4 on node0 failed first while starting: not ready 600 s after its start" in str(run.error)
    assert set(run.error.worker_failures) == {1, 3}


def test_an_impossible_request_ends_at_once():
    run = Run(epochs(1), workers=Workers(9, 9), promised=2).run()
    assert isinstance(run.error, ControllerError)
    assert isinstance(run.error.controller_failure, PlacementError)
    assert "num_workers=9 can never fit here: 5 more places; 4 are here, on 2 nodes, and 2 more can come" in str(
        run.error
    )
    assert run.time.now < 5
    assert run.states == ["INIT", "SCHEDULING", *FAILED]


def test_a_possible_request_waits_and_says_for_what():
    run = Run(epochs(1), workers=Workers(6, 6), promised=2)
    run.group.at(500.0, lambda: run.group.add_node(make_nodes(1, 2, first=2)[0]))
    assert run.run().states == GOOD
    (waiting,) = run.journal.named("waiting")
    assert waiting["why"].startswith("4 of 6 workers have a place; waiting for 2 more places")
    assert run.journal.named("start")[0]["at"] == pytest.approx(500, abs=2)


def test_waiting_may_have_a_limit():
    run = Run(epochs(1), workers=Workers(6, 6), promised=2, settings={"place_timeout_s": 60.0}).run()
    assert "after 60 s: 4 of 6 workers have a place" in str(run.error)
    assert run.group.released


# ---- elastic ---------------------------------------------------------------------------------------------------------


def elastic(**more):
    return {"workers": Workers(1, 8), "budgets": Budgets(failures=0, elastic=True, **more)}


def test_a_lost_node_shrinks_the_group():
    run = Run(epochs(6), nodes=3, **elastic())
    run.group.at(2.5, lambda: run.group.lose_node("node1"))
    run.run()
    assert run.states == [*GOOD[:3], "RESIZING", "SCHEDULING", "RUNNING", *GOOD[3:]]
    assert [event["world"] for event in run.journal.named("start")] == [6, 4]
    assert run.journal.named("start")[1]["checkpoint"] == "checkpoint_000001"
    assert {plan.rank: plan.node_rank for plan in run.group.plans[6:]} == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_new_node_grows_the_group_at_a_commit():
    run = Run(epochs(200), nodes=2, **elastic())
    run.group.at(30.0, lambda: run.group.add_node(make_nodes(1, 2, first=2)[0]))
    run.run()
    assert run.states == [*GOOD[:3], "RESIZING", "SCHEDULING", "RUNNING", *GOOD[3:]]
    first, second = run.journal.named("start")
    assert (first["world"], second["world"]) == (4, 6)
    assert 60 < second["at"] < 65
    assert len(run.folders) == 200, "no work was done twice, and none was lost"
    assert sum(run.counts().values()) == 200 * 4 + (200 - int(second["checkpoint"][-6:]) - 1) * 2


def test_growth_waits_for_a_commit_and_stops_at_the_most():
    def script(plan):
        yield Work(500.0)

    run = Run(script, nodes=2, **elastic())
    run.group.at(30.0, lambda: run.group.add_node(make_nodes(1, 2, first=2)[0]))
    assert run.run().states == GOOD
    assert len(run.journal.named("grow")) == 1

    run = Run(epochs(100), nodes=4, **elastic())
    run.group.at(30.0, lambda: run.group.add_node(make_nodes(1, 2, first=9)[0]))
    assert run.run().states == GOOD


def test_fewer_than_the_least_waits():
    run = Run(epochs(4), nodes=2, workers=Workers(3, 4), budgets=Budgets(elastic=True), promised=2)
    run.group.at(1.5, lambda: run.group.lose_node("node0"))
    run.group.at(100.0, lambda: run.group.add_node(make_nodes(1, 2, first=5)[0]))
    run.run()
    assert run.error is None
    assert [round(event["at"]) for event in run.journal.named("start")] == [0, 100]


def test_a_user_error_in_an_elastic_group_is_the_users():
    run = Run(epochs(4, crash_at(1, step=Raise("ValueError", "x"))), **elastic()).run()
    assert isinstance(run.error, WorkerGroupError)
    run = Run(epochs(6), nodes=3, **elastic(nodes=0))
    run.group.at(2.5, lambda: run.group.lose_node("node1"))
    assert "max_preemption_failures=0" in str(run.run().error)


# ---- callbacks and errors of our own ---------------------------------------------------------------------------------


class Watcher:
    def __init__(self, fail=None):
        self.wants_rounds = True
        self.reports = []
        self.exceptions = []
        self.fail = fail

    def after_report(self, metrics, folder):
        self.reports.append((metrics, folder))
        if self.fail == "report":
            raise ValueError("my callback")

    def after_exception(self, exceptions):
        self.exceptions.append(exceptions)
        if self.fail == "exception":
            raise ValueError("my callback")


def test_callbacks_get_the_reports_of_all_ranks():
    def script(plan):
        yield Report({"loss": plan.rank})
        yield Report({"loss": plan.rank + 10}, {"f": b""} if plan.rank == 0 else None)
        if plan.rank == 1:
            yield Report({"extra": True})

    watcher = Watcher()
    Run(script, observer=watcher).run()
    assert watcher.reports == [
        ([{"loss": rank} for rank in range(4)], None),
        ([{"loss": rank + 10} for rank in range(4)], "checkpoint_000001"),
        ([{}, {"extra": True}, {}, {}], None),
    ]


def test_reports_of_one_rank_reach_callbacks_without_piling_up():
    def script(plan):
        for step in range(3000 if plan.rank == 0 else 0):
            yield Report({"step": step})
        yield Work(1.0)

    watcher = Watcher()
    Run(script, observer=watcher).run()
    assert [metrics[0]["step"] for metrics, _ in watcher.reports] == list(range(3000))


def test_callbacks_hear_of_failures_that_are_retried_too():
    watcher = Watcher()
    run = Run(epochs(3, crash_at(1, attempts=(0, 1))), observer=watcher, budgets=Budgets(failures=2)).run()
    assert [list(each) for each in watcher.exceptions] == [[1]]
    assert run.error is None


@pytest.mark.parametrize("where", ["report", "exception"])
def test_a_callback_that_raises_ends_the_run(where):
    run = Run(epochs(3, crash_at(1)), observer=Watcher(where), budgets=Budgets(failures=5)).run()
    assert isinstance(run.error, ControllerError)
    assert isinstance(run.error.controller_failure, ValueError)
    assert run.states[-1] == "ERRORED"
    assert run.group.alive == 0


def test_storage_that_fails_ends_the_run():
    class Full(MemoryJournal):
        def commit(self, record):
            if record.index == 1:
                raise OSError(28, "No space left on device")
            super().commit(record)

    run = Run(epochs(3), journal=Full()).run()
    assert isinstance(run.error.controller_failure, OSError)
    assert run.folders[0] == "checkpoint_000000"
    assert "checkpoint_000001" not in run.folders
    assert run.group.alive == 0
    assert run.journal.statuses[-1] == "errored"


def test_ranks_that_disagree_on_the_folder():
    def script(plan):
        yield Report({}, {"f": b""}, folder=f"mine-{plan.rank}")

    error = str(Run(script, nodes=1).run().error)
    assert "pass the same checkpoint_dir_name on every rank" in error
    assert "'mine-1'" in error


# ---- ends from outside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.INIT, State.SCHEDULING, State.RUNNING, State.RESTARTING])
def test_abort_from_any_state(state):
    run = Run(epochs(50, crash_at(1)), budgets=Budgets(failures=1))
    run.until(lambda: run.controller.state is state)
    at = run.time.now
    run.controller.abort("test")
    assert run.states[-2:] == ["SHUTTING_DOWN", "ABORTED"]
    assert run.group.alive == 0
    assert run.time.now - at <= 5
    assert run.journal.statuses[-1] == "aborted"


def test_ctrl_c_aborts_and_is_raised_again():
    class Interrupted(FakeGroup):
        def poll(self, timeout):
            if self.time.now > 5 and not self.released:
                self.released += 1
                raise KeyboardInterrupt
            return super().poll(timeout)

    run = Run(None, group=Interrupted(make_nodes(2, 2), epochs(50)))
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.states[-1] == "ABORTED"
    assert run.folders[0] == "checkpoint_000000"
    assert run.group.alive == 0


def test_the_first_ctrl_c_waits_for_the_end_of_a_tick():
    """A commit that is being written is written to its end."""

    class Slow(MemoryJournal):
        def commit(self, record):
            signal.raise_signal(signal.SIGINT)
            super().commit(record)

    run = Run(epochs(50), journal=Slow())
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.folders == ["checkpoint_000000"]
    assert run.states[-1] == "ABORTED"
    assert run.error is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_ends_it_at_once():
    class Stuck(MemoryJournal):
        def commit(self, record):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("went on after the second")

    run = Run(epochs(50), journal=Stuck())
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.states[-1] == "ABORTED"
    assert run.group.alive == 0


def test_a_run_goes_on_where_an_earlier_driver_left_it():
    before = Run(epochs(10))
    before.until(lambda: len(before.folders) == 3)
    journal = MemoryJournal(records=before.journal.records, attempts=1)
    run = Run(epochs(10), journal=journal).run()
    assert {(plan.checkpoint, plan.next_report, plan.attempt) for plan in run.group.plans} == {
        ("checkpoint_000002", 3, 1)
    }
    assert run.folders[-1] == "checkpoint_000009"
    assert isinstance(run.journal.latest(), Record)


# ---- size ------------------------------------------------------------------------------------------------------------


def test_a_thousand_and_one_ranks():
    """Ray Train's barrier stops at a thousand."""
    run = Run(epochs(2, crash_at(0, rank=1000)), nodes=143, ranks=7, budgets=Budgets(failures=1)).run()
    assert run.error is None
    assert len(run.journal.records[0].parts) == 1001
    assert sum(run.counts().values()) == 2002


@pytest.mark.slow
def test_ten_thousand_ranks():
    run = Run(epochs(2, crash_at(0, rank=5000)), nodes=1250, ranks=8, budgets=Budgets(failures=1)).run()
    assert run.error is None
    assert len(run.journal.records[1].parts) == 10_000
    assert len(run.group.plans) == 20_000
