import pytest
import torch
from fake_run import FakeTrainer
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from leyden.base.errors import MisconfigurationException
from leyden.callbacks import LearningRateMonitor


def param():
    return torch.nn.Parameter(torch.zeros(1))


class Config:
    def __init__(self, scheduler, interval="epoch", name=None):
        self.scheduler, self.interval, self.name = scheduler, interval, name


class ListLogger:
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics))


def scenario(optimizers, configs=()):
    trainer = FakeTrainer(loggers=[ListLogger()], train=2, epochs=2, val=())
    trainer.optimizers, trainer.lr_scheduler_configs = optimizers, list(configs)
    return trainer


def two_sgd():
    return [SGD([param()], lr=0.1), SGD([param()], lr=0.2)]


def groups(names=(None, None)):
    return [Adam([{"params": [param()], **({"name": n} if n else {})} for n in names], lr=0.1)]


def scheduled(optimizers, **kwargs):
    return optimizers, [Config(StepLR(optimizer, 1), **kwargs) for optimizer in optimizers]


SCENARIOS = {
    "one": lambda: (two_sgd()[:1], []),
    "two of a class": lambda: (two_sgd(), []),
    "two classes": lambda: ([Adam([param()]), SGD([param()], lr=0.1), AdamW([param()])], []),
    "groups": lambda: (groups(), []),
    "named groups": lambda: (groups(("head", "body")), []),
    "one named group": lambda: (groups(("head",)), []),
    "half named": lambda: (groups(("head", None)), []),
    "scheduled": lambda: scheduled(two_sgd()),
    "scheduled by step": lambda: scheduled(two_sgd(), interval="step"),
    "named schedulers": lambda: scheduled(two_sgd(), name="mine"),
    "one of two scheduled": lambda: (lambda o: (o, [Config(StepLR(o[1], 1))]))(two_sgd()),
    "scheduled groups": lambda: scheduled(groups(("a", "b")), name="x", interval="step"),
}


def drive(callback, trainer, module=None):
    callback.on_train_start(trainer, module)
    for _ in range(2):
        callback.on_train_epoch_start(trainer, module)
        for index in range(2):
            callback.on_train_batch_start(trainer, module, None, index)
            trainer.fit_loop.epoch_loop._batches_that_stepped += 1
        for config in trainer.lr_scheduler_configs:
            config.scheduler.optimizer.step()
            config.scheduler.step()
    return trainer.loggers[0].rows


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_logs_what_lightning_logs(name, interval):
    from types import SimpleNamespace

    from lightning.pytorch.callbacks import LearningRateMonitor as Theirs

    results = []
    for cls in (LearningRateMonitor, Theirs):
        trainer = scenario(*SCENARIOS[name]())
        trainer._logger_connector = SimpleNamespace(should_update_logs=True)
        trainer.strategy.root_device = torch.device("cpu")
        callback = cls(interval, log_momentum=True, log_weight_decay=True)
        rows = drive(callback, trainer)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        last = (callback.last_momentum_values, callback.last_weight_decay_values)
        results.append((rows, metrics, dict(callback.lrs), last))
    assert results[0] == results[1]
    assert results[0][0]


def test_step_axis_and_due_steps_only():
    trainer = scenario(two_sgd()[:1])
    trainer.should_update_logs = False
    callback = LearningRateMonitor("step")
    assert drive(callback, trainer) == []
    trainer.should_update_logs = True
    callback.on_train_batch_start(trainer, None, None, 0)
    assert trainer.loggers[0].rows == [(4, {"lr-SGD": 0.1})]


def test_a_scheduler_that_has_no_optimizer():
    """One that the module steps itself: the rates are those of the optimizers, whoever sets them."""
    trainer = scenario(two_sgd()[:1], [Config(object(), "step")])
    callback = LearningRateMonitor()
    callback.on_train_start(trainer, None)
    callback.on_train_epoch_start(trainer, None)
    assert trainer.loggers[0].rows == [(0, {"lr-SGD": 0.1})]


def test_prefix_and_tensor_rates():
    trainer = scenario([SGD([param()], lr=torch.tensor(0.5))])
    callback = LearningRateMonitor("epoch", log_key_prefix="opt/")
    assert drive(callback, trainer)[0] == (0, {"opt/lr-SGD": 0.5})


def test_a_group_that_is_added_while_training():
    trainer = scenario(two_sgd()[:1])
    callback = LearningRateMonitor("epoch")
    callback.on_train_start(trainer, None)
    callback.on_train_epoch_start(trainer, None)
    trainer.optimizers[0].add_param_group({"params": [param()], "lr": 0.7})
    callback.on_train_epoch_start(trainer, None)
    assert callback.lrs == {"lr-SGD/pg1": [0.1, 0.1], "lr-SGD/pg2": [0.7]}
    assert trainer.loggers[0].rows[-1] == (0, {"lr-SGD/pg1": 0.1, "lr-SGD/pg2": 0.7})


def test_errors_and_warnings():
    with pytest.raises(MisconfigurationException, match=r"logging_interval='batch'. must be"):
        LearningRateMonitor("batch")
    trainer = scenario(two_sgd())
    trainer.loggers = []
    with pytest.raises(MisconfigurationException, match="needs a logger"):
        LearningRateMonitor().on_train_start(trainer, None)
    with pytest.raises(MisconfigurationException, match="named 'a'"):
        LearningRateMonitor().on_train_start(scenario(groups(("a", "a"))), None)
    trainer = scenario([torch.optim.Adagrad([param()])])
    with pytest.warns(RuntimeWarning, match="neither momentum nor betas"):
        LearningRateMonitor(log_momentum=True).on_train_start(trainer, None)
