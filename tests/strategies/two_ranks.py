"""Runs a function in two real processes that share a gloo group; forked, so a test costs tenths of a second."""

from types import SimpleNamespace

import torch
from torch import nn

from leyden.dist.devices import CPUAccelerator
from leyden.dist.env import LightningEnvironment
from leyden.strategies.ddp import DDPStrategy


class FakeTrainer:
    """As much of a Trainer as a strategy asks for."""

    def __init__(self, module, make_optimizers=None, fn="fit"):
        self.module = module
        self.state = SimpleNamespace(fn=fn)
        self.make_optimizers = make_optimizers or (lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)])

    def init_optimizers(self):
        return self.make_optimizers(self.module), []


class Regression(nn.Module):
    """A module with a buffer and a training step; what a strategy knows of a LightningModule."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x):
        return self.layer(x) + self.offset

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        return self(batch)

    test_step = predict_step = validation_step


def ddp_strategy(num_processes=2, **kwargs):
    kwargs.setdefault("start_method", "fork")
    return DDPStrategy(
        accelerator=CPUAccelerator(),
        parallel_devices=[torch.device("cpu")] * num_processes,
        cluster_environment=LightningEnvironment(),
        **kwargs,
    )


def prepared(strategy, module, **kwargs):
    """The strategy with the module, as after the Trainer's setup."""
    trainer = FakeTrainer(module, **kwargs)
    strategy.connect(module)
    strategy.setup_environment()
    strategy.setup(trainer)
    return strategy


def run_on_two_ranks(function, *args):
    """Calls ``function(*args)`` in two processes and returns rank 0's result; an assert that fails in either raises."""
    strategy = ddp_strategy()
    strategy.configure_launcher()
    return strategy.launcher.launch(_alone, function, args)


def _alone(function, args):
    torch.set_num_threads(1)  # a pool of threads that the parent used can't be used again after a fork
    return function(*args)
