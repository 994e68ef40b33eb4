"""What users do with the public surface, beyond the common path: own parts, odd calls, and mistakes."""

import importlib
import os
import warnings
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import leyden as L
from leyden.base.log import log, rank_zero_warn
from leyden.callbacks import Callback, EarlyStopping, LambdaCallback, OnExceptionCheckpoint, ProgressBar, Timer
from leyden.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from leyden.plugins import Precision
from leyden.profilers import PassThroughProfiler
from leyden.strategies import DDPStrategy


def quiet(tmp_path, **arguments: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "logger": False,
        "max_epochs": 1,
    }
    return L.Trainer(**{**defaults, **arguments})


# ---- parts of the user's own -----------------------------------------------------------------------------------------


class LoudPrecision(Precision):
    """Overrides and calls the base in the way that Lightning's signatures allow: by position."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @contextmanager
    def forward_context(self):
        self.calls.append("forward")
        yield

    def pre_backward(self, tensor, module):
        self.calls.append("pre_backward")
        return super().pre_backward(tensor, module)

    def backward(self, tensor, model, optimizer, *args, **kwargs):
        self.calls.append("backward" if optimizer is not None else "manual backward")
        super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer, model, closure, **kwargs):
        self.calls.append("step")
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_grad_by_norm(self, optimizer, clip_val):
        self.calls.append(f"clip {clip_val}")
        super().clip_grad_by_norm(optimizer, clip_val)


def test_own_precision_overrides_by_lightnings_signatures(tmp_path):
    plugin = LoudPrecision()
    quiet(tmp_path, plugins=[plugin], gradient_clip_val=0.3, limit_train_batches=1, limit_val_batches=0).fit(
        BoringModel()
    )
    assert plugin.calls == ["step", "forward", "pre_backward", "backward", "clip 0.3"]


def test_own_precision_backward_in_manual_optimisation(tmp_path):
    class Manual(BoringModel):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch).sum())
            self.optimizers().step()

    plugin, model = LoudPrecision(), Manual()
    before = model.layer.weight.clone()
    quiet(tmp_path, plugins=plugin, limit_train_batches=1, limit_val_batches=0).fit(model)
    assert "manual backward" in plugin.calls
    assert not torch.equal(model.layer.weight, before)


def test_own_bar_without_is_enabled(tmp_path, capsys):
    class Percent(ProgressBar):
        def __init__(self):
            super().__init__()
            self.enable = True

        def disable(self):
            self.enable = False

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} percent")

    class Talks(BoringModel):
        def training_step(self, batch, batch_idx):
            self.print("step", batch_idx)
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, enable_progress_bar=True, callbacks=Percent()).fit(Talks())
    assert capsys.readouterr().out.splitlines() == ["step 0", "50 percent", "step 1", "100 percent"]


def test_profiler_is_there_when_none_was_asked_for(tmp_path):
    class Profiled(BoringModel):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("mine"):
                return super().training_step(batch, batch_idx)

    class Counts(PassThroughProfiler):
        started = 0

        def start(self, action_name):
            self.started += 1

    trainer = quiet(tmp_path)
    trainer.fit(Profiled())
    assert trainer.active_profiler is None  # it costs nothing

    profiler = Counts()
    quiet(tmp_path, profiler=profiler).fit(Profiled())
    assert profiler.started > 2


@pytest.fixture
def no_group_left():
    before = dict(os.environ)  # the launcher leaves LOCAL_RANK and the like, which other tests' processes would inherit
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_configure_ddp_may_be_overridden(tmp_path, no_group_left):
    class Own(DDPStrategy):
        def configure_ddp(self):
            self.model = DistributedDataParallel(self.model)  # the user's module itself, as Lightning passes it

    class Counts(BoringModel):
        steps = 0

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return super().training_step(batch, batch_idx)

    model = Counts()
    quiet(tmp_path, strategy=Own(start_method="popen"), devices=1).fit(model)
    assert model.steps == 2
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}


def test_module_paths_of_lightning():
    names = {
        "leyden.callbacks.on_exception_checkpoint": ("OnExceptionCheckpoint",),
        "leyden.strategies.single_device": ("SingleDeviceStrategy",),
        "leyden.strategies.strategy": ("Strategy",),
        "leyden.trainer": ("Trainer", "seed_everything"),
        "leyden.trainer.states": ("RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"),
    }
    for module, exports in names.items():
        for name in exports:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


# ---- semi-public attributes that repositories read and write ---------------------------------------------------------


def test_loop_counters_and_limits_of_lightnings_loops(tmp_path):
    seen = []

    def look(trainer, *args):
        fit = trainer.fit_loop
        seen.append((fit.batch_idx, fit.total_batch_idx, fit.epoch_loop.batch_idx, fit.epoch_loop.total_batch_idx))

    trainer = quiet(tmp_path, max_epochs=-1, max_steps=3, callbacks=LambdaCallback(on_train_batch_end=look))
    trainer.fit(BoringModel())
    assert seen == [(0, 0, 0, 0), (1, 1, 1, 1), (0, 2, 0, 2)]
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(BoringModel())
    assert trainer.max_steps == trainer.global_step == trainer.fit_loop.epoch_loop.max_steps == 5
    trainer.logger = False
    assert trainer.loggers == []


def test_a_ckpt_path_that_was_set_stays_until_one_is_passed(tmp_path):
    first = quiet(tmp_path)
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "a.ckpt")

    trainer = quiet(tmp_path, max_epochs=2)
    trainer.ckpt_path = str(tmp_path / "a.ckpt")
    trainer.fit(BoringModel())
    assert trainer.global_step == 4
    assert trainer.ckpt_path == str(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="takes the place of trainer.ckpt_path"):
        trainer.validate(BoringModel(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    trainer.validate(BoringModel(), verbose=False)
    assert trainer.ckpt_path is None


def test_a_timer_is_a_limit(tmp_path, recwarn):
    trainer = quiet(tmp_path, max_epochs=None, max_time={"seconds": 0.01}, callbacks=[Callback()])
    trainer.fit(BoringModel())
    assert trainer.max_epochs == -1
    own = quiet(tmp_path, max_time={"seconds": 0.01}, callbacks=[Timer({"seconds": 0.01})])
    assert sum(isinstance(callback, Timer) for callback in own.callbacks) == 1
    assert not [w for w in recwarn if "ends after 1000 epochs" in str(w.message)]


def test_on_exception_checkpoint_is_silent_about_the_first_run(tmp_path, recwarn):
    quiet(tmp_path, enable_checkpointing=True, callbacks=OnExceptionCheckpoint(tmp_path)).fit(BoringModel())
    assert not [w for w in recwarn if "last checkpoint" in str(w.message)]


def test_last_line_of_the_bar_has_what_the_epoch_end_logged(tmp_path, capsys):
    class Late(BoringModel):
        def on_train_epoch_end(self):
            self.log("late", float(self.current_epoch), prog_bar=True)

    quiet(tmp_path, enable_progress_bar=True, max_epochs=3).fit(Late())
    assert "late=2" in capsys.readouterr().out.splitlines()[-1]


def test_warnings_point_at_the_users_line(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(tmp_path).fit(BoringModel(), RandomDataset(32, 4))
        rank_zero_warn("mine", stacklevel=3)
    assert {w.filename for w in caught} == {__file__}
    assert any(
        "a RandomDataset is a data set, so each of its samples is taken for a batch" in str(w.message) for w in caught
    )


# ---- mistakes: what is wrong, and the way out ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpus": 1}, "'gpus': use accelerator='gpu', devices="),
        ({"resume_from_checkpoint": "x"}, r"'resume_from_checkpoint': use trainer.fit\(model, ckpt_path="),
        ({"max_epoch": 1}, "'max_epoch': did you mean 'max_epochs'"),
        ({"logger": "tensorboard"}, "logger='tensorboard' is no Logger"),
        ({"callbacks": [EarlyStopping]}, r"pass an instance, EarlyStopping\(\.\.\.\)"),
    ],
)
def test_wrong_arguments_of_the_trainer(arguments, words):
    with pytest.raises(TypeError, match=words):
        L.Trainer(**arguments)


def test_plugins_as_a_string_are_named_whole():
    with pytest.raises(L.utilities.exceptions.MisconfigurationException, match="plugins holds 'slurm'"):
        L.Trainer(plugins="slurm")


class NoSuperInit(L.LightningModule):
    def __init__(self):
        self.lr = 0.1

    def training_step(self, batch, batch_idx):
        return None


class ReturnsClass(BoringModel):
    def configure_callbacks(self):
        return [EarlyStopping]


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (BoringModel, None, r"is the class BoringModel: pass an instance, BoringModel\(\.\.\.\)"),
        (NoSuperInit(), None, r"NoSuperInit.__init__ does not call super\(\).__init__\(\)"),
        (BoringModel(), BoringDataModule, r"pass an instance, BoringDataModule\(\.\.\.\)"),
        (ReturnsClass(), None, r"configure_callbacks returned holds .*pass an instance"),
    ],
)
def test_classes_in_place_of_instances(tmp_path, model, data, words):
    with pytest.raises(TypeError, match=words):
        quiet(tmp_path).fit(model, datamodule=data)
    if data is not None:
        with pytest.raises(TypeError, match=words):
            quiet(tmp_path).fit(model, data)


def test_a_datamodule_of_lightning_is_refused_by_name(tmp_path):
    theirs = pytest.importorskip("lightning.pytorch").LightningDataModule()
    for call in ({"datamodule": theirs}, {"train_dataloaders": theirs}):
        with pytest.raises(TypeError, match=r"based on `lightning.*Import everything from one of them"):
            quiet(tmp_path).fit(BoringModel(), **call)


def test_the_first_error_is_the_one_that_is_raised(tmp_path, caplog, monkeypatch):
    told = []

    class Fails(Callback):
        def on_exception(self, trainer, pl_module, exception):
            raise OSError("disk full")

    class Told(Callback):
        def on_exception(self, trainer, pl_module, exception):
            told.append(exception)

    class Crashes(BoringModel):
        def training_step(self, batch, batch_idx):
            raise ValueError("boom")

    monkeypatch.setattr(log, "propagate", True)  # caplog listens at the root
    with caplog.at_level("ERROR", logger="leyden"):
        with pytest.raises(ValueError, match="boom"):
            quiet(tmp_path, callbacks=[Fails(), Told()]).fit(Crashes())
    assert [str(error) for error in told] == ["boom"]
    assert "disk full" in caplog.text


def test_log_in_predict_and_log_without_a_name(tmp_path):
    class Logs(BoringModel):
        def predict_step(self, batch, batch_idx):
            self.log("x", 1.0)

        def training_step(self, batch, batch_idx):
            self.log(1, 1.0)  # pyright: ignore[reportArgumentType]

    with pytest.raises(L.utilities.exceptions.MisconfigurationException, match="predict"):
        quiet(tmp_path).predict(Logs(), DataLoader(RandomDataset(32, 2)))
    with pytest.raises(TypeError, match="the name must be a str, got int"):
        quiet(tmp_path).fit(Logs())


def test_estimated_stepping_batches_needs_data(tmp_path):
    with pytest.raises(RuntimeError, match="depends on the training data"):
        _ = quiet(tmp_path).estimated_stepping_batches


def test_a_checkpoint_of_another_model(tmp_path):
    trainer = quiet(tmp_path)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    class Wider(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 3)

    with pytest.raises(RuntimeError, match=r"(?s)does not fit .*Wider.*strict_loading = False.*size mismatch"):
        quiet(tmp_path, max_epochs=2).fit(Wider(), ckpt_path=tmp_path / "a.ckpt")
