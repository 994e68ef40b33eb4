import logging

import pytest
import torch
from fake_run import FakeTrainer

from leyden.base.errors import MisconfigurationException
from leyden.callbacks import EarlyStopping
from leyden.callbacks.early_stopping import EarlyStoppingReason

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def caplog_sees_leyden(monkeypatch):
    monkeypatch.setattr(logging.getLogger("leyden"), "propagate", True)


def run(values, cls=EarlyStopping, **kwargs):
    """Feeds values at epoch ends; the state after each one."""
    callback = cls("m", **kwargs)
    seen = []
    for value in values:
        stop, _ = callback._evaluate_stopping_criteria(torch.tensor(value))
        state = callback.state_dict()
        state.pop("stopping_reason_message")
        seen.append((stop, {key: float(item) for key, item in state.items()}))
        if stop:
            break
    return seen


@pytest.mark.parametrize(
    ("values", "kwargs"),
    [
        ([5.0, 4.0, 4.5, 4.4, 4.3], {}),
        ([5.0, 4.0, 4.5, 4.4, 4.3], {"patience": 1}),
        ([5.0, 4.0, 4.5], {"patience": 0}),
        ([1.0, 2.0, 1.5, 1.6, 3.0], {"mode": "max", "patience": 2}),
        ([5.0, 4.9, 4.85, 4.0, 3.9], {"min_delta": 0.5, "patience": 2}),
        ([1.0, 1.3, 1.6, 2.2], {"min_delta": 0.5, "mode": "max", "patience": 2}),
        ([5.0, NAN], {}),
        ([5.0, INF], {}),
        ([5.0, NAN, INF, 4.0], {"check_finite": False}),
        ([5.0, 0.9], {"stopping_threshold": 1.0}),
        ([0.5, 0.95], {"stopping_threshold": 0.9, "mode": "max"}),
        ([5.0, 10.5], {"divergence_threshold": 10.0}),
        ([5.0, 0.5], {"divergence_threshold": 1.0, "mode": "max"}),
        ([5.0, 5.0, 5.0], {"patience": 2}),
    ],
    ids=str,
)
def test_decides_as_lightning(values, kwargs):
    from lightning.pytorch.callbacks import EarlyStopping as Theirs

    assert str(run(values, **kwargs)) == str(run(values, Theirs, **kwargs))  # as text, in which NaN equals NaN


def test_attributes_and_key_are_lightnings():
    from lightning.pytorch.callbacks import EarlyStopping as Theirs

    ours, theirs = EarlyStopping("m", mode="max", min_delta=0.1), Theirs("m", mode="max", min_delta=0.1)
    assert ours.state_key == theirs.state_key
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name in ("monitor", "min_delta", "patience", "mode", "strict", "wait_count", "stopped_epoch", "monitor_op"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [(r.name, r.value) for r in EarlyStoppingReason] == [(r.name, r.value) for r in type(theirs.stopping_reason)]


def test_stops_a_run_and_says_why(caplog):
    callback = EarlyStopping("val_loss", patience=2, verbose=True)
    trainer = FakeTrainer(callback, epochs=10)

    def log(trainer):
        trainer.callback_metrics["val_loss"] = torch.tensor([1.0, 0.5, 0.7, 0.6, 0.1][trainer.current_epoch])

    with caplog.at_level("INFO", logger="leyden"):
        trainer.fit(after_step=log)
    assert trainer.should_stop
    assert trainer.current_epoch == 4  # stopped in epoch 3
    assert callback.stopped_epoch == 3
    assert callback.best_score == 0.5
    assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert callback.stopping_reason_message == caplog.messages[-1]
    assert caplog.messages == [
        "val_loss improved to 1.000",
        "val_loss improved to 0.500, by 0.500 (min_delta = 0.0)",
        "val_loss has not improved in 2 checks; the best value is 0.500. Training stops.",
    ]


@pytest.mark.parametrize(
    ("interval", "every", "argument", "at_epoch_end"),
    [
        (1.0, 1, None, True),
        (0.5, 1, None, False),
        (1.0, 2, None, False),
        (10, 1, None, False),
        (0.5, 1, True, True),
        (1.0, 1, False, False),
    ],
)
def test_when_it_checks(interval, every, argument, at_epoch_end):
    callback = EarlyStopping("m", check_on_train_epoch_end=argument)
    checks = []
    callback._check = lambda trainer: checks.append(trainer)
    trainer = FakeTrainer(callback)
    trainer.val_check_interval, trainer.check_val_every_n_epoch = interval, every
    callback.setup(trainer, None, "fit")
    callback.on_validation_end(trainer, None)
    assert len(checks) == (not at_epoch_end)
    callback.on_train_epoch_end(trainer, None)
    assert len(checks) == 1


@pytest.mark.parametrize("what", ["sanity_checking", "fast_dev_run", "validate"])
def test_does_not_check(what):
    callback = EarlyStopping("missing")
    trainer = FakeTrainer(callback)
    trainer.state.fn = "validate" if what == "validate" else "fit"
    if what != "validate":
        setattr(trainer, what, True)
    callback.setup(trainer, None, "fit")
    callback.on_train_epoch_end(trainer, None)
    assert not trainer.should_stop


def test_missing_metric():
    trainer = FakeTrainer(EarlyStopping("val_los"), val=())
    trainer.callback_metrics["val_loss"] = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"'val_los'.*available: 'val_loss'.*strict=False"):
        trainer.fit()
    trainer = FakeTrainer(EarlyStopping("val_los", strict=False, verbose=True))
    with pytest.warns(RuntimeWarning, match="call self.log"):
        trainer.fit()
    assert trainer.current_epoch == 2
    with pytest.raises(MisconfigurationException, match="mode='sideways'"):
        EarlyStopping("m", mode="sideways")


def test_all_ranks_stop_when_one_does():
    callback = EarlyStopping("m", patience=1)
    trainer = FakeTrainer(callback)
    trainer.strategy.reduce_boolean_decision = lambda decision, all=True: True if not all else decision
    trainer.state.fn = "fit"
    trainer.callback_metrics["m"] = torch.tensor(1.0)
    callback.setup(trainer, None, "fit")
    callback.on_train_epoch_end(trainer, None)
    assert trainer.should_stop  # this rank's metric has improved


def test_state_goes_on_where_it_was_saved():
    first, second = EarlyStopping("m"), EarlyStopping("m")
    for value in (1.0, 2.0, 2.0):
        first._evaluate_stopping_criteria(torch.tensor(value))
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second._evaluate_stopping_criteria(torch.tensor(2.0))[0]
    for key in ("stopping_reason", "stopping_reason_message"):
        state.pop(key)
    EarlyStopping("m").load_state_dict(state)  # from before reasons were saved
