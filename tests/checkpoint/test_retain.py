"""checkpoint/retain.py: which checkpoints stay."""

import itertools
import math

import pytest

from leyden.checkpoint.retain import Entry, best, is_better, qualifies, rankable, retain, worst


def entries(*scores: float) -> list[Entry]:
    return [Entry(f"{number}.ckpt", score) for number, score in enumerate(scores)]


def paths(found: list[Entry]) -> list[str]:
    return [each.path[0] for each in found]


@pytest.mark.parametrize(
    ("k", "mode", "kept", "dropped"),
    [
        (2, "min", "13", "20"),
        (2, "max", "02", "13"),
        (2, "newest", "23", "01"),
        (0, "min", "", "2031"),
        (-1, "min", "0123", ""),
        (9, "max", "0123", ""),
    ],
)
def test_what_is_kept(k, mode, kept, dropped):
    keep, drop = retain(entries(3.0, 1.0, 4.0, 2.0), k, mode)
    assert ("".join(paths(keep)), "".join(paths(drop))) == (kept, dropped)


def test_of_equal_ones_the_oldest_goes_and_the_oldest_is_best():
    found = entries(1.0, 2.0, 1.0, 2.0)
    assert worst(found, "min").path == "1.ckpt"
    assert best(found, "min").path == "0.ckpt"
    assert worst(found, "max").path == "0.ckpt"
    assert best(found, "max").path == "1.ckpt"
    assert worst(found, "newest").path == "0.ckpt"
    assert best(found, "newest").path == "3.ckpt"


def test_an_equal_score_is_not_better():
    assert not is_better(1.0, 1.0, "min")
    assert not is_better(1.0, 1.0, "max")
    assert is_better(1.0, 1.0, "newest")
    assert not qualifies(1.0, entries(1.0), 1, "min")
    assert qualifies(1.0, entries(1.0), 2, "min")
    assert qualifies(1.0, entries(1.0), 1, "newest")


def test_not_a_number_ranks_last():
    assert rankable(math.nan, "min") == math.inf
    assert rankable(math.nan, "max") == -math.inf
    assert rankable(-math.inf, "min") == -math.inf
    assert not qualifies(math.nan, entries(1.0), 1, "min")
    assert not qualifies(math.nan, entries(1.0), 1, "max")
    assert qualifies(math.nan, [], 1, "min")
    assert qualifies(5.0, entries(rankable(math.nan, "min")), 1, "min")


def test_none_and_all():
    assert not qualifies(0.0, [], 0, "min")
    assert qualifies(9.0, entries(1.0, 2.0), -1, "min")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_one_by_one_keeps_as_good_scores_as_all_at_once(mode):
    for scores in itertools.permutations([1.0, 2.0, 2.0, 3.0, 4.0]):
        kept: list[Entry] = []
        for entry in entries(*scores):
            if qualifies(entry.score, kept, 2, mode):
                kept, _ = retain([*kept, entry], 2, mode)
        everything, _ = retain(entries(*scores), 2, mode)
        assert sorted(each.score for each in kept) == sorted(each.score for each in everything)
