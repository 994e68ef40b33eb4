"""What `self.log` keeps and how it is reduced: one process, and several that are threads."""

import math

import pytest
import torch
import torchmetrics
from rank_threads import World
from torch import nn

from leyden.base.errors import MisconfigurationException
from leyden.loops.metrics import BarebonesLog, MetricLog, MetricViews

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """What is said once per process may have been said in another test."""
    monkeypatch.setattr("leyden.base.log._said", set())


def new_log(training=True, comm=None, module=None, views=None):
    log = MetricLog(module or nn.Module(), views or MetricViews(), training, comm, CPU)
    log.current_hook = "training_step" if training else "validation_step"
    return log


def views_of(log):
    log.publish()
    return log._views


def epoch_of(log):
    """The epoch's values as floats."""
    log.close_epoch()
    return {name: float(value) for name, value in log.publish().items()}


def batch(rows):
    return [torch.zeros(rows, 2)]


# ---- one process ---------------------------------------------------------------------------------------------------


def test_epoch_mean_is_weighted_by_batch_size():
    log = new_log()
    for rows, value in ((4, 1.0), (4, 2.0), (1, 9.0)):
        log.start_batch(batch(rows))
        log.log("x", value, on_step=False, on_epoch=True)
        log.log("y", torch.tensor(value), on_step=False, on_epoch=True, batch_size=1)
    assert epoch_of(log) == pytest.approx({"x": (4 * 1 + 4 * 2 + 9) / 9, "y": 4.0}, rel=1e-6)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 5 / 3),
        ("avg", 5 / 3),
        (torch.mean, 5 / 3),
        ("sum", 5.0),
        (sum, 5.0),
        (torch.sum, 5.0),
        ("min", -1.0),
        (min, -1.0),
        (torch.min, -1.0),
        ("MAX", 4.0),
        (max, 4.0),
        (torch.max, 4.0),
    ],
)
def test_reductions_of_an_epoch(reduce_fx, expected):
    log = new_log()
    for value in (2.0, -1.0, 4.0):
        log.start_batch(batch(3))
        log.log("x", value, on_epoch=True, on_step=False, reduce_fx=reduce_fx)
    assert epoch_of(log)["x"] == pytest.approx(expected)


def test_names_with_step_and_epoch():
    log = new_log()
    log.start_batch(batch(2))
    log.log("x", 1.0, on_step=True, on_epoch=True, prog_bar=True)
    log.log("only_step", 3.0)
    log.log("hidden", 4.0, logger=False)
    assert set(log.publish()) == {"x_step", "only_step"}
    log.start_batch(batch(2))
    log.log("x", 2.0, on_step=True, on_epoch=True, prog_bar=True)
    views = views_of(log)
    assert {name: float(value) for name, value in views.callback.items()} == {
        "x": 2.0,
        "x_step": 2.0,
        "only_step": 3.0,
        "hidden": 4.0,
    }
    assert epoch_of(log) == {"x_epoch": 1.5}
    assert {name: float(value) for name, value in views.callback.items()} == {
        "x": 1.5,
        "x_step": 2.0,
        "x_epoch": 1.5,
        "only_step": 3.0,
        "hidden": 4.0,
    }
    assert views.progress_bar_scalars() == {"x_step": 2.0, "x_epoch": 1.5}


def test_evaluation_shows_epoch_values_only_in_callback_metrics():
    log = new_log(training=False)
    log.start_batch(batch(2))
    log.log("x", 1.0, on_step=True, on_epoch=True)
    assert set(log.publish()) == {"x_step"}
    assert views_of(log).callback == {}
    assert epoch_of(log) == {"x_epoch": 1.0}
    assert set(log._views.callback) == {"x", "x_epoch"}


@pytest.mark.parametrize("enable_graph", [False, True])
def test_later_change_in_place_does_not_change_the_logged_value(enable_graph):
    log = new_log()
    value, counter = torch.tensor(1.0), torch.tensor([5.0])
    for _ in range(2):
        log.start_batch(batch(1))
        log.log("x", value, on_step=True, on_epoch=True, enable_graph=enable_graph)
        log.log("low", value, on_step=False, on_epoch=True, reduce_fx="min")
        log.log("sum", value, on_step=False, on_epoch=True, reduce_fx="sum")
        log.log("counter", counter)
        shown = log.publish()
        value += 10
        counter += 1
        assert shown["x_step"] == value - 10
        assert log.publish()["x_step"] == value - 10
        assert log.publish()["counter"] == counter - 1
    assert epoch_of(log) == {"x_epoch": 6.0, "low": 1.0, "sum": 12.0}


def test_reading_the_views_in_the_middle_changes_nothing():
    log = new_log()
    log.start_batch(batch(1))
    log.log("x", 1.0, on_step=False, on_epoch=True)
    log.close_epoch()
    assert log.publish()["x"] == 1
    log.log("x", 3.0, on_step=False, on_epoch=True)
    assert log.publish()["x"] == 2


def test_graph_is_cut():
    log = new_log()
    weight = torch.ones(3, requires_grad=True)
    log.start_batch(batch(1))
    log.log("x", weight.sum(), on_step=True, on_epoch=True)
    assert not any(value.requires_grad for value in log.publish().values())
    log.close_epoch()
    assert not any(value.requires_grad for value in log.publish().values())


def test_sum_of_many_halves_stays_exact():
    log = new_log()
    value = torch.tensor(0.1, dtype=torch.bfloat16)
    for _ in range(1000):
        log.start_batch(batch(1))
        log.log("x", value, on_step=False, on_epoch=True, reduce_fx="sum")
    assert epoch_of(log)["x"] == pytest.approx(1000 * float(value), rel=1e-5)


def test_integers_and_bools_are_averaged_as_floats():
    log = new_log()

    def log_all(value):
        log.start_batch(batch(1))
        log.log("number", value, on_epoch=True, on_step=False)
        log.log("tensor", torch.tensor(value), on_epoch=True, on_step=False)
        log.log("flag", torch.tensor([value == 1]), on_epoch=True, on_step=False)

    with pytest.warns(UserWarning, match="averaged as float32"):
        log_all(1)
    log_all(2)
    assert epoch_of(log) == {"number": 1.5, "tensor": 1.5, "flag": 0.5}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": torch.zeros(2)}, ValueError, "2 elements"),
        ({"value": {"a": 1.0}}, ValueError, "one level of names"),
        ({"value": "1"}, ValueError, "got str"),
        ({"value": 1.0, "on_step": False, "on_epoch": False}, MisconfigurationException, "keeps nothing"),
        ({"value": 1.0, "reduce_fx": "median"}, MisconfigurationException, "'median'"),
        ({"value": torchmetrics.MeanMetric()}, MisconfigurationException, "not an attribute of"),
    ],
)
def test_misuse(arguments, error, message):
    log = new_log()
    log.start_batch(batch(1))
    with pytest.raises(error, match=message):
        log.log("x", **arguments)


def test_same_name_with_other_arguments_is_refused():
    log = new_log()
    log.start_batch(batch(1))
    log.log("x", 1.0)
    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        log.log("x", 1.0, prog_bar=True)
    log.current_hook = "on_train_batch_end"
    log.log("x", 1.0, prog_bar=True)  # another hook, another entry


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_fit_end", "configure_optimizers", None])
def test_hooks_that_can_not_log(hook):
    log = new_log()
    log.current_hook = hook
    with pytest.raises(MisconfigurationException, match=r"log"):
        log.log("x", 1.0)


def test_torchmetrics_object_is_computed_once_an_epoch_and_reset():
    module = nn.Module()
    module.accuracy = torchmetrics.MeanMetric()
    log = new_log(module=module)
    for value in (1.0, 3.0):
        log.start_batch(batch(1))
        module.accuracy(value)
        log.log("x", module.accuracy, on_step=True, on_epoch=True)
        assert log.publish()["x_step"] == value
    assert epoch_of(log) == {"x_epoch": 2.0}
    log.reset()
    assert module.accuracy.update_count == 0


def test_loaders_have_their_own_values():
    log = new_log(training=False)
    found = []
    for loader in range(2):
        for value in (1.0, 2.0):
            log.start_batch(batch(1), loader)
            log.log("x", value + 10 * loader)
            log.log(f"plain{loader}", value, add_dataloader_idx=False)
        found.append(epoch_of(log))
    assert found == [{"x/dataloader_idx_0": 1.5, "plain0": 1.5}, {"x/dataloader_idx_1": 11.5, "plain1": 1.5}]


def test_reset_forgets_values_and_keeps_names():
    log = new_log()
    log.start_batch(batch(1))
    log.log("x", 1.0, on_epoch=True)
    log.reset()
    assert log.publish() == {}
    log.start_batch(batch(1))
    log.log("x", 5.0, on_epoch=True)
    assert epoch_of(log) == {"x_epoch": 5.0}


def test_barebones_keeps_nothing_and_says_so_once():
    log = BarebonesLog()
    log.start_batch(batch(1))
    with pytest.warns(UserWarning, match="barebones"):
        log.log("x", 1.0)
    log.close_epoch()
    assert log.publish() == {}


# ---- several ranks -------------------------------------------------------------------------------------------------


def on_ranks(work, size=2, training=True, module=None):
    def one(comm):
        return work(new_log(training, comm, module() if module else None), comm)

    return World(size).run(one)


def test_epoch_values_over_ranks_are_those_of_all_samples():
    sizes = [[4, 4, 1], [4, 2], []]
    values = [[1.0, 2.0, 9.0], [5.0, 7.0], []]

    def work(log, comm):
        for rows, value in zip(sizes[comm.rank], values[comm.rank], strict=True):
            log.start_batch(batch(rows))
            for kind in ("mean", "sum", "min", "max"):
                log.log(kind, value, on_step=False, on_epoch=True, reduce_fx=kind, sync_dist=True)
        return epoch_of(log)

    expected = {"mean": (4 + 8 + 9 + 20 + 14) / 15, "sum": 24.0, "min": 1.0, "max": 9.0}
    for found in on_ranks(work, size=3):
        assert found == pytest.approx(expected)


def test_rank_without_batches_shows_the_same_names_in_the_same_places():
    def work(log, comm):
        if comm.rank == 0:
            log.start_batch(batch(2))
            log.log("x", 3.0, on_step=True, on_epoch=True, prog_bar=True)
            log.log("hidden", 4.0, on_step=False, on_epoch=True, logger=False)
        log.close_epoch()
        logged = set(log.publish())
        callback, bar = set(log._views.callback), log._views.progress_bar_scalars()
        log.reset()
        log.close_epoch()
        return logged, callback, bar, log.publish()

    first, second = on_ranks(work, training=False)
    assert first == second == ({"x_epoch"}, {"x", "x_epoch", "hidden"}, {"x_epoch": 3.0}, {})


def test_mean_over_ranks_without_sync_dist_is_exact_too():
    def work(log, comm):
        log.start_batch(batch(1 + comm.rank))
        log.log("x", float(comm.rank), on_step=False, on_epoch=True)
        return epoch_of(log)

    assert on_ranks(work) == [{"x": pytest.approx(2 / 3)}] * 2


def test_rank_zero_only_stays_local():
    def work(log, comm):
        log.start_batch(batch(1))
        log.log("x", float(comm.rank), on_epoch=True, on_step=False, sync_dist=True, rank_zero_only=True)
        return epoch_of(log)

    assert on_ranks(work) == [{"x": 0.0}, {"x": 1.0}]


def test_step_values_are_reduced_in_one_collective_per_kind():
    def work(log, comm):
        log.start_batch(batch(1))
        for step in range(3):
            if step:
                log.start_batch(batch(1))
            for name, kind in (("a", "mean"), ("b", "sum"), ("c", "mean"), ("d", "max")):
                log.log(name, float(step + comm.rank), reduce_fx=kind, sync_dist=True)
            comm.calls.clear()
            assert log.must_sync
            log.close_step()
            found = {name: float(value) for name, value in log.publish().items()}
            assert found == {"a": step + 0.5, "b": 2 * step + 1, "c": step + 0.5, "d": step + 1}
        return comm.calls

    assert on_ranks(work) == [["all_reduce sum", "all_reduce max"]] * 2


def test_nothing_is_exchanged_after_the_first_step_where_nothing_is_synchronised():
    def work(log, comm):
        for step in range(3):
            log.start_batch(batch(1))
            log.log("x", 1.0)
            comm.calls.clear()
            for hooks in (False, True):
                if log.must_sync:
                    log.close_step(hooks)
            if step:
                assert comm.calls == []
        return log.must_sync

    assert on_ranks(work) == [False, False]


@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("also", [True, False])
def test_names_of_a_step_that_differ_are_an_error_on_every_rank(at_step, also):
    def work(log, comm):
        for step in range(4):
            log.start_batch(batch(1))
            if also or at_step == 0:
                log.log("both", 1.0, sync_dist=True)
            if step == at_step and comm.rank == 1:
                log.log("apart", 1.0, sync_dist=True)
            if step >= at_step and comm.rank == 0 and at_step == 0 and not also:
                log.log("other", 1.0, sync_dist=True)
            try:
                if log.must_sync:
                    log.close_step()
            except MisconfigurationException as error:
                return step, str(error)
        return None

    if not also and at_step:
        pytest.skip("ranks that meet for the first time late need a real store: tests/trainer/test_ddp.py")
    first, second = on_ranks(work)
    assert first == second
    assert first[0] == at_step
    assert "'apart' in `training_step`: logged on ranks [1], not on ranks [0]" in first[1]


def test_names_of_an_epoch_that_differ_are_an_error_with_sync_dist_only():
    def work(log, comm, sync):
        log.start_batch(batch(1))
        if comm.rank == 1:
            log.log("x", 4.0, on_step=False, on_epoch=True, sync_dist=sync)
        return epoch_of(log)

    assert on_ranks(lambda log, comm: work(log, comm, False)) == [{"x": 4.0}, {"x": 4.0}]
    with pytest.raises(MisconfigurationException, match=r"'x' in `training_step`: logged on ranks \[1\], not on"):
        on_ranks(lambda log, comm: work(log, comm, True))


def test_uneven_evaluation_does_not_synchronise_steps():
    def work(log, comm):
        log.sync_steps(False)
        for _ in range(1 + comm.rank):
            log.start_batch(batch(1))
            log.log("x", float(comm.rank), on_step=True, on_epoch=True, sync_dist=True)
            if log.must_sync:
                log.close_step()
        assert comm.calls == []
        return epoch_of(log)

    assert on_ranks(work, training=False) == [{"x_epoch": pytest.approx(2 / 3)}] * 2


def test_infinite_and_nan_values_pass_through():
    def work(log, comm):
        log.start_batch(batch(1))
        log.log("inf", math.inf if comm.rank else 1.0, on_step=False, on_epoch=True)
        log.log("low", math.inf, on_step=False, on_epoch=True, reduce_fx="min")
        log.log("nan", math.nan, on_step=False, on_epoch=True, reduce_fx="max")
        return epoch_of(log)

    for found in on_ranks(work):
        assert found["inf"] == found["low"] == math.inf
        assert math.isnan(found["nan"])


def test_several_loaders_over_ranks():
    """Rank 1 has no batch of the second loader."""

    def work(log, comm):
        found = []
        for loader in range(2):
            if not (loader and comm.rank):
                log.start_batch(batch(1), loader)
                log.log("x", 10.0 * loader + comm.rank, sync_dist=True)
            log.dataloader = loader
            found.append(epoch_of(log))
        log.dataloader = None
        log.current_hook = "on_validation_epoch_end"
        log.log("late", float(comm.rank), sync_dist=True)
        return found + [epoch_of(log)]

    expected = [{"x/dataloader_idx_0": 0.5}, {"x/dataloader_idx_1": 10.0}, {"late": 0.5}]
    assert on_ranks(work, training=False) == [expected] * 2
