"""Seeding against Lightning's seed_everything, and the state of the generators."""

import os
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as reference
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from leyden.base import seed as seeding
from leyden.base.seed import (
    collect_rng_state,
    global_seed,
    isolate_rng,
    reset_seed,
    seed_everything,
    set_rng_state,
    worker_init_function,
    workers_are_seeded,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # so that monkeypatch removes what the code under test sets
        monkeypatch.delenv(name)
    state = collect_rng_state()
    yield
    set_rng_state(state)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


@pytest.mark.parametrize("value", [0, 1, 42, 2**32 - 1, "7", 3.9, np.int64(5)])
def test_same_numbers_as_lightning(value: Any) -> None:
    assert seed_everything(value, verbose=False) == reference.seed_everything(value, verbose=False)
    theirs, environment = draw(), dict(os.environ)
    seed_everything(value, verbose=False)
    assert draw() == theirs
    assert dict(os.environ) == environment


@pytest.mark.parametrize("value", [-1, 2**32, "x", "1.5"])
def test_bad_seeds(value: Any) -> None:
    for function in (seed_everything, reference.seed_everything):
        with pytest.raises(ValueError, match=r"bounds|invalid literal"):
            function(value)


def test_seed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="without a seed takes 0"):
        assert seed_everything() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert seed_everything(workers=True, verbose=False) == 17
    assert os.environ["PL_SEED_WORKERS"] == "1"
    assert global_seed() == 17
    monkeypatch.setenv("PL_GLOBAL_SEED", "many")
    with pytest.raises(ValueError, match="PL_GLOBAL_SEED='many'"):
        seed_everything()


def test_says_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(seeding.log, "info", lambda message, *args: said.append(message % args))
    seed_everything(3)
    monkeypatch.setattr(seeding.rank_zero_only, "rank", 2)
    seed_everything(3)
    seed_everything(3, verbose=False)
    assert said == ["Seed set to 3", "[rank: 2] Seed set to 3"]


def test_reset_seed() -> None:
    state = collect_rng_state()
    first = draw()
    set_rng_state(state)
    reset_seed()  # never seeded: nothing happens
    assert draw() == first

    seed_everything(5, workers=True, verbose=False)
    first = draw()
    reset_seed()
    assert draw() == first
    assert workers_are_seeded()


def test_isolate_rng() -> None:
    seed_everything(1, verbose=False)
    with isolate_rng():
        inside = draw()
    assert draw() == inside


def test_isolate_rng_restores_after_an_error() -> None:
    seed_everything(1, verbose=False)
    inside: list[float] = []

    def fail() -> None:
        with isolate_rng():
            inside.extend(draw())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == inside


def test_state_survives_a_safe_checkpoint(tmp_path: Any) -> None:
    seed_everything(9, verbose=False)
    random.gauss(0, 1)  # keeps half of what it drew: part of the state
    np.random.randn()
    torch.save(collect_rng_state(), tmp_path / "state.pt")
    expected = [*draw(), random.gauss(0, 1), float(np.random.randn()), float(torch.randn(3)[2])]
    set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [*draw(), random.gauss(0, 1), float(np.random.randn()), float(torch.randn(3)[2])] == expected


def test_state_of_cuda() -> None:
    assert "torch.cuda" not in collect_rng_state(include_cuda=False)
    state = collect_rng_state()
    if not torch.cuda.is_initialized():
        assert state["torch.cuda"] == []
    state["torch.cuda"] = [torch.zeros(16, dtype=torch.uint8)]  # of a host with a GPU
    if not torch.cuda.is_available():
        set_rng_state(state)


def worker_numbers(base: int, worker: int, rank: int) -> tuple[float, ...]:
    torch.manual_seed(base + worker)  # what torch does in a worker
    worker_init_function(worker, rank)
    return tuple(draw())


def test_workers_differ() -> None:
    seen = {worker_numbers(base, worker, rank) for base in range(3) for worker in range(3) for rank in range(3)}
    assert len(seen) == 27
    assert len({number for numbers in seen for number in numbers}) == 27 * 3
    assert worker_numbers(1, 2, 0) == worker_numbers(1, 2, 0)


class Draws(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(draw())


def test_in_real_workers() -> None:
    def numbers() -> list[list[float]]:
        seed_everything(4, verbose=False)
        loader = DataLoader(Draws(), num_workers=2, worker_init_fn=worker_init_function)
        return torch.cat([*loader, *loader]).tolist()

    first = numbers()
    assert first == numbers()
    assert len({tuple(row) for row in first}) == 8  # two epochs of two workers with two samples each, all different
