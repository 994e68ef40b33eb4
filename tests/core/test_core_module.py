"""LightningModule by itself, with the smallest trainer that it can talk to."""

import copy
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden.base import log as log_module
from leyden.base.errors import MisconfigurationException
from leyden.core.module import LightningModule
from leyden.core.optim import LightningOptimizer


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Metrics:
    def __init__(self) -> None:
        self.logged: list[tuple] = []

    def log(self, *args: Any) -> None:
        self.logged.append(args)


def make_trainer(**overrides: Any) -> Any:
    values: dict[str, Any] = {
        "_metrics": Metrics(),
        "_lightning_optimizers": [],
        "barebones": False,
        "callbacks": [],
        "current_epoch": 3,
        "global_rank": 1,
        "global_step": 7,
        "gradient_clip_algorithm": None,
        "gradient_clip_val": None,
        "is_global_zero": True,
        "local_rank": 1,
        "logger": "logger",
        "loggers": ["logger"],
        "lr_scheduler_configs": [],
        "optimizers": [],
        "progress_bar_callback": None,
    }
    return SimpleNamespace(**{**values, **overrides})


@pytest.fixture(autouse=True)
def say_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_said", set())


def test_without_a_trainer() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="Net has no trainer"):
        net.trainer
    assert (net.current_epoch, net.global_step, net.global_rank, net.local_rank) == (0, 0, 0, 0)
    assert net.logger is None
    assert net.loggers == []
    assert net.fabric is None
    assert net.device_mesh is None
    assert not net.on_gpu
    with pytest.warns(UserWarning, match="isn't attached to a trainer"):
        net.log("loss", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.log("loss", 1)
        net.log_dict({"a": 1})


def test_the_trainer_reaches_modules_at_any_depth() -> None:
    net = Net()
    net.inner = nn.Sequential(nn.ModuleDict({"deep": Net()}))
    trainer = make_trainer()
    net.trainer = trainer
    assert net.inner[0]["deep"].trainer is trainer
    assert (net.current_epoch, net.global_step, net.global_rank, net.local_rank) == (3, 7, 1, 1)
    assert net.logger == "logger"
    net.trainer = None
    assert net.inner[0]["deep"]._trainer is None


def test_copies_have_no_trainer() -> None:
    net = Net()
    net.trainer = make_trainer()
    assert copy.deepcopy(net)._trainer is None
    assert pickle.loads(pickle.dumps(net))._trainer is None
    assert net._trainer is not None
    assert net.state_dict().keys() == {"layer.weight", "layer.bias"}


def test_log_is_one_call() -> None:
    net = Net()
    trainer = net.trainer = make_trainer()
    net.log("loss", 1.0, prog_bar=True, on_step=True, batch_size=4, rank_zero_only=True)
    assert trainer._metrics.logged == [
        ("loss", 1.0, True, None, True, None, "mean", False, False, None, True, 4, None, True)
    ]
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    net.log("loss", 1.0)
    sys.setprofile(None)
    assert calls == 2, "log itself, and the collection's log"


def test_log_dict() -> None:
    net = Net()
    trainer = net.trainer = make_trainer()
    net.log_dict({"a": 1, "b": 2}, on_epoch=True, add_dataloader_idx=False)
    assert [row[:2] for row in trainer._metrics.logged] == [("a", 1), ("b", 2)]
    assert trainer._metrics.logged[1] == (
        "b", 2, False, None, None, True, "mean", False, False, None, False, None, None, False,
    )  # fmt: skip


def test_log_dict_of_a_metric_collection() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    net = Net()
    net.metrics = torchmetrics.MetricCollection(
        [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()], prefix="val_"
    )
    trainer = net.trainer = make_trainer()
    net.log_dict(net.metrics)
    assert {row[0]: row[1] for row in trainer._metrics.logged} == {
        "val_MeanSquaredError": net.metrics["MeanSquaredError"],
        "val_MeanAbsoluteError": net.metrics["MeanAbsoluteError"],
    }
    assert all(any(row[1] is metric for metric in net.modules()) for row in trainer._metrics.logged)


def test_log_where_nothing_collects() -> None:
    net = Net()
    net.trainer = make_trainer(_metrics=None)
    with pytest.raises(MisconfigurationException, match="hook of predict"):
        net.log("loss", 1)
    with pytest.raises(MisconfigurationException, match="'a, b'"):
        net.log_dict({"a": 1, "b": 2})
    net.trainer = make_trainer(_metrics=None, barebones=True)
    with pytest.warns(UserWarning, match="barebones=True"):
        net.log("loss", 1)


def test_device_and_dtype_follow_the_module() -> None:
    net = Net()
    net.inner = nn.ModuleList([Net()])
    assert net.device == torch.device("cpu")
    assert net.dtype == torch.float32
    for change, dtype in (
        (lambda: net.double(), torch.float64),
        (lambda: net.half(), torch.float16),
        (lambda: net.bfloat16(), torch.bfloat16),
        (lambda: net.float(), torch.float32),
        (lambda: net.to(torch.float64), torch.float64),
        (lambda: net.type(torch.float32), torch.float32),
    ):
        assert change() is net
        assert net.dtype == net.inner[0].dtype == dtype == net.layer.weight.dtype
    net.to("meta", torch.float16)
    assert net.device == net.inner[0].device == torch.device("meta")
    assert net.dtype == torch.float16
    assert net.layer.weight.is_meta
    assert Net().to(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    assert Net().cpu().device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="dtype can't be set"):
        net.dtype = torch.float32
    net._device = torch.device("cuda", 3)
    assert net.on_gpu, "a strategy sets the device ahead of the move"
    with torch.device("meta"):
        assert Net().device == torch.device("meta")


def test_steps_by_default() -> None:
    net = Net()
    with pytest.warns(UserWarning, match="Net has no `training_step`"):
        assert net.training_step() is None
    with pytest.warns(UserWarning, match="Net has no `configure_optimizers`"):
        assert net.configure_optimizers() is None
    assert net.validation_step() is None
    assert net.test_step() is None
    assert net.configure_callbacks() == []
    assert net.predict_step(torch.ones(1, 2), 0).shape == (1, 3)
    assert net.predict_step(batch=torch.ones(4, 2), batch_idx=0).shape == (4, 3)
    with pytest.raises(NotImplementedError):
        LightningModule()(1)
    for name in ("train", "val", "test", "predict"):
        with pytest.raises(MisconfigurationException, match=f"has no `{name}_dataloader`"):
            getattr(net, f"{name}_dataloader")()


def test_settings() -> None:
    net = Net()
    assert net.automatic_optimization
    net.automatic_optimization = False
    assert not net.automatic_optimization
    assert net.strict_loading
    assert net._strict_loading is None
    net.strict_loading = False
    assert not net.strict_loading
    net.example_input_array = torch.ones(1)
    assert net.example_input_array.item() == 1
    assert net.prepare_data_per_node
    assert not net.allow_zero_length_dataloader_with_multiple_devices


def test_optimizers_and_schedulers() -> None:
    net = Net()
    raw = torch.optim.SGD(net.parameters())
    wrapped = LightningOptimizer(raw)
    config = SimpleNamespace(scheduler="scheduler")
    trainer = net.trainer = make_trainer(optimizers=[raw], _lightning_optimizers=[wrapped])
    assert net.optimizers() is wrapped
    assert net.optimizers(use_pl_optimizer=False) is raw
    assert net.lr_schedulers() is None
    trainer.lr_scheduler_configs = [config]
    assert net.lr_schedulers() == "scheduler"
    trainer.lr_scheduler_configs = [config, config]
    assert net.lr_schedulers() == ["scheduler", "scheduler"]
    trainer._lightning_optimizers = [wrapped, wrapped]
    assert net.optimizers() == [wrapped, wrapped]


def test_manual_backward() -> None:
    net = Net()
    asked: list[Any] = []
    net.trainer = make_trainer(_manual_backward=lambda *args, **kwargs: asked.append((args, kwargs)))
    with pytest.raises(MisconfigurationException, match="automatic_optimization = False"):
        net.manual_backward(torch.ones(1))
    net.automatic_optimization = False
    net.manual_backward("loss", retain_graph=True)  # type: ignore[arg-type]
    assert asked == [(("loss",), {"retain_graph": True})]


def test_what_optimisation_does_by_default() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net.backward(net(torch.ones(1, 2)).sum())
    assert net.layer.bias.grad is not None
    before = net.layer.bias.detach().clone()
    net.optimizer_step(0, 0, optimizer, lambda: None)
    assert torch.equal(net.layer.bias, before - 1)
    net.optimizer_zero_grad(0, 0, optimizer)
    assert net.layer.bias.grad is None
    steps: list[Any] = []
    scheduler = SimpleNamespace(step=lambda *metric: steps.append(metric))
    net.lr_scheduler_step(scheduler, None)
    net.lr_scheduler_step(scheduler, 0.5)
    assert steps == [(), (0.5,)]


def test_clipping_asks_the_precision() -> None:
    net = Net()
    asked: list[Any] = []
    precision = SimpleNamespace(clip_gradients=lambda *args: asked.append(args))
    trainer = net.trainer = make_trainer(precision_plugin=precision, gradient_clip_val=0.5)
    net.configure_gradient_clipping("optimizer", 0.5, None)  # type: ignore[arg-type]
    net.clip_gradients("optimizer")  # type: ignore[arg-type]
    assert asked == [("optimizer", 0.5, "norm")] * 2
    trainer.gradient_clip_val = None
    net.clip_gradients("optimizer", 3, "value")  # type: ignore[arg-type]
    assert asked[2] == ("optimizer", 3, "value")


def test_toggle_two_optimizers_that_share_parameters() -> None:
    net = LightningModule()
    net.a, net.shared, net.b = (nn.Linear(1, 1, bias=False) for _ in range(3))
    net.b.weight.requires_grad_(False)
    first = torch.optim.SGD([net.a.weight, net.shared.weight])
    second = torch.optim.SGD([net.b.weight, net.shared.weight])
    net.trainer = make_trainer(optimizers=[first, second])

    def wants() -> list[bool]:
        return [p.requires_grad for p in (net.a.weight, net.shared.weight, net.b.weight)]

    with net.toggled_optimizer(first):
        assert wants() == [True, True, False]
    assert wants() == [True, True, False]
    net.toggle_optimizer(second)
    assert wants() == [False, True, False]
    net.untoggle_optimizer(second)
    assert wants() == [True, True, False]
    assert net._param_requires_grad_state == {}


def test_freeze() -> None:
    net = Net()
    assert net.freeze() is net
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())
    net.unfreeze()
    assert net.training
    assert all(p.requires_grad for p in net.parameters())


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    trainer = net.trainer = make_trainer()
    net.print("a", 1, sep="-")
    trainer.is_global_zero = False
    net.print("hidden")
    lines: list[Any] = []
    bar = SimpleNamespace(is_enabled=True, print=lambda *args, **kwargs: lines.append((args, kwargs)))
    trainer.is_global_zero, trainer.progress_bar_callback = True, bar
    net.print("b", end="")
    bar.is_enabled = False
    net.print("c")
    assert capsys.readouterr().out == "a-1\nc\n"
    assert lines == [(("b",), {"end": ""})]


def test_all_gather() -> None:
    net = Net()

    def gather(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack([tensor, tensor + sync_grads])

    net.trainer = make_trainer(strategy=SimpleNamespace(all_gather=gather))
    result = net.all_gather({"a": torch.ones(3), "b": [2, 0.5]}, sync_grads=True)
    assert result["a"].shape == (2, 3)
    assert result["a"][1, 0] == 2
    assert result["b"][0].tolist() == [2, 3]
    assert result["b"][1].tolist() == [0.5, 1.5]


def test_transfer_hooks_by_default() -> None:
    net = Net()
    batch = [torch.ones(1)]
    assert net.on_before_batch_transfer(batch, 0) is batch
    assert net.on_after_batch_transfer(batch, 0) is batch
    assert net.transfer_batch_to_device(batch, torch.device("meta"), 0)[0].is_meta


def test_model_mode_hooks_by_default() -> None:
    net = Net()
    net.trainer = make_trainer(model=net)
    for name in ("on_validation_model_eval", "on_test_model_eval", "on_predict_model_eval"):
        net.train()
        getattr(net, name)()
        assert not net.training
    for name in ("on_validation_model_train", "on_test_model_train"):
        net.eval()
        getattr(net, name)()
        assert net.training
    net.layer.weight.grad = torch.zeros(3, 2)
    net.on_validation_model_zero_grad()
    assert net.layer.weight.grad is None
