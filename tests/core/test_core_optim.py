"""configure_optimizers in all its forms, and the optimizer that users step."""

import copy
import pickle
import warnings
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from leyden.base.errors import MisconfigurationException
from leyden.core.module import LightningModule
from leyden.core.optim import LightningOptimizer, LRSchedulerConfig, NoOptimizer, configure_optimizers, grad_clipping


class Net(LightningModule):
    """Returns ``make(optimizer)`` from configure_optimizers."""

    def __init__(self, make: Any, automatic: bool = True) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.make = make
        self.automatic_optimization = automatic

    def configure_optimizers(self) -> Any:
        self.made = SGD(self.parameters(), lr=0.1)
        return self.make(self.made)


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer)


def step(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda o: o, 0),
        (lambda o: [o], 0),
        (lambda o: (o,), 0),
        (lambda o: ([o], [step(o)]), 1),
        (lambda o: ([o], step(o)), 1),
        (lambda o: ([o], []), 0),
        (lambda o: ([o], None), 0),
        (lambda o: [[o], [step(o), {"scheduler": step(o)}]], 2),
        (lambda o: {"optimizer": o}, 0),
        (lambda o: {"optimizer": o, "lr_scheduler": None}, 0),
        (lambda o: {"optimizer": o, "lr_scheduler": step(o)}, 1),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": step(o)}}, 1),
        (lambda o: ({"optimizer": o, "lr_scheduler": step(o)},), 1),
        (lambda o: [{"optimizer": o}], 0),
    ],
)
def test_forms(make: Any, count: int) -> None:
    module = Net(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers, configs = configure_optimizers(module)
    assert optimizers == [module.made]
    assert [type(config.scheduler) for config in configs] == [StepLR] * count
    assert all(config == LRSchedulerConfig(config.scheduler) for config in configs)


def test_a_scheduler_dict_is_read_and_left_alone() -> None:
    given: dict[str, Any] = {}

    def make(optimizer: Optimizer) -> Any:
        given.update(scheduler=step(optimizer), interval="step", frequency=3, monitor="m", strict=False, name="n")
        return {"optimizer": optimizer, "lr_scheduler": given}

    _, [config] = configure_optimizers(Net(make))
    assert config == LRSchedulerConfig(given["scheduler"], "n", "step", 3, False, "m", False)
    assert "reduce_on_plateau" not in given


def test_plateau() -> None:
    _, [config] = configure_optimizers(
        Net(lambda o: {"optimizer": o, "lr_scheduler": plateau(o), "monitor": "val_loss"})
    )
    assert config.reduce_on_plateau
    assert config.monitor == "val_loss"
    _, [config] = configure_optimizers(
        Net(lambda o: [{"optimizer": o, "lr_scheduler": {"scheduler": plateau(o)}, "monitor": "val_loss"}])
    )
    assert config.monitor == "val_loss"
    for make in (lambda o: ([o], [plateau(o)]), lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o)}}):
        with pytest.raises(MisconfigurationException, match=r'ReduceLROnPlateau needs.*"monitor": "val_loss"'):
            configure_optimizers(Net(make))


def test_none_trains_without_an_optimizer() -> None:
    for nothing in (None, [], ([], [])):
        with pytest.warns(UserWarning, match="this run optimizes nothing"):
            [optimizer], configs = configure_optimizers(Net(lambda o, nothing=nothing: nothing))
        assert isinstance(optimizer, NoOptimizer)
        assert configs == []
        assert optimizer.state_dict() == {}
        assert optimizer.step(lambda: 3) == 3
        assert optimizer.step() is None
        optimizer.zero_grad()
        optimizer.load_state_dict({"state": 1})
    assert configure_optimizers(Net(lambda o: [], automatic=False)) == ([], [])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda o: 3, "returned int"),
        (lambda o: "adam", "returned str"),
        (lambda o: [o, 3], r"returned \[SGD, int\]"),
        (lambda o: (o, step(o)), r"returned \(SGD, StepLR\)"),
        (lambda o: {"lr_scheduler": step(o)}, '"optimizer" is NoneType'),
        (lambda o: [{"optimizer": 3}], '"optimizer" is int'),
        (lambda o: ([o], [{"interval": "step"}]), 'lacks its key "scheduler"'),
        (lambda o: ([o], [{"scheduler": step(o), "interval": "batch"}]), "\"interval\": 'batch'"),
        (lambda o: ([o], [{"scheduler": step(o), "frequency": 0}]), '"frequency": 0'),
        (lambda o: ([o], [step(Adam([torch.zeros(1)]))]), r"StepLR belongs to a Adam .* it returned \[SGD\]"),
    ],
)
def test_wrong_forms(make: Any, text: str) -> None:
    with pytest.raises(MisconfigurationException, match=text):
        configure_optimizers(Net(make))


def test_all_problems_in_one_error() -> None:
    def make(optimizer: Optimizer) -> Any:
        return [optimizer, SGD([torch.zeros(1)])], [{"scheduler": step(optimizer), "interval": "day", "frequency": -1}]

    with pytest.raises(MisconfigurationException, match=r"Net.configure_optimizers\(\): 3 problems\n  1\. ") as caught:
        configure_optimizers(Net(make))
    assert "'day'" in str(caught.value)
    assert "-1" in str(caught.value)
    assert "automatic_optimization = False" in str(caught.value)


def test_several_optimizers_need_manual_optimisation() -> None:
    with pytest.raises(RuntimeError, match=r"2 optimizers in automatic optimization.*manual optimization"):
        configure_optimizers(Net(lambda o: [o, o]))
    optimizers, _ = configure_optimizers(Net(lambda o: [o, o], automatic=False))
    assert len(optimizers) == 2

    class Old(Net):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> None: ...

    with pytest.raises(RuntimeError, match="`training_step` takes `optimizer_idx`"):
        configure_optimizers(Old(lambda o: o))


def test_unknown_keys_warn() -> None:
    with pytest.warns(RuntimeWarning, match=r"a dict with the keys \['lr'\]"):
        configure_optimizers(Net(lambda o: {"optimizer": o, "lr": 1}))
    with pytest.warns(RuntimeWarning, match=r"a scheduler dict with the keys \['foo'\]"):
        configure_optimizers(Net(lambda o: ([o], [{"scheduler": step(o), "foo": 1}])))
    with pytest.warns(RuntimeWarning, match='OneCycleLR.*"interval": "step"'):
        configure_optimizers(Net(lambda o: ([o], [{"scheduler": OneCycleLR(o, 1, 3)}])))


def test_manual_optimisation_ignores_what_it_has_no_use_for() -> None:
    with pytest.warns(RuntimeWarning, match=r"\['monitor', 'strict'\] of a scheduler dict are ignored"):
        _, [config] = configure_optimizers(
            Net(lambda o: ([o], [{"scheduler": plateau(o), "monitor": "x", "strict": True}]), automatic=False)
        )
    assert config == LRSchedulerConfig(config.scheduler)


class OtherScheduler:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


def test_schedulers_that_are_not_of_torch() -> None:
    with pytest.raises(MisconfigurationException, match=r"OtherScheduler.*override `lr_scheduler_step"):
        configure_optimizers(Net(lambda o: ([o], [OtherScheduler(o)])))

    class Stepping(Net):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None: ...

    assert len(configure_optimizers(Stepping(lambda o: ([o], [OtherScheduler(o)])))[1]) == 1
    with pytest.raises(TypeError, match="object can't be saved"):
        configure_optimizers(Net(lambda o: ([o], [object()])))
    chained = configure_optimizers(Net(lambda o: ([o], [SequentialLR(o, [step(o), step(o)], [1])])))[1]
    assert type(chained[0].scheduler) is SequentialLR


def test_an_object_with_an_optimizers_interface_is_one() -> None:
    class Duck:
        step = zero_grad = state_dict = load_state_dict = lambda self: None
        param_groups: list = []
        defaults: dict = {}
        state: dict = {}

    duck = Duck()
    assert configure_optimizers(Net(lambda o: duck))[0] == [duck]


class Strategy:
    """Steps the optimizer, and says what it was asked."""

    def __init__(self, module: Any = None) -> None:
        self.lightning_module = module
        self.asked: list[Any] = []
        self.no_syncs = 0

    def optimizer_step(self, optimizer: Optimizer, closure: Any, **kwargs: Any) -> Any:
        self.asked.append((optimizer, kwargs))
        return optimizer.step(closure, **kwargs)

    @contextmanager
    def no_sync(self):
        self.no_syncs += 1
        yield


def test_the_wrapper_passes_for_the_optimizer_inside() -> None:
    inner = Adam([torch.zeros(1, requires_grad=True)], lr=0.5)
    optimizer = LightningOptimizer(inner, Strategy())
    assert isinstance(optimizer, Adam)
    assert isinstance(optimizer, Optimizer)
    assert isinstance(optimizer, LightningOptimizer)
    assert not isinstance(optimizer, SGD)
    assert optimizer.__class__.__name__ == "Adam"
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state_dict() == inner.state_dict()
    assert repr(optimizer).startswith("LightningAdam (")
    optimizer.defaults = {"lr": 3}
    assert inner.defaults == {"lr": 3}
    with pytest.raises(AttributeError, match="no_such_thing"):
        optimizer.no_such_thing
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(twin, LightningOptimizer)
        assert twin.param_groups[0]["lr"] == 0.5
        assert twin.optimizer is not inner


def test_step_goes_through_the_strategy_and_counts() -> None:
    parameter = torch.ones(1, requires_grad=True)
    strategy = Strategy()
    optimizer = LightningOptimizer(SGD([parameter], lr=0.5), strategy)
    events: list[str] = []
    optimizer._on_before_step = lambda: events.append("before")
    optimizer._on_after_step = lambda: events.append("after")

    def closure() -> torch.Tensor:
        events.append("closure")
        optimizer.zero_grad()
        loss = (parameter * 2).sum()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure).item() == 2
    assert events == ["before", "closure", "after"]
    assert parameter.item() == 0
    assert strategy.asked == [(optimizer.optimizer, {})]
    assert optimizer.step() is None
    assert len(events) == 5
    with pytest.raises(MisconfigurationException, match="closure=3"):
        optimizer.step(3)  # type: ignore[arg-type]


def test_a_scheduler_on_the_wrapper_does_not_step_in_circles() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = LightningOptimizer(SGD([parameter], lr=0.5), Strategy())
    scheduler = StepLR(optimizer, 1, gamma=0.1)
    parameter.grad = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert parameter.item() == 0.5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


class Trainer:
    barebones = False
    _metrics = None
    gradient_clip_val = None
    gradient_clip_algorithm = None


def test_toggle_model() -> None:
    module = LightningModule()
    module.a, module.b = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    module.b.bias.requires_grad_(False)
    strategy = Strategy(module)
    trainer = Trainer()
    trainer.optimizers = [SGD(module.a.parameters()), SGD(module.b.parameters())]  # type: ignore[attr-defined]
    module.trainer = trainer  # type: ignore[assignment]
    first, second = (LightningOptimizer(o, strategy) for o in trainer.optimizers)  # type: ignore[attr-defined]

    def wants() -> list[bool]:
        return [p.requires_grad for p in module.parameters()]

    with first.toggle_model():
        assert wants() == [True, True, False, False]
    assert wants() == [True, True, True, False]
    assert strategy.no_syncs == 0
    with suppress(ZeroDivisionError), second.toggle_model(sync_grad=False):
        assert wants() == [False, False, True, False]
        raise ZeroDivisionError
    assert wants() == [True, True, True, False], "an error in the block leaves nothing frozen"
    assert strategy.no_syncs == 1


def test_grad_clipping() -> None:
    assert grad_clipping(None, None, None, None) == (0.0, "norm")
    assert grad_clipping(None, None, 0.5, "value") == (0.5, "value")
    assert grad_clipping(2, "NORM", None, None) == (2, "norm")
    assert grad_clipping(0.5, "value", 0.5, "value") == (0.5, "value")
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=1.*gradient_clip_val=0.5"):
        grad_clipping(1, None, 0.5, None)
    with pytest.raises(MisconfigurationException, match=r"algorithm='norm'.*algorithm='value'"):
        grad_clipping(None, "norm", None, "value")
    with pytest.raises(MisconfigurationException, match=r"='other' must be 'norm' or 'value'"):
        grad_clipping(1, "other", None, None)
    with pytest.raises(TypeError, match=r"gradient_clip_val='x' must be a number"):
        grad_clipping("x", None, None, None)
