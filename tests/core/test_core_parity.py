"""The public surface of the core classes against Lightning's."""

import inspect
from typing import Any

import pytest

from leyden.core.callback import Callback
from leyden.core.datamodule import LightningDataModule
from leyden.core.hooks import HOOKS
from leyden.core.module import LightningModule
from leyden.core.optim import LightningOptimizer, LRSchedulerConfig

L = pytest.importorskip("lightning.pytorch")


def members(cls: type, beside: type = object) -> dict[str, Any]:
    return {
        name: value
        for name in dir(cls)
        if not name.startswith("_") and (value := inspect.getattr_static(cls, name)) is not None
        if not hasattr(beside, name)
    }


@pytest.mark.parametrize("ours", [LightningModule, LightningDataModule, Callback])
def test_every_name_of_lightning_is_there(ours: type) -> None:
    import torch

    theirs = getattr(L, ours.__name__)
    missing = members(theirs, torch.nn.Module).keys() - set(dir(ours))
    assert missing == set()
    added = members(ours, torch.nn.Module).keys() - set(dir(theirs)) - set(vars(theirs()))
    assert added == set(), "a name more is a name that a user's class may have"


@pytest.mark.parametrize("ours", [LightningModule, LightningDataModule, Callback, LightningOptimizer])
def test_arguments_and_defaults(ours: type) -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer as TheirOptimizer

    theirs = TheirOptimizer if ours is LightningOptimizer else getattr(L, ours.__name__)
    for name in members(theirs):
        method, mine = (inspect.getattr_static(cls, name, None) for cls in (theirs, ours))
        method, mine = getattr(method, "method", method), getattr(mine, "method", mine)  # classmethods of both kinds
        if not (inspect.isfunction(method) and inspect.isfunction(mine)):
            continue
        wanted, have = (list(inspect.signature(f).parameters.values()) for f in (method, mine))
        assert [(p.name, p.kind, p.default) for p in have] == [(p.name, p.kind, p.default) for p in wanted], name


def test_log_rules() -> None:
    from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

    for name, rule in _FxValidator.functions.items():
        ours = HOOKS[name].log
        assert (ours is None) == (rule is None), name
        if ours is not None and rule is not None:
            assert ours.__dict__ == dict(rule), name


def test_scheduler_config() -> None:
    from lightning.pytorch.utilities.types import LRSchedulerConfig as Theirs

    scheduler = object()
    assert vars(LRSchedulerConfig(scheduler)) == vars(Theirs(scheduler))  # type: ignore[arg-type]
