"""How many workers, and where: decisions over what a group can place."""

import pytest

from leyden.train.failure import Budgets
from leyden.train.groups import Node, Placement
from leyden.train.plans import RunSpec, rank_plans
from leyden.train.scaling import Move, Workers, decide, in_words, layout


def node(name, ranks, **more):
    return Node(name, f"addr-{name}", ranks, **more)


def places(*counts, **more):
    return Placement(tuple(node(f"n{number}", count) for number, count in enumerate(counts)), **more)


@pytest.mark.parametrize("bounds", [(0, 1), (2, 1), (-1, 4)])
def test_workers_are_checked(bounds):
    with pytest.raises(ValueError, match="1 <= least <= most"):
        Workers(*bounds)


@pytest.mark.parametrize(
    ("placement", "workers", "move", "world"),
    [
        (places(2, 2), Workers(4, 4), Move.START, 4),
        (places(8, 8), Workers(4, 4), Move.START, 4),
        (places(2, 1), Workers(4, 4), Move.WAIT, 0),
        (places(2, 1), Workers(2, 4), Move.START, 3),
        (places(8), Workers(2, 4), Move.START, 4),
        (places(), Workers(1, 4), Move.WAIT, 0),
        (places(2, impossible=True, waiting_for="{'GPU': 9}"), Workers(4, 4), Move.REFUSE, 0),
    ],
)
def test_a_start(placement, workers, move, world):
    decision = decide(placement, workers)
    assert (decision.move, decision.world) == (move, world)


def test_waiting_says_for_what_and_refusing_says_why():
    waiting = decide(places(2, waiting_for="2 more GPUs"), Workers(4, 4)).why
    assert waiting == "2 of 4 workers have a place; waiting for 2 more GPUs"
    refused = decide(places(impossible=True, waiting_for="bundle {'GPU': 9} fits on no node"), Workers(4, 8)).why
    assert refused == "num_workers=4 to 8 can never fit here: bundle {'GPU': 9} fits on no node"
    assert "2 more places" in decide(places(2), Workers(4, 4)).why


@pytest.mark.parametrize(
    ("placement", "workers", "move", "world"),
    [
        (places(2, 1), Workers(1, 4), Move.GROW, 3),
        (places(8, 8), Workers(1, 4), Move.GROW, 4),
        (places(2), Workers(1, 4), Move.KEEP, 2),
        (places(1), Workers(1, 4), Move.KEEP, 2),
        (places(8), Workers(2, 2), Move.KEEP, 2),
        (places(impossible=True), Workers(1, 4), Move.KEEP, 2),
    ],
)
def test_a_running_group_grows_but_never_shrinks_by_decision(placement, workers, move, world):
    decision = decide(placement, workers, running=2)
    assert (decision.move, decision.world) == (move, world)


def ranks_of(shares):
    return {share.node.id: list(share.ranks) for share in shares}


def test_ranks_are_contiguous_on_uneven_nodes():
    shares = layout([node("a", 3), node("b", 1), node("c", 4)], 6)
    assert ranks_of(shares) == {"a": [0, 1, 2], "b": [3], "c": [4, 5]}
    assert [share.node_rank for share in shares] == [0, 1, 2]


def test_nodes_that_stay_keep_their_order():
    nodes = [node("new", 2), node("b", 2), node("a", 2)]
    assert list(ranks_of(layout(nodes, 6, {"a": 0, "gone": 1, "b": 2}))) == ["a", "b", "new"]
    assert list(ranks_of(layout(nodes, 4, {"b": 0}))) == ["b", "new"]


def test_too_few_places_is_our_bug():
    with pytest.raises(ValueError, match="4 ranks, but the nodes have 3 places"):
        layout([node("a", 3)], 4)


def spec(**more):
    return RunSpec(name="r", url="/runs/r", budgets=Budgets(), **more)


def test_plans_say_who_everyone_is():
    shares = layout([node("a", 2, ports=(5, 6)), node("b", 1)], 3)
    plans = rank_plans(spec(backend="gloo", log_folder="/logs"), shares, 1, "checkpoint_000004", 5)
    assert list(plans) == ["a", "b"]
    rows = [
        (p.rank, p.local_rank, p.local_world_size, p.node_rank, p.world_size) for each in plans.values() for p in each
    ]
    assert rows == [(0, 0, 2, 0, 3), (1, 1, 2, 0, 3), (2, 0, 1, 1, 3)]
    for plan in plans["b"]:
        assert (plan.master_addr, plan.master_port) == ("addr-a", 6)
        assert (plan.attempt, plan.checkpoint, plan.next_report) == (1, "checkpoint_000004", 5)
        assert (plan.log_path, plan.backend) == ("/logs/rank-2.log", "gloo")
    assert rank_plans(spec(), shares, 2, None, 0)["a"][0].master_port == 5
    assert rank_plans(spec(), shares, 2, None, 0)["a"][0].log_path == ""


def test_devices_are_dealt_in_numeric_order():
    """Twelve devices: as text "10" would come before "2"."""
    (share,) = layout([node("a", 12, devices=(10, 11, *range(10)))], 12)
    plans = rank_plans(spec(use_gpu=True), [share], 0, None, 0)["a"]
    assert [plan.devices for plan in plans] == [(number,) for number in range(12)]
    assert all(plan.visible_devices == tuple(range(12)) for plan in plans)


@pytest.mark.parametrize(
    ("each", "ranks", "devices", "visible"),
    [
        (1.0, 2, [(4,), (5,)], (4, 5)),  # a node with more devices than ranks
        (2.0, 2, [(4, 5), (6, 7)], (4, 5, 6, 7)),
        (0.5, 3, [(4,), (4,), (5,)], (4, 5)),
    ],
)
def test_devices_of_each_rank(each, ranks, devices, visible):
    (share,) = layout([node("a", ranks, devices=(7, 6, 5, 4))], ranks)
    plans = rank_plans(spec(use_gpu=True, gpus_per_worker=each), [share], 0, None, 0)["a"]
    assert [plan.devices for plan in plans] == devices
    assert {plan.visible_devices for plan in plans} == {visible}
    on_cpu = rank_plans(spec(), [share], 0, None, 0)["a"]
    assert {(plan.devices, plan.visible_devices) for plan in on_cpu} == {((), ())}


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(8, 2, 4), (7, 2, 3), (2, 4, 1), (1, 1, 1)])
def test_threads_are_split_among_the_ranks_of_a_node(cpus, ranks, threads):
    (share,) = layout([node("a", ranks, cpus=cpus)], ranks)
    assert share.threads == threads


def test_in_words():
    assert in_words(layout([node("a", 1, cpus=1)], 1)) == "1 rank on one node, 1 CPU thread each"
    assert in_words(layout([node("a", 2, cpus=8), node("b", 1, cpus=8)], 3)) == (
        "3 ranks on 2 nodes, 4 to 8 CPU threads each"
    )
