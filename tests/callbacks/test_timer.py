import logging
from datetime import timedelta

import pytest
from fake_run import FakeTrainer

from leyden.base.errors import MisconfigurationException
from leyden.callbacks import Timer, small
from leyden.callbacks.shared_clock import SharedClock
from leyden.callbacks.small import parse_duration


@pytest.fixture(autouse=True)
def caplog_sees_leyden(monkeypatch):
    monkeypatch.setattr(logging.getLogger("leyden"), "propagate", True)


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(small, "monotonic", clock)
    return clock


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:00:22", 22),
        ("12:34:56:07", 12 * 86400 + 34 * 3600 + 56 * 60 + 7),
        (" 01:00:00:00 ", 86400),
        ("90s", 90),
        ("1h30m", 5400),
        ("1d 12h", 129600),
        (timedelta(minutes=2), 120),
        ({"hours": 1, "seconds": 1}, 3601),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)
    assert Timer(text).time_remaining() == seconds
    assert parse_duration(None) is None


@pytest.mark.parametrize("text", ["", "1:2:3:4", "00:00:22", "5", "1x", "h", "1m1h", "-00:00:00:01"])
def test_what_is_no_duration(text):
    with pytest.raises(MisconfigurationException, match="is no duration: write"):
        Timer(text)
    with pytest.raises(MisconfigurationException, match="interval='batch'"):
        Timer(interval="batch")


def test_times_of_stages(clock):
    timer = Timer()
    trainer = FakeTrainer(timer, epochs=1, train=3, val=(2,))

    def passes(trainer):
        clock.now += 1

    assert timer.start_time() is None
    assert timer.time_elapsed("validate") == 0
    trainer.fit(sanity=False, after_step=passes)
    assert (timer.start_time("train"), timer.end_time("train"), timer.time_elapsed()) == (100.0, 103.0, 3.0)
    assert timer.time_elapsed("validate") == 0.0
    assert timer.time_remaining() is None
    clock.now += 50
    trainer.current_epoch = 0
    trainer.fit(sanity=False, after_step=passes)  # a second fit starts anew
    assert timer.time_elapsed() == 3.0
    timer.on_test_start(trainer, None)
    clock.now += 7
    assert timer.time_elapsed("test") == 7
    timer.on_test_end(trainer, None)
    clock.now += 7
    assert timer.time_elapsed("test") == 7


@pytest.mark.parametrize(("interval", "steps"), [("step", 6), ("epoch", 8)])
def test_stops(clock, caplog, interval, steps):
    timer = Timer("00:00:00:06", interval=interval)
    trainer = FakeTrainer(timer, epochs=10, train=4, val=())
    done = []

    def passes(trainer):
        clock.now += 1
        done.append(trainer.should_stop)

    with caplog.at_level("INFO", logger="leyden"):
        trainer.fit(after_step=passes)
    assert done.index(True) if True in done else len(done) == steps
    assert trainer.should_stop
    assert "reached after 0:00:0" in caplog.messages[0]
    assert len(caplog.messages) == 1  # also where the epoch is finished first


def test_resumed_time_counts(clock):
    first = Timer("00:00:00:10")
    trainer = FakeTrainer(first, epochs=1, train=4, val=())

    def passes(trainer):
        clock.now += 1

    trainer.fit(after_step=passes)
    state = first.state_dict()
    assert state == {"time_elapsed": {"train": 4.0, "sanity_check": 0.0, "validate": 0.0, "test": 0.0, "predict": 0.0}}
    second = Timer("00:00:00:10")
    second.load_state_dict(state)
    trainer = FakeTrainer(second, epochs=10, train=4, val=())
    trainer.fit(after_step=passes)
    assert trainer.global_step == 8  # six seconds were left; the epoch is finished by the fake
    assert second.time_elapsed() == 12
    third = Timer("00:00:00:03", verbose=False)
    third.load_state_dict(state)
    trainer = FakeTrainer(third)
    trainer.call("on_fit_start")
    assert trainer.should_stop


def test_state_is_lightnings():
    from lightning.pytorch.callbacks import Timer as Theirs

    assert Timer().state_dict() == Theirs().state_dict()
    assert Timer().state_key == Theirs().state_key


def test_no_limit_no_look(clock):
    timer = Timer()
    trainer = FakeTrainer(timer)
    trainer.strategy.broadcast = None
    trainer.world_size = trainer.strategy.world_size = 2
    trainer.fit()
    assert not trainer.should_stop


@pytest.mark.parametrize(("step_seconds", "asked_at_most"), [(0.001, 40), (0.5, 1001)])
def test_ranks_ask_together_and_not_each_step(clock, step_seconds, asked_at_most):
    """Two ranks whose clocks differ: rank 0's answers go to both, at the same batches."""
    answers, asked = [], {0: [], 1: []}
    timers = {rank: Timer(timedelta(seconds=1000 * step_seconds), verbose=False) for rank in (0, 1)}
    trainers = {}
    for rank in (0, 1):
        trainer = trainers[rank] = FakeTrainer(timers[rank])
        trainer.world_size = trainer.strategy.world_size = 2
        timers[rank].on_train_start(trainer, None)

        def broadcast(value, rank=rank):
            asked[rank].append(batch)
            if rank == 0:
                answers.append(value)
            return answers[-1]

        trainer.strategy.broadcast = broadcast
    for batch in range(1200):
        clock.now += step_seconds
        for rank in (0, 1):
            clock.now += 5 * rank  # rank 1's clock is ahead
            timers[rank].on_train_batch_end(trainers[rank], None, None, None, batch)
            clock.now -= 5 * rank
        assert trainers[0].should_stop == trainers[1].should_stop
        if trainers[0].should_stop:
            break
    assert asked[0] == asked[1]
    assert len(asked[0]) <= asked_at_most
    assert 999 <= batch <= 999 + SharedClock.MOST_BATCHES_BETWEEN_ANSWERS
