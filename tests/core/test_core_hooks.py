"""The hook table, and the questions asked about hooks."""

import functools
from typing import Any
from unittest.mock import Mock

import pytest

from leyden.base.errors import MisconfigurationException
from leyden.core.callback import Callback
from leyden.core.datamodule import LightningDataModule
from leyden.core.hooks import HOOKS, check_removed_hooks, is_overridden, is_untouched, log_levels
from leyden.core.module import LightningModule


@pytest.mark.parametrize("hook", HOOKS.values(), ids=lambda hook: hook.name)
def test_each_row_agrees_with_the_classes(hook: Any) -> None:
    assert hook.callback == (hasattr(Callback, hook.name))
    assert hook.datamodule == (hasattr(LightningDataModule, hook.name))
    if hook.name not in ("state_dict", "load_state_dict"):  # nn.Module's own
        assert hook.module == (hasattr(LightningModule, hook.name))


def test_every_callback_hook_is_in_the_table() -> None:
    named = {name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_")}
    assert named <= HOOKS.keys()


def test_order_of_a_step() -> None:
    names = [
        "setup",
        "configure_optimizers",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_before_batch_transfer",
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_start",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]
    order = list(HOOKS)
    assert [order.index(name) for name in names] == sorted(order.index(name) for name in names)


def test_log_levels() -> None:
    assert log_levels("training_step", None, None) == (True, False)
    assert log_levels("training_step", False, True) == (False, True)
    assert log_levels("validation_step", None, None) == (False, True)
    assert log_levels("validation_step", True, None) == (True, True)
    assert log_levels("on_train_epoch_end", None, None) == (False, True)
    with pytest.raises(MisconfigurationException, match=r"on_step=True.*inside `on_train_epoch_end`"):
        log_levels("on_train_epoch_end", True, None)
    with pytest.raises(MisconfigurationException, match=r"on_epoch=False.*inside `on_validation_start`"):
        log_levels("on_validation_start", None, False)
    with pytest.raises(MisconfigurationException, match=r"`self.log` does not work inside `on_fit_start`"):
        log_levels("on_fit_start", None, None)
    with pytest.raises(MisconfigurationException, match="did you mean 'training_step'"):
        log_levels("trainning_step", None, None)


class Own(LightningModule):
    def on_train_start(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class MixIn:
    def on_train_end(self) -> None:
        pass


class Mixed(MixIn, LightningModule):
    pass


def test_overridden_by_class_and_mix_in() -> None:
    module = Own()
    assert is_overridden("on_train_start", module)
    assert is_overridden("validation_step", module, LightningModule)
    assert not is_overridden("on_train_end", module)
    assert not is_overridden("test_step", module)
    assert is_overridden("on_train_end", Mixed())
    assert not is_overridden("no_such_hook", module)
    assert not is_overridden("on_train_start", None)


def test_overridden_by_an_attribute_of_the_instance() -> None:
    module = Own()
    module.on_train_end = lambda: None
    assert is_overridden("on_train_end", module)
    module.validation_step = None
    assert not is_overridden("validation_step", module), "None takes a step away"
    module.test_step = Mock()
    assert is_overridden("test_step", module), "a bare Mock wants to be called"


def test_wrappers_of_the_default_do_not_override_but_touch() -> None:
    module = LightningModule()
    wrappers = {
        "on_train_start": functools.partial(module.on_train_start),
        "on_train_end": functools.wraps(module.on_train_end)(lambda: None),
        "on_fit_start": Mock(wraps=module.on_fit_start),
        "on_fit_end": functools.partial(functools.partial(module.on_fit_end)),
    }
    for name, wrapper in wrappers.items():
        assert is_untouched(name, module)
        setattr(module, name, wrapper)
        assert not is_overridden(name, module), name
        assert not is_untouched(name, module), name


def test_wrappers_of_an_override_override() -> None:
    module = Own()
    module.on_train_start = functools.partial(module.on_train_start)
    assert is_overridden("on_train_start", module)
    module.validation_step = Mock(wraps=module.validation_step)
    assert is_overridden("validation_step", module)


def test_base_is_found_by_kind_of_object() -> None:
    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            pass

    class Watch(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            pass

    assert is_overridden("setup", Data())
    assert not is_overridden("teardown", Data())
    assert is_overridden("on_exception", Watch())
    assert not is_overridden("setup", Watch())
    with pytest.raises(ValueError, match="object is neither a LightningModule"):
        is_overridden("__init__", object())


def test_objects_of_lightning_are_refused_by_name() -> None:
    foreign = type("Net", (), {"__module__": "lightning.pytorch.core.module", "setup": lambda self: None})()
    with pytest.raises(TypeError, match=r"based on `lightning.pytorch.core.module.Net`.*import leyden as L"):
        is_overridden("setup", foreign)


@pytest.mark.parametrize("name", ["training_epoch_end", "validation_epoch_end", "test_epoch_end"])
def test_removed_hooks(name: str) -> None:
    module = type("Old", (LightningModule,), {name: lambda self, outputs: None})()
    with pytest.raises(NotImplementedError, match=rf"Old\.{name}\(outputs\).*`on_\w+_epoch_end\(self\)`"):
        check_removed_hooks(module)
    check_removed_hooks(LightningModule())
