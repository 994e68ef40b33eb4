"""What follows a failure, which one is named, and what the error says."""

import pickle

import pytest

from leyden.train.failure import (
    Action,
    Budgets,
    ControllerError,
    Failure,
    Kind,
    PlacementError,
    Spent,
    TrainingFailedError,
    WorkerError,
    WorkerGroupError,
    as_exceptions,
    decide,
    in_order,
    is_collateral,
)
from leyden.train.failure_text import advice, describe, exit_text, headline, ranks_text

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:%d"


def error(rank, time, kind="ValueError", text="bad batch", **more):
    return Failure(rank, Kind.ERROR, time, type=kind, text=text, **more)


def gloo(rank, time):
    return error(rank, time, "RuntimeError", GLOO % (30000 + rank))


def died(rank, time, exit_code=-9, **more):
    return Failure(rank, Kind.EXIT, time, text=exit_text(exit_code, ""), exit_code=exit_code, **more)


def lost(rank, time=1.0, **more):
    return Failure(rank, Kind.NODE, time, text="node n0 is gone", node="n0", **more)


# ---- which one came first --------------------------------------------------------------------------------------------


def test_the_earliest_in_time_is_first_however_they_arrived():
    assert [each.rank for each in in_order([error(2, 3.0), error(0, 1.0), error(1, 2.0)])] == [0, 1, 2]


def test_errors_of_collectives_come_after_all_others():
    """The clocks of two nodes differ by more than gloo takes to notice that its peer is gone."""
    assert [each.rank for each in in_order([gloo(0, 1.0), gloo(2, 1.1), died(1, 1.2)])] == [1, 0, 2]


def test_a_rank_counts_once():
    assert in_order([died(1, 2.0), error(1, 1.0)]) == [error(1, 1.0)]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (gloo(0, 1.0), True),
        (error(0, 1.0, "DistBackendError", "NCCL error in: ...:1234, remote process exited"), True),
        (error(0, 1.0, "torch.distributed.DistNetworkError", "timed out"), True),
        (error(0, 1.0, "ConnectionResetError", "[Errno 104] Connection reset by peer"), True),
        (error(0, 1.0), False),
        (error(0, 1.0, "ValueError", "the peer review failed"), False),
        (error(0, 1.0, "RuntimeError", "mat1 and mat2 shapes cannot be multiplied"), False),
        (died(0, 1.0), False),
    ],
)
def test_is_collateral(failure, expected):
    assert is_collateral(failure) is expected


# ---- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [error(0, 1.0), died(0, 1.0), Failure(0, Kind.HANG, 1.0), lost(0)])
def test_failures_of_running_ranks_are_charged_to_max_failures(kind):
    budgets = Budgets(failures=1, starts=0)
    first = decide([kind], Spent(), budgets)
    assert (first.action, first.budget, first.delay_s, first.spent) == (Action.RETRY, "failures", 0.0, Spent(1, 0, 0))
    second = decide([kind], first.spent, budgets)
    assert (second.action, second.why) == (Action.RAISE, "max_failures=1, and this was failure 2")


def test_no_failure_is_allowed_by_default():
    assert decide([error(0, 1.0)], Spent(), Budgets()).action is Action.RAISE


def test_any_number():
    decision = decide([error(0, 1.0)], Spent(failures=1000), Budgets(failures=-1))
    assert (decision.action, decision.why) == (Action.RETRY, "failure 1001 of any number")


def test_start_failures_have_a_budget_of_their_own_and_wait_longer_each_time():
    spent, delays = Spent(failures=5), []
    for _ in range(3):
        decision = decide([died(0, 1.0, ready=False)], spent, Budgets(failures=0, starts=3))
        assert (decision.action, decision.budget) == (Action.RETRY, "starts")
        spent, delays = decision.spent, [*delays, decision.delay_s]
    assert delays == [1.0, 2.0, 4.0]
    assert decide([died(0, 1.0, ready=False)], spent, Budgets(failures=0, starts=3)).action is Action.RAISE
    assert spent.failures == 5
    assert decide([died(0, 1.0, ready=False)], Spent(starts=50), Budgets(starts=-1)).delay_s == 30.0


def test_a_start_that_can_never_work_is_not_tried_again():
    decision = decide([error(0, 1.0, "ModuleNotFoundError", "No module named 'x'", ready=False)], Spent(), Budgets())
    assert decision.action is Action.RAISE
    assert "ModuleNotFoundError" in decision.why


def test_a_lost_node_is_charged_to_its_own_budget_where_the_group_can_shrink():
    elastic = Budgets(failures=0, nodes=1, elastic=True)
    first = decide([lost(0), lost(1), gloo(2, 0.5)], Spent(), elastic)
    assert (first.action, first.budget) == (Action.RETRY, "nodes")
    assert decide([lost(0)], first.spent, elastic).action is Action.RAISE
    assert decide([error(2, 0.5), lost(0)], Spent(), elastic).budget == "failures"
    assert decide([lost(0)], Spent(), Budgets(failures=0)).action is Action.RAISE


# ---- the text --------------------------------------------------------------------------------------------------------


def failures():
    cause = error(3, 1.0, traceback="Traceback:\n  line 7\nValueError: bad batch", log_tail=("epoch 1", "loss nan"))
    return in_order([gloo(0, 1.1), cause, gloo(1, 1.2), gloo(2, 1.3), died(4, 1.4, -11)])


def text_of(found, **more):
    options = {"why": "max_failures=0, and this was failure 1", "budget": "failures", "log_place": "/runs/a/logs"}
    return describe(found, 5, **{**options, "checkpoint": "/runs/a/checkpoint_000002", **more})


def test_the_first_line_names_the_cause():
    assert text_of(failures()).splitlines()[0] == "Rank 3 of 5 failed first: ValueError: bad batch"
    starting = died(1, 1.0, ready=False, node="gpu-2")
    assert headline(starting, 2) == "Rank 1 of 2 on gpu-2 failed first while starting: killed by SIGKILL"
    assert headline(error(0, 1.0, text="line 1\nline 2"), 1) == "Rank 0 of 1 failed: ValueError: line 1 ..."


def test_traceback_log_way_out_and_places_follow():
    text = text_of(failures())
    parts = ["Traceback of rank 3:", "  line 7", "Last output of rank 3:", "  loss nan", "What to do:", "Other ranks"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert "FailureConfig(max_failures=N)" in text
    assert "resumes from /runs/a/checkpoint_000002" in text
    assert "/runs/a/logs" in text
    assert "starts from the beginning" in text_of(failures(), checkpoint=None)


def test_equal_errors_are_folded_and_echoes_come_last():
    lines = text_of(failures()).split("Other ranks")[1].splitlines()
    assert lines[1] == "  rank 4: killed by SIGSEGV"
    assert lines[2].startswith("  ranks 0-2: RuntimeError: [../third_party/gloo")
    assert lines[2].endswith("[follows from the first]")


def test_ten_thousand_failures_make_a_short_text():
    many = in_order([died(0, 1.0), *(gloo(rank, 2.0 + rank) for rank in range(1, 10_000))])
    assert len(describe(many, 10_000, why="x", budget="failures", log_place="y", checkpoint=None)) < 2000


def test_long_tracebacks_keep_their_ends():
    text = text_of([error(0, 1.0, traceback="begin\n" + "x" * 100_000 + "\nend")])
    assert len(text) < 12_000
    assert "begin" in text
    assert "end" in text
    assert "characters left out" in text


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (died(0, 1.0, -9), "memory"),
        (died(0, 1.0, -11), "native code"),
        (died(0, 1.0, -7), "/dev/shm"),
        (died(0, 1.0, -15), "asked it to end"),
        (died(0, 1.0, 0), "sys.exit"),
        (died(0, 1.0, 3), "without a traceback"),
        (lost(0), "machine"),
        (Failure(0, Kind.HANG, 1.0), "stack"),
        (Failure(0, Kind.HANG, 1.0, ready=False), "reach"),
        (gloo(0, 1.0), "network"),
        (error(0, 1.0, "OutOfMemoryError", "CUDA out of memory."), "smaller batch"),
        (error(0, 1.0, "ModuleNotFoundError", "No module named 'foo'"), "PYTHONPATH"),
        (error(0, 1.0, "OSError", "[Errno 28] No space left on device"), "num_to_keep"),
        (error(0, 1.0), "traceback"),
    ],
)
def test_every_sort_has_its_advice(failure, word):
    assert word in " ".join(advice(failure))


def test_ranks_text():
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([2, 0, 1, 7]) == "ranks 0-2, 7"
    assert ranks_text(range(0, 100, 2)).endswith("and 40 more")


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        (-9, "out of memory", "killed by SIGKILL (out of memory)"),
        (-200, "", "killed by signal 200"),
        (2, "", "the process ended with exit code 2"),
        (0, "", "the process ended with exit code 0 before the training function returned"),
    ],
)
def test_exit_text(code, reason, text):
    assert exit_text(code, reason) == text


# ---- the exceptions --------------------------------------------------------------------------------------------------


def test_worker_failures_can_be_caught_as_what_they_were():
    found = as_exceptions([error(3, 1.0), error(1, 2.0, "MyError"), died(0, 3.0), error(2, 1.0, "OSError", "no")])
    assert list(found) == [3, 1, 0, 2]
    assert isinstance(found[3], ValueError)
    assert isinstance(found[2], OSError)
    assert all(isinstance(each, WorkerError) for each in found.values())
    assert str(found[3]) == "bad batch"
    assert (found[0].rank, found[0].exit_code, found[0].kind) == (0, -9, Kind.EXIT)


@pytest.mark.parametrize(
    "name", ["KeyError", "OSError", "UnicodeDecodeError", "SystemExit", "ExceptionGroup", "print", "Exception", ""]
)
def test_any_type_name_gives_an_exception(name):
    found = as_exceptions([error(0, 1.0, name, "text")])[0]
    assert isinstance(found, WorkerError)
    assert str(found) == "text"
    again = pickle.loads(pickle.dumps(found))
    assert (str(again), again.type, again.rank) == ("text", name, 0)


def test_errors_are_one_family_and_can_be_pickled():
    group = WorkerGroupError("text", as_exceptions([error(3, 1.0)]))
    own = ControllerError(OSError("disk"))
    assert all(isinstance(each, TrainingFailedError) for each in (group, own))
    again = pickle.loads(pickle.dumps(group))
    assert (str(again), list(again.worker_failures)) == ("text", [3])
    assert isinstance(again.worker_failures[3], ValueError)
    assert isinstance(pickle.loads(pickle.dumps(own)).controller_failure, OSError)
    assert str(own) == "OSError: disk"
    assert str(ControllerError(PlacementError("bundle {'GPU': 9}"))) == "bundle {'GPU': 9}"
