"""A `leyden.Trainer` in a worker: with Ray Train's glue, without any, and after kills."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bridge_scripts
import pytest
import torch
from bridge_scripts import EPOCHS, QUIET, ImageClassifier, Validated, digits
from torch.utils.data import DataLoader

import leyden as pl
import leyden.train.lightning
from leyden.base.errors import MisconfigurationException
from leyden.callbacks import ModelCheckpoint
from leyden.dist import worker as worker_module
from leyden.dist.env import DistInfo, LightningEnvironment, detect_environment
from leyden.dist.worker import CheckpointNote, TrainWorkerEnvironment, Worker
from leyden.strategies import DDPStrategy, SingleDeviceStrategy
from leyden.train import CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from leyden.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from leyden.train.torch import TorchTrainer
from leyden.trainer.worker_report import WorkerReport

pytest.importorskip("sklearn", reason="the digits data set comes with scikit-learn")

KILLS = [(0, 2, 1), (1, 1, 0), (3, 0, 1)]  # epoch, batch, rank; with 4 batches an epoch


def run(function: Any, folder: Path, kills: Any = (), max_failures: int = 0, workers: int = 2) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return TorchTrainer(
        function,
        train_loop_config={"folder": str(folder), "kills": list(kills)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(folder), name="run", failure_config=FailureConfig(max_failures=max_failures)
        ),
    ).fit()


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the tutorial's script, without a kill."""
    return run(bridge_scripts.with_glue, tmp_path_factory.mktemp("tutorial"))


def test_tutorial_script(tutorial):
    """Steps 3 and 4 of the tutorial: the result, and the model from its checkpoint."""
    assert tutorial.error is None
    assert tutorial.metrics["epoch"] == EPOCHS - 1
    assert tutorial.metrics["step"] == EPOCHS * 4
    assert len(tutorial.best_checkpoints) == EPOCHS
    assert [row["epoch"] for row in tutorial.metrics_history] == list(range(EPOCHS))
    with tutorial.checkpoint.as_directory() as checkpoint_dir:
        model = ImageClassifier.load_from_checkpoint(
            os.path.join(
                checkpoint_dir,
                leyden.train.lightning.RayTrainReportCallback.CHECKPOINT_NAME,
            ),
        )
    assert_same_weights(dict(model.state_dict()), tutorial.return_value)
    x, y = digits()[:]
    assert (model.eval()(x).argmax(1) == y).float().mean() > 0.5


def test_without_glue_and_with_kills(tutorial, tmp_path):
    """No glue, and three kills between checkpoints in the middle of epochs: the same weights, bit for bit."""
    result = run(bridge_scripts.without_glue, tmp_path, KILLS, max_failures=3)
    assert len(list(tmp_path.glob("killed-*"))) == len(KILLS)
    assert_same_weights(result.return_value, tutorial.return_value)
    assert result.metrics["step"] == tutorial.metrics["step"]
    with result.checkpoint.as_directory() as folder:
        note = CheckpointNote.read(folder)
        assert note is not None
        assert note.original.endswith(".ckpt")
        ImageClassifier.load_from_checkpoint(os.path.join(folder, "checkpoint.ckpt"))


def test_with_glue_and_kills(tutorial, tmp_path):
    """The tutorial's script as it is resumes after a restart, which it has no line for."""
    result = run(bridge_scripts.with_glue, tmp_path, KILLS, max_failures=3)
    assert len(list(tmp_path.glob("killed-*"))) == len(KILLS)
    assert_same_weights(result.return_value, tutorial.return_value)


# ---- in this process, as one worker of none --------------------------------------------------------------------------


class Recorder:
    """Stands in for an orchestrator: keeps what is reported."""

    def __init__(self, tmp_path: Path, world_size: int = 1, rank: int = 0, device: str = "cpu") -> None:
        self.reports: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
        self.latest: str | None = None
        self.stop = False
        self._folder = tmp_path / "reported"
        self._count = 0
        info = DistInfo(rank, rank, 0, world_size, world_size, "127.0.0.1", 29500)
        self.worker = Worker(info, device, self.report, lambda: self.latest, self.stop_requested, "the-run")
        self.signs = 0

    def stop_requested(self) -> bool:
        self.signs += 1
        return self.stop

    def report(self, metrics: Any, folder: str | None) -> None:
        content = None
        if folder is not None:
            content = {
                "step": torch.load(os.path.join(folder, "checkpoint.ckpt"), weights_only=True)["global_step"],
                "note": CheckpointNote.read(folder),
                "files": sorted(os.listdir(folder)),
            }
            self._count += 1
            self.latest = str(self._folder / str(self._count))
            os.makedirs(self.latest)
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), "rb") as source:
                    Path(self.latest, name).write_bytes(source.read())
        self.reports.append((dict(metrics), content))

    def steps_with_checkpoint(self) -> list[int]:
        return [content["step"] for _, content in self.reports if content is not None]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.chdir(tmp_path)
    made = Recorder(tmp_path)
    worker_module.set_current(made.worker)
    yield made
    worker_module.set_current(None)


@pytest.fixture
def second_of_two(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path, world_size=2, rank=1)
    worker_module.set_current(made.worker)
    yield made
    worker_module.set_current(None)


def fit(model: Any = None, val: bool = False, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **QUIET, **options}
    trainer = pl.Trainer(**options)
    loader = DataLoader(digits(0, 64), batch_size=16, shuffle=True)
    model = model or (Validated() if val else ImageClassifier())
    trainer.fit(model, loader, DataLoader(digits(64, 96), batch_size=16) if val else None)
    return trainer


def test_one_report_an_epoch_with_all_metrics(recorder):
    trainer = fit(val=True)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert [metrics["epoch"] for metrics, _ in recorder.reports] == [0, 1]
    assert {"loss", "val_accuracy", "epoch", "step"} <= recorder.reports[-1][0].keys()
    assert all(isinstance(value, (int, float)) for metrics, _ in recorder.reports for value in metrics.values())
    assert recorder.steps_with_checkpoint() == [4, 8]
    _, content = recorder.reports[-1]
    assert content["files"] == [".leyden-fit.json", "checkpoint.ckpt"]
    assert content["note"].original == trainer.checkpoint_callback.best_model_path


def test_validation_inside_an_epoch_is_reported(recorder):
    fit(val=True, val_check_interval=2, enable_checkpointing=False)
    assert [metrics["step"] for metrics, _ in recorder.reports] == [2, 4, 6, 8]
    assert recorder.steps_with_checkpoint() == []


def test_every_trigger_of_model_checkpoint_is_reported(recorder, tmp_path):
    by_step = ModelCheckpoint(dirpath=tmp_path / "a", every_n_train_steps=3, save_top_k=-1)
    best = ModelCheckpoint(dirpath=tmp_path / "b", monitor="val_accuracy", mode="max", save_last=True)
    fit(val=True, callbacks=[by_step, best])
    steps = recorder.steps_with_checkpoint()
    assert {3, 4, 6} <= set(steps)
    assert steps == sorted(set(steps))  # two that save at the same point are one report


def test_weights_only_files_do_not_take_the_place_of_whole_ones(recorder, tmp_path):
    weights = ModelCheckpoint(dirpath=tmp_path / "a", every_n_train_steps=1, save_top_k=-1, save_weights_only=True)
    whole = ModelCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=4, save_top_k=-1)
    fit(callbacks=[weights, whole])
    assert recorder.steps_with_checkpoint() == [4, 8]


def test_a_run_of_weights_only_is_reported_and_starts_again(recorder, tmp_path):
    with pytest.warns(UserWarning, match="can't be resumed"):
        fit(max_epochs=1, callbacks=[ModelCheckpoint(dirpath=tmp_path / "a", save_weights_only=True)])
    assert recorder.steps_with_checkpoint() == [4]
    worker_module.set_current(recorder.worker)  # as after a restart
    with pytest.warns(UserWarning, match="weights only"):
        assert fit(max_epochs=1, enable_checkpointing=False).global_step == 4


def test_a_restart_goes_on_by_itself(recorder):
    fit(max_epochs=1)
    worker_module.set_current(recorder.worker)  # as after a restart
    recorder.reports.clear()
    trainer = fit(max_epochs=3)
    assert trainer.global_step == 12
    assert [metrics["epoch"] for metrics, _ in recorder.reports] == [1, 2]


def test_a_restart_goes_on_in_the_folder_of_the_run(recorder, tmp_path):
    """So `ModelCheckpoint` still knows the best files that it saved before."""
    options = {"logger": None, "val": True, "num_sanity_val_steps": 0}
    best = {"monitor": "val_accuracy", "mode": "max", "save_top_k": 2, "every_n_epochs": 1}
    before = fit(max_epochs=2, callbacks=[ModelCheckpoint(**best)], **options).checkpoint_callback
    assert Path(before.dirpath) == tmp_path / "lightning_logs" / "the-run" / "checkpoints"
    worker_module.set_current(recorder.worker)
    after = fit(max_epochs=3, callbacks=[ModelCheckpoint(**best)], **options).checkpoint_callback
    assert after.dirpath == before.dirpath
    assert set(after.best_k_models) & set(before.best_k_models)
    assert len(list(Path(after.dirpath).iterdir())) == 2


def test_batches_are_a_sign_of_progress(recorder):
    fit(max_epochs=1, enable_checkpointing=False)
    assert recorder.signs > 0


def test_an_explicit_path_comes_first(recorder, tmp_path):
    path = fit(max_epochs=2).checkpoint_callback.best_model_path
    recorder.latest = "not looked at"
    worker_module.set_current(recorder.worker)
    second = pl.Trainer(max_epochs=4, default_root_dir=tmp_path / "other", **QUIET)
    second.fit(ImageClassifier(), DataLoader(digits(0, 64), batch_size=16), ckpt_path=path)
    assert second.global_step == 16
    assert second.ckpt_path == path


def test_only_the_fit_that_wrote_the_checkpoint_resumes(recorder):
    """A script that fits two models was killed in the second fit."""
    fit(ImageClassifier(width=8), max_epochs=1)
    fit(ImageClassifier(width=4), max_epochs=1)
    worker_module.set_current(recorder.worker)
    with pytest.warns(UserWarning, match="fit number 1 runs again"):
        first = fit(ImageClassifier(width=8), max_epochs=1, enable_checkpointing=False)
    assert first.ckpt_path is None
    second = fit(ImageClassifier(width=4), max_epochs=2)
    assert second.ckpt_path is not None
    assert second.global_step == 8


def test_a_checkpoint_of_the_users_own_is_left_to_the_user(recorder, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "checkpoint.ckpt").write_bytes(b"not ours")
    recorder.latest = str(tmp_path / "own")
    assert fit(max_epochs=1).global_step == 4


def test_stops_at_a_checkpoint_when_asked(recorder):
    recorder.stop = True
    assert fit(max_epochs=5).global_step == 4


def test_save_on_exception_is_reported(recorder, tmp_path):
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                raise ValueError("as planned")

    checkpoint = ModelCheckpoint(dirpath=tmp_path / "a", save_on_exception=True)
    with pytest.raises(ValueError, match="as planned"):
        fit(callbacks=[Fails(), checkpoint])
    assert recorder.steps_with_checkpoint() == [2]


def test_glue_means_that_the_script_reports(recorder):
    for options in (
        {"plugins": [RayLightningEnvironment()]},
        {"strategy": RayDDPStrategy()},
        {"callbacks": [RayTrainReportCallback()]},
    ):
        trainer = pl.Trainer(devices="auto", accelerator="auto", **QUIET, **options)
        assert not any(isinstance(each, WorkerReport) for each in trainer.callbacks), options
    assert any(isinstance(each, WorkerReport) for each in pl.Trainer(**QUIET).callbacks)


def test_outside_of_a_worker_nothing_is_added():
    assert not any(isinstance(each, WorkerReport) for each in pl.Trainer(**QUIET).callbacks)
    assert isinstance(detect_environment(), LightningEnvironment)


# ---- ranks and devices -----------------------------------------------------------------------------------------------


def test_auto_takes_the_place_of_the_worker(second_of_two):
    trainer = pl.Trainer(devices="auto", accelerator="auto", **QUIET)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert isinstance(trainer.strategy.cluster_environment, TrainWorkerEnvironment)
    assert trainer.strategy.launcher is None  # the workers are all there
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.num_nodes) == (2, 1, 1, 1)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


def test_device_of_the_worker(tmp_path):
    worker_module.set_current(Recorder(tmp_path, world_size=4, rank=2, device="cuda:2").worker)
    try:
        environment = TrainWorkerEnvironment()
        assert environment.devices() == [torch.device("cuda", index) for index in range(4)]
        assert RayDDPStrategy().root_device == torch.device("cuda:2")
        with pytest.raises(MisconfigurationException, match="use_gpu"):
            pl.Trainer(accelerator="cpu", **QUIET)
    finally:
        worker_module.set_current(None)


def test_devices_that_scaling_config_decided_are_ignored_with_a_warning(second_of_two):
    with pytest.warns(UserWarning, match="devices=3 is ignored"):
        assert pl.Trainer(devices=3, accelerator="cpu", **QUIET).num_devices == 2


def test_prepare_trainer(second_of_two):
    for good in (
        {"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]},
        {"strategy": RayDDPStrategy(find_unused_parameters=True)},
        {"strategy": "ddp"},
        {},
    ):
        trainer = pl.Trainer(devices="auto", accelerator="auto", **QUIET, **good)
        assert prepare_trainer(trainer) is trainer
    with pytest.raises(RuntimeError, match="does not know the ranks"):
        prepare_trainer(pl.Trainer(strategy="ddp", accelerator="cpu", plugins=[LightningEnvironment()], **QUIET))
    with pytest.raises(RuntimeError, match="a model of its own"):
        prepare_trainer(pl.Trainer(strategy=SingleDeviceStrategy("cpu"), **QUIET))
    with pytest.raises(TypeError, match="prepare_trainer takes"):
        prepare_trainer(object())


def test_foreign_trainers_are_named(second_of_two):
    lightning = pytest.importorskip("lightning.pytorch")
    with pytest.raises(TypeError, match=r"one of lightning's: use leyden\.Trainer"):
        prepare_trainer(lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))


def test_sharded_names_explain_themselves():
    for name in ("RayFSDPStrategy", "RayDeepSpeedStrategy"):
        with pytest.raises(MisconfigurationException, match="not in this version"):
            getattr(leyden.train.lightning, name)()


def test_report_callback_refuses_what_it_can_not_do():
    with pytest.raises(ValueError, match="NO_UPLOAD"):
        RayTrainReportCallback(checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    with pytest.raises(ValueError, match="validation"):
        RayTrainReportCallback(validation=True)


def test_environment_outside_of_a_worker():
    with pytest.raises(RuntimeError, match="only inside the training function"):
        RayLightningEnvironment().world_size()
