"""TrainerSpec against what Lightning's Trainer makes of the same arguments."""

import logging
import os
import re
import warnings
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as reference
import pytest
import torch

from leyden.base.errors import MisconfigurationException, PossibleUserWarning
from leyden.checkpoint.io import TorchCheckpointIO
from leyden.core.callback import Callback, Checkpoint
from leyden.dist.devices import CPUAccelerator
from leyden.dist.env import LightningEnvironment, TorchElasticEnvironment
from leyden.strategies.base import SingleDeviceStrategy, Strategy
from leyden.strategies.ddp import DDPStrategy
from leyden.strategies.layer_sync import LayerSync, TorchSyncBatchNorm
from leyden.strategies.precision import DoublePrecision, MixedPrecision, Precision
from leyden.trainer import hardware, parse
from leyden.trainer.parse import Problems, env_defaults, loop_limits
from leyden.trainer.spec import DEFAULTS, TrainerSpec

OFF = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "leyden"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_", "PL_TRAINER_")):
            monkeypatch.delenv(name)


def lightning_reads(arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer: Any = reference.Trainer(**{**OFF, **arguments})
        except Exception as error:
            return type(error).__name__
    time = trainer._val_check_time_interval
    return {
        "max_epochs": trainer.max_epochs,
        "min_epochs": trainer.min_epochs,
        "max_steps": trainer.max_steps,
        "min_steps": trainer.min_steps,
        "limits": [getattr(trainer, f"limit_{name}_batches") for name in ("train", "val", "test", "predict")],
        "overfit_batches": trainer.overfit_batches,
        "fast_dev_run": trainer.fast_dev_run,
        "val_check_interval": getattr(trainer, "val_check_interval", 1.0),
        "val_check_time": None if time is None else timedelta(seconds=time),
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "num_sanity_val_steps": trainer.num_sanity_val_steps,
        "log_every_n_steps": trainer.log_every_n_steps,
        "reload": trainer.reload_dataloaders_every_n_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "clip": (trainer.gradient_clip_val, trainer.gradient_clip_algorithm),
        "strategy": type(trainer.strategy).__name__,
        "precision": trainer.precision,
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "default_root_dir": trainer.default_root_dir,
        "barebones": trainer.barebones,
    }


def leyden_reads(arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            spec = TrainerSpec.resolve(**{**OFF, **arguments})
        except Exception as error:
            return type(error).__name__
    return {
        **{name: getattr(spec, name) for name in ("max_epochs", "min_epochs", "max_steps", "min_steps")},
        "limits": [getattr(spec, f"limit_{name}_batches") for name in ("train", "val", "test", "predict")],
        "overfit_batches": spec.overfit_batches,
        "fast_dev_run": spec.fast_dev_run,
        "val_check_interval": spec.val_check_interval,
        "val_check_time": spec.val_check_time,
        "check_val_every_n_epoch": spec.check_val_every_n_epoch,
        "num_sanity_val_steps": spec.num_sanity_val_steps,
        "log_every_n_steps": spec.log_every_n_steps,
        "reload": spec.reload_dataloaders_every_n_epochs,
        "accumulate_grad_batches": spec.accumulate_grad_batches,
        "clip": (spec.gradient_clip_val, spec.gradient_clip_algorithm),
        "strategy": type(spec.strategy).__name__,
        "precision": spec.precision_plugin.precision,
        "devices": len(spec.devices),
        "num_nodes": spec.num_nodes,
        "default_root_dir": spec.default_root_dir,
        "barebones": spec.barebones,
    }


SAME: list[dict[str, Any]] = [
    {},
    *({"max_epochs": value} for value in (None, -2, -1, 0, 3)),
    *({"min_epochs": value} for value in (0, 2)),
    *({"max_steps": value} for value in (-2, -1, 0, 7, 1e3, None)),
    {"min_steps": 5},
    *({"max_time": value} for value in ("00:00:01:00", {"hours": 1}, timedelta(1), "1:2", "00:00:aa:01")),
    *({"limit_train_batches": value} for value in (None, 0, 1, 5, 0.0, 0.3, 1.0, 2.0, 1.5, -1, -0.1, True, "3")),
    *({"limit_val_batches": value} for value in (0, 0.5, 1.5)),
    *({"limit_test_batches": value} for value in (0, 0.5, 1.5)),
    *({"limit_predict_batches": value} for value in (0, 0.5, 1.5)),
    *({"fast_dev_run": value} for value in (True, False, 0, 1, 3, -1, "x")),
    {"fast_dev_run": 2, "max_epochs": 9, "val_check_interval": 0.5, "num_sanity_val_steps": 4, "min_steps": 8},
    {"fast_dev_run": 2, "val_check_interval": "00:00:01:00", "check_val_every_n_epoch": 3, "limit_test_batches": 9},
    *({"overfit_batches": value} for value in (0, 0.0, 2, 0.5, 1.5, -1)),
    {"overfit_batches": 0.5, "limit_train_batches": 4, "limit_test_batches": 3},
    {"overfit_batches": 3, "fast_dev_run": 2},
    *({"val_check_interval": value} for value in (None, 0.25, 1.0, 1, 10, 2.0, 1.5, -1, 0.0, "00:00:00:30", "bad")),
    *({"val_check_interval": value} for value in ({"minutes": 1}, timedelta(seconds=5), "00:00:aa:30")),
    *({"check_val_every_n_epoch": value} for value in (None, 1, 4, 1.5)),
    *({"check_val_every_n_epoch": None, "val_check_interval": value} for value in (3, 0.5, 1.0, "00:01:00:00")),
    *({"num_sanity_val_steps": value} for value in (-1, 0, 5)),
    *({"log_every_n_steps": value} for value in (0, 1)),
    *({"reload_dataloaders_every_n_epochs": value} for value in (0, 2, -1, 1.5)),
    {"accumulate_grad_batches": 3},
    *({"gradient_clip_val": value} for value in (0, 0.5, 1, "1")),
    *({"gradient_clip_algorithm": value} for value in ("norm", "VALUE", "foo")),
    *({"profiler": value} for value in ("Simple", "foo")),
    *({"devices": value} for value in (1, 2, "2", "auto", 0, "0", [], -1, "x", None, [0, 1], "0,1", 1.5)),
    *({"num_nodes": value} for value in (1, 2, 0, -1, "2")),
    *({"accelerator": value} for value in ("auto", "cpu", "foo", "CPU", None)),
    *({"accelerator": value} for value in ("gpu", "cuda") if not torch.cuda.is_available()),
    *(
        {"strategy": value}
        for value in ("auto", "ddp", "DDP", "ddp_spawn", "ddp_fork", "single_device", "foo", None, 3)
    ),
    *(
        {"strategy": value}
        for value in ("ddp_find_unused_parameters_true", "ddp_notebook_find_unused_parameters_false")
    ),
    *({"strategy": "ddp", "devices": value} for value in (1, 3)),
    {"strategy": "fsdp"},
    *({"precision": value} for value in (None, 16, 32, 64, "16", "32", "64", "bf16", "16-mixed", "bf16-mixed")),
    *({"precision": value} for value in ("16-true", "bf16-true", "32-true", "64-true", "foo", 33)),
    *({"plugins": value} for value in (None, [], 3, [3])),
    *(
        {"default_root_dir": value}
        for value in (None, "a/../b", "~/runs", Path("x"), "s3://bucket/a", "memory://a/b", 3)
    ),
    {"barebones": True, "logger": None, "enable_checkpointing": None},
    *({"barebones": True, "logger": None, name: True} for name in ("enable_checkpointing", "enable_progress_bar")),
    *({"barebones": True, "logger": value} for value in (True, False)),
    *({"barebones": True, "logger": None, "log_every_n_steps": value} for value in (0, 5)),
    *({"barebones": True, "logger": None, "num_sanity_val_steps": value} for value in (0, 5)),
    {"barebones": True, "logger": None, "profiler": "simple"},
    {"barebones": True, "logger": None, "fast_dev_run": 1},
    {"barebones": True, "logger": None, "detect_anomaly": True},
    {"callbacks": 3},
    {"no_such_argument": 1},
]


@pytest.mark.parametrize("arguments", SAME, ids=lambda value: re.sub(r" object at 0x[0-9a-f]+", "", str(value)))
def test_reads_what_lightning_reads(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if arguments.get("accelerator") != "cuda":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert leyden_reads(dict(arguments)) == lightning_reads(dict(arguments))


# What Lightning takes without a word, and fails on later or ignores.
STRICTER: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"max_epochs": 2.5}, TypeError),
    ({"max_epochs": "3"}, TypeError),
    ({"max_steps": 0.5}, TypeError),
    ({"max_time": 5}, TypeError),
    ({"max_time": {"centuries": 1}}, TypeError),
    ({"max_time": timedelta(-1)}, MisconfigurationException),
    ({"accumulate_grad_batches": 0}, MisconfigurationException),
    ({"accumulate_grad_batches": {4: 2}}, TypeError),
    ({"check_val_every_n_epoch": 0}, MisconfigurationException),
    ({"val_check_interval": 0}, MisconfigurationException),
    ({"num_sanity_val_steps": -5}, MisconfigurationException),
    ({"log_every_n_steps": -1}, MisconfigurationException),
    ({"deterministic": "maybe"}, MisconfigurationException),
    ({"gradient_clip_algorithm": 3}, MisconfigurationException),
    ({"callbacks": [reference.Callback()]}, TypeError),
    ({"logger": 3}, TypeError),
    ({"logger": [3]}, TypeError),
    ({"strategy": "single_device", "devices": 2}, MisconfigurationException),
    ({"limit_train_batches": float("nan")}, MisconfigurationException),
    ({"profiler": 3}, MisconfigurationException),
]


def _name(value: Any) -> str:
    """An id that is the same in every test process: without addresses."""
    return re.sub(r" object at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(("arguments", "kind"), STRICTER, ids=_name)
def test_stricter_than_lightning(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as info:
        TrainerSpec.resolve(**arguments)
    assert type(info.value) is kind
    assert "Trainer(...): " in str(info.value)


def test_arguments_and_defaults_are_lightnings() -> None:
    theirs = {name: p.default for name, p in signature(reference.Trainer.__init__).parameters.items() if name != "self"}
    assert theirs == DEFAULTS
    assert [field.name for field in fields(TrainerSpec)]
    unread = set(DEFAULTS) - {field.name for field in fields(TrainerSpec)}
    assert unread == {"precision", "plugins"}  # precision_plugin, and parts of the strategy


def test_frozen() -> None:
    spec = TrainerSpec.resolve()
    with pytest.raises(FrozenInstanceError):
        spec.max_epochs = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_all_problems_at_once() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_epoch': did you mean 'max_epochs'"):
        TrainerSpec.resolve(max_epoch=3)
    with pytest.raises(MisconfigurationException) as info:
        TrainerSpec.resolve(devices=0, strategy="dpp", precision="8", limit_val_batches=1.5, max_steps=None)
    text = str(info.value)
    assert "Trainer(...): 5 problems" in text
    for part in ("devices=0", "strategy='dpp'", "did you mean 'ddp'", "precision='8'", "limit_val_batches=1.5"):
        assert part in text


def test_problems_of_one_kind_keep_it() -> None:
    with pytest.raises(ValueError, match=r"2 problems\n  1\. strategy='foo'.*\n  2\. precision='bar'"):
        TrainerSpec.resolve(strategy="foo", precision="bar")
    problems = Problems()
    problems.raise_found("nothing")
    with problems.caught():
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "a ValueError by another name")
    with pytest.raises(ValueError, match="by another name"):
        problems.raise_found("Trainer(...)")
    with pytest.raises(KeyError), problems.caught():
        raise KeyError("not about arguments")


def test_barebones_names_every_conflict() -> None:
    with pytest.raises(ValueError, match="4 problems") as info:
        TrainerSpec.resolve(barebones=True, logger=True, profiler="simple", fast_dev_run=2, enable_model_summary=True)
    for name in ("logger=True", "profiler='simple'", "fast_dev_run=2", "enable_model_summary=True"):
        assert name in str(info.value)
    spec = TrainerSpec.resolve(barebones=True)
    assert (spec.logger, spec.enable_checkpointing, spec.enable_progress_bar, spec.enable_model_summary) == (
        [],
        False,
        False,
        False,
    )


# ---- callbacks and loggers


class Bell(Callback):
    """Any callback."""


def test_callbacks_are_copied() -> None:
    bell = Bell()
    mine = [bell, Bell()]
    spec = TrainerSpec.resolve(callbacks=mine)
    assert spec.callbacks == mine
    assert spec.callbacks is not mine
    assert TrainerSpec.resolve(callbacks=bell).callbacks == [bell]
    assert TrainerSpec.resolve().callbacks == []
    with pytest.raises(TypeError, match="import it from leyden instead"):
        TrainerSpec.resolve(callbacks=[reference.Callback()])


def test_callbacks_that_were_turned_off() -> None:
    from leyden.callbacks.progress_bar import ProgressBar

    for arguments in (
        {"callbacks": [Checkpoint()], "enable_checkpointing": False},
        {"callbacks": [ProgressBar()], "enable_progress_bar": False},
        {"callbacks": Checkpoint(), "barebones": True},
        {"callbacks": [ProgressBar(), ProgressBar()]},
    ):
        with pytest.raises(MisconfigurationException, match="callbacks holds"):
            TrainerSpec.resolve(**arguments)
    TrainerSpec.resolve(callbacks=[Checkpoint(), ProgressBar()])


class Notes:
    """What a logger is recognised by."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...


def test_loggers() -> None:
    one, two = Notes(), Notes()
    for given, expected in ((None, "default"), (True, "default"), (False, []), (one, [one]), ([], [])):
        assert TrainerSpec.resolve(logger=given).logger == expected
    assert TrainerSpec.resolve(logger=iter([one, two])).logger == [one, two]


# ---- hardware


def test_parts_are_connected() -> None:
    io, environment = TorchCheckpointIO(), LightningEnvironment()
    spec = TrainerSpec.resolve(
        devices=2, num_nodes=3, precision="bf16-mixed", plugins=[io, environment], sync_batchnorm=True
    )
    strategy: Any = spec.strategy
    assert isinstance(strategy, DDPStrategy)
    assert isinstance(strategy.accelerator, CPUAccelerator)
    assert strategy.accelerator is spec.accelerator
    assert strategy.precision_plugin is spec.precision_plugin
    assert isinstance(spec.precision_plugin, MixedPrecision)
    assert strategy.checkpoint_io is io
    assert strategy.cluster_environment is environment is spec.cluster_environment
    assert strategy.parallel_devices == spec.devices == [torch.device("cpu")] * 2
    assert (strategy.num_nodes, spec.num_nodes, strategy.world_size) == (3, 3, 6)
    assert strategy.sync_batchnorm
    assert strategy.launcher is not None
    single = TrainerSpec.resolve().strategy
    assert isinstance(single, SingleDeviceStrategy)
    assert (single.root_device, single.launcher, single.sync_batchnorm) == (torch.device("cpu"), None, False)


def test_strategy_instances() -> None:
    accelerator, plugin = CPUAccelerator(), DoublePrecision()
    mine = DDPStrategy(accelerator=accelerator, parallel_devices=[torch.device("cpu")] * 2, precision_plugin=plugin)
    spec = TrainerSpec.resolve(strategy=mine)
    assert spec.strategy is mine
    assert (spec.accelerator, spec.precision_plugin, len(spec.devices)) == (accelerator, plugin, 2)
    assert TrainerSpec.resolve(strategy=mine, accelerator="cpu").strategy is mine  # a second Trainer may have it, too
    assert len(TrainerSpec.resolve(strategy=DDPStrategy(), devices=3).devices) == 3
    assert (
        TrainerSpec.resolve(strategy=SingleDeviceStrategy(), precision="bf16").precision_plugin.precision
        == "bf16-mixed"
    )

    class Custom(Strategy):
        """A user's own."""

    assert isinstance(TrainerSpec.resolve(strategy=Custom()).strategy, Custom)


class OtherAccelerator(CPUAccelerator):
    """Not the one in the argument."""


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"strategy": DDPStrategy(accelerator=OtherAccelerator()), "accelerator": "cpu"},
            MisconfigurationException,
            "Other",
        ),
        (
            {
                "strategy": DDPStrategy(precision_plugin=DoublePrecision()),
                "plugins": MixedPrecision("bf16-mixed", "cpu"),
            },
            MisconfigurationException,
            "MixedPrecision conflicts with the DoublePrecision",
        ),
        (
            {"strategy": DDPStrategy(cluster_environment=LightningEnvironment()), "plugins": LightningEnvironment()},
            MisconfigurationException,
            "LightningEnvironment conflicts",
        ),
        (
            {"strategy": SingleDeviceStrategy("cuda:0"), "accelerator": "cpu"},
            MisconfigurationException,
            "devices of the",
        ),
        ({"plugins": [DoublePrecision()], "precision": 64}, ValueError, "precision=64 conflicts"),
        (
            {"strategy": DDPStrategy(precision_plugin=DoublePrecision()), "precision": "bf16-mixed"},
            ValueError,
            "precision='bf16-mixed' conflicts",
        ),
        ({"plugins": [DoublePrecision(), Precision()]}, MisconfigurationException, "two of the type Precision"),
    ],
)
def test_conflicts(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        TrainerSpec.resolve(**arguments)


def test_layer_sync_plugins() -> None:
    class Mine(LayerSync):
        def apply(self, model: Any) -> Any:
            return model

        revert = apply

    mine, torchs = Mine(), TorchSyncBatchNorm()
    assert TrainerSpec.resolve(plugins=mine).strategy.layer_sync is mine
    assert TrainerSpec.resolve(plugins=torchs, sync_batchnorm=True).strategy.layer_sync is torchs
    with pytest.raises(MisconfigurationException, match="sync_batchnorm=True conflicts with the plugin Mine"):
        TrainerSpec.resolve(plugins=mine, sync_batchnorm=True)


def test_auto_devices_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    spec = TrainerSpec.resolve()
    assert isinstance(spec.cluster_environment, TorchElasticEnvironment)
    assert isinstance(spec.strategy, DDPStrategy)
    assert (len(spec.devices), spec.num_nodes, spec.strategy.global_rank) == (2, 2, 3)
    assert isinstance(TrainerSpec.resolve(devices=1).strategy, SingleDeviceStrategy)  # asked for


class FakeGPUs(CPUAccelerator):
    """Four GPUs that are not there."""

    @staticmethod
    def auto_device_count() -> int:
        return 4


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_interactive", lambda: True)
    monkeypatch.setattr(hardware, "CUDAAccelerator", FakeGPUs)
    assert len(TrainerSpec.resolve(accelerator=FakeGPUs()).devices) == 1
    strategy: Any = TrainerSpec.resolve(devices=2).strategy
    assert strategy.start_method == "fork"
    with pytest.raises(MisconfigurationException, match="pass strategy='ddp_notebook'"):
        TrainerSpec.resolve(devices=2, strategy="ddp")
    monkeypatch.setattr(hardware, "is_interactive", lambda: False)
    assert len(TrainerSpec.resolve(accelerator=FakeGPUs()).devices) == 4


def test_no_fork_on_this_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    for name in ("ddp_fork", "ddp_notebook_find_unused_parameters_true"):
        with pytest.raises(ValueError, match="forks processes"):
            TrainerSpec.resolve(strategy=name)


# ---- torch's switches


@pytest.mark.parametrize(
    ("deterministic", "benchmark"),
    [(None, None), (None, True), (True, None), (True, True), (False, False), ("warn", None)],
)
def test_torch_flags_as_lightning(deterministic: Any, benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(apply: Any) -> list[Any]:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "unset")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                apply()
            return [
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.backends.cudnn.benchmark,
                os.environ["CUBLAS_WORKSPACE_CONFIG"],
                any("deterministic=True" in str(warning.message) for warning in caught),
            ]
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = False

    arguments = {"deterministic": deterministic, "benchmark": benchmark}
    ours = flags(lambda: TrainerSpec.resolve(**arguments).apply_torch_flags())
    assert ours == flags(lambda: reference.Trainer(**OFF, **arguments))


# ---- parsers


def test_loop_limits_as_lightning() -> None:
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.loops.utilities import _parse_loop_limits

    class Fake:
        callbacks: list[Any] = []

    for timer in (False, True):
        Fake.callbacks = [Timer()] if timer else []
        for max_epochs in (None, -1, 0, 5):
            for min_epochs in (None, 0, 3):
                for max_steps in (-1, 0, 10):
                    for min_steps in (None, 4):
                        with warnings.catch_warnings(record=True) as ours:
                            warnings.simplefilter("always")
                            result = loop_limits(max_epochs, min_epochs, max_steps, min_steps, timer)
                        with warnings.catch_warnings(record=True) as theirs:
                            warnings.simplefilter("always")
                            expected = _parse_loop_limits(min_steps, max_steps, min_epochs, max_epochs, Fake)  # pyright: ignore
                        assert result == expected
                        assert [w.category.__name__ for w in ours] == [w.category.__name__ for w in theirs]
    with pytest.warns(PossibleUserWarning, match="ends after 1000 epochs"):
        loop_limits(None, None, -1, None, False)


class Machine:
    """Stands in for the Trainer."""

    @env_defaults
    def __init__(self, *, max_epochs: Any = None, logger: Any = True, default_root_dir: Any = None) -> None:
        self.got = (max_epochs, logger, default_root_dir)


def test_env_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine().got == (None, True, None)
    assert Machine(3, False).got == (3, False, None)  # pyright: ignore[reportCallIssue]
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LOGGER", "")
    monkeypatch.setenv("PL_TRAINER_DEFAULT_ROOT_DIR", "some/where")
    monkeypatch.setenv("PL_TRAINER_UNKNOWN", "1")
    assert Machine().got == (7, True, "some/where")
    assert Machine(max_epochs=1).got == (1, True, "some/where")
    assert reference.Trainer(logger=False, enable_checkpointing=False).max_epochs == 7
    with pytest.raises(TypeError, match="two values for 'max_epochs'"):
        Machine(1, max_epochs=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="at most 3 arguments, got 4"):
        Machine(1, 2, 3, 4)  # pyright: ignore[reportCallIssue]


def test_says_what_one_means(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(parse, "rank_zero_info", lambda message, *args: said.append(message % args))
    TrainerSpec.resolve(limit_train_batches=1, limit_val_batches=1.0, val_check_interval=1, limit_test_batches=True)
    TrainerSpec.resolve(val_check_interval=1.0, limit_train_batches=0.5)
    assert said == [
        "Trainer(limit_train_batches=1): one batch is used.",
        "Trainer(limit_val_batches=1.0): all batches are used.",
        "Trainer(val_check_interval=1): validation runs after every batch.",
        "Trainer(val_check_interval=1.0): validation runs at the end of the epoch.",
    ]
