"""save_hyperparameters: what it finds, keeps and refuses."""

import copy
import pickle
import threading
from argparse import Namespace
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from leyden.core.datamodule import LightningDataModule
from leyden.core.hparams import AttributeDict
from leyden.core.module import LightningModule


class Plain(LightningModule):
    def __init__(self, lr: float = 0.1, *rest: Any, size: int = 3, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_all_arguments() -> None:
    net = Plain(0.5, 1, 2, size=4, extra="e")
    assert net.hparams == {"lr": 0.5, "size": 4, "extra": "e"}
    assert net.hparams.lr == 0.5
    assert net._hparams_name == "kwargs"
    assert net._log_hyperparams is True
    assert Plain().hparams == {"lr": 0.1, "size": 3}


def test_subclasses_add_theirs_and_win() -> None:
    class Child(Plain):
        def __init__(self, lr: float, own: int, **more: Any) -> None:
            super().__init__(99, size=7, given=1, **more)

    assert Child(1, 2, x=3).hparams == {"lr": 1, "size": 7, "given": 1, "x": 3, "own": 2}


def test_both_calls_add_up() -> None:
    class Child(Plain):
        def __init__(self, own: int) -> None:
            super().__init__()
            self.save_hyperparameters("own")

    assert Child(5).hparams == {"lr": 0.1, "size": 3, "own": 5}


def test_a_changed_argument_is_kept_as_changed() -> None:
    class Changing(LightningModule):
        def __init__(self, lr: float | None = None) -> None:
            super().__init__()
            lr = lr or 0.25
            self.save_hyperparameters()

    assert Changing().hparams == {"lr": 0.25}


def test_without_super_and_from_a_helper_method() -> None:
    class Odd(LightningModule):
        def __init__(me, lr: float) -> None:
            LightningModule.__init__(me)
            me.keep()

        def keep(self) -> None:
            self.save_hyperparameters()

    assert Odd(2).hparams == {"lr": 2}


def test_an_object_made_inside_another_keeps_its_own_only() -> None:
    class Outer(LightningModule):
        def __init__(self, lr: float, depth: int = 1) -> None:
            super().__init__()
            self.inner = Plain(9)
            self.save_hyperparameters()

    outer = Outer(1)
    assert outer.hparams == {"lr": 1, "depth": 1}
    assert outer.inner.hparams == {"lr": 9, "size": 3}


class Choosing(LightningModule):
    def __init__(self, *names: Any, a: int = 1, b: int = 2, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(*names, **options)


def test_names_and_ignore() -> None:
    assert Choosing("a").hparams == {"a": 1}
    net = Choosing("a", "b", logger=False)
    assert net.hparams == {"a": 1, "b": 2}
    assert not net._log_hyperparams
    assert Choosing(ignore="a").hparams == {"b": 2, "ignore": "a"}
    assert Choosing(ignore=["a", "ignore"]).hparams == {"b": 2}
    with pytest.raises(KeyError, match=r"'bb'.*not an argument of __init__; did you mean 'b'"):
        Choosing("bb")


@dataclass
class Config:
    lr: float = 0.5
    depth: int = 2


@pytest.mark.parametrize(
    "container", [{"lr": 0.5, "depth": 2}, Namespace(lr=0.5, depth=2), Config(), AttributeDict(lr=0.5, depth=2)]
)
def test_one_container(container: Any) -> None:
    class Whole(LightningModule):
        def __init__(self, cfg: Any, other: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(cfg)

    net = Whole(container)
    assert net.hparams == {"lr": 0.5, "depth": 2}
    assert net.hparams.depth == 2
    assert net._hparams_name == "cfg"


def test_a_container_that_is_no_argument() -> None:
    class Whole(LightningModule):
        def __init__(self, cfg: dict) -> None:
            super().__init__()
            self.save_hyperparameters({**cfg, "more": 1})
            self.save_hyperparameters({"again": 2})

    net = Whole({"lr": 1})
    assert net.hparams == {"lr": 1, "more": 1, "again": 2}
    assert net._hparams_name is None


def test_a_mapping_of_another_kind_stays_what_it_is() -> None:
    class Whole(LightningModule):
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters(cfg, ignore="b")

    net = Whole(UserDict(a=1, b=2))
    assert type(net.hparams) is UserDict
    assert net.hparams == {"a": 1}


@pytest.mark.parametrize("nothing", [{}, "", Namespace()])
def test_nothing_given(nothing: Any) -> None:
    class Whole(LightningModule):
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters(nothing)

    assert Whole(1).hparams == {}


@pytest.mark.parametrize("wrong", [3, 1.5, [1], True])
def test_what_can_not_be_kept(wrong: Any) -> None:
    class Whole(LightningModule):
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters(cfg)

    with pytest.raises(ValueError, match=f"can't keep a {type(wrong).__name__}"):
        Whole(wrong)
    with pytest.raises(ValueError, match="got 2 containers"):
        Choosing({"a": 1}, {"b": 1})


def test_modules_warn_and_stay_out_of_the_state_dict() -> None:
    class Wrapper(LightningModule):
        def __init__(self, backbone: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(UserWarning, match=r"'backbone' is an nn.Module.*ignore=\['backbone'\]"):
        net = Wrapper(nn.Linear(1, 1))
    assert net.state_dict() == {}
    assert list(net.children()) == []


def test_initial_values_do_not_follow_changes() -> None:
    net = Plain(0.5, layers=[1])
    net.hparams.lr = 7
    net.hparams.layers.append(2)
    assert net.hparams_initial == {"lr": 0.5, "size": 3, "layers": [1]}
    net.hparams_initial["lr"] = 8
    assert net.hparams_initial.lr == 0.5
    assert LightningModule().hparams_initial == {}
    assert LightningModule().hparams == {}


def test_values_that_can_not_be_copied() -> None:
    lock = threading.Lock()
    net = Plain(0.5, lock=lock)
    assert net.hparams_initial.lock is lock


def test_dataclass_modules_and_datamodules() -> None:
    @dataclass
    class Data(LightningDataModule):
        batch_size: int = 4

        def __post_init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert Data(8).hparams == {"batch_size": 8}


def test_attribute_dict() -> None:
    values = AttributeDict(lr=0.1, batch=3)
    values.depth = 2
    assert values["depth"] == 2
    del values.depth
    assert "depth" not in values
    assert repr(values) == '"lr":    0.1\n"batch": 3'
    assert "lr" in dir(values)
    with pytest.raises(AttributeError, match="Missing attribute 'bach'; did you mean 'batch'"):
        values.bach
    with pytest.raises(AttributeError, match="Missing attribute 'x'"):
        del values.x
    for twin in (copy.deepcopy(values), pickle.loads(pickle.dumps(values)), copy.copy(values)):
        assert type(twin) is AttributeDict
        assert twin == values


def test_hparams_survive_pickling_and_copying() -> None:
    net = copy.deepcopy(Plain(0.5))
    assert net.hparams.lr == 0.5
    assert net.hparams_initial.lr == 0.5
