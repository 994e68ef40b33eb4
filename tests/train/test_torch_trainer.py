"""`TorchTrainer` and the helpers of `leyden.train.torch`, in two real workers and in the driver."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_scripts
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import leyden.train
from leyden.dist import worker as worker_module
from leyden.dist.env import DistInfo
from leyden.dist.worker import Worker
from leyden.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from leyden.train.config import ConfigError
from leyden.train.datasets import DataConfig
from leyden.train.torch import (
    TorchConfig,
    TorchTrainer,
    enable_reproducibility,
    get_device,
    get_devices,
    prepare_data_loader,
    prepare_model,
)


def trainer(function: Any, folder: Path, config: Any = None, workers: int = 0, **options: Any) -> TorchTrainer:
    run = {"storage_path": str(folder), "name": "run", **options.pop("run", {})}
    return TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(**run),
        **options,
    )


# ---- whole runs ------------------------------------------------------------------------------------------------------


class Listener(UserCallback):
    def __init__(self) -> None:
        self.reports: list[tuple[list[int], str | None]] = []
        self.failures: list[Any] = []

    def after_report(self, run_context, metrics, checkpoint):
        self.reports.append(([each["epoch"] for each in metrics], checkpoint and os.path.basename(checkpoint.path)))
        assert run_context.run_config.name == "run"

    def after_exception(self, run_context, worker_exceptions):
        self.failures.append(worker_exceptions)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_torch_code(tmp_path, workers):
    """The same script in the driver and in two workers: failure, restart, checkpoints, callbacks, datasets."""
    listener = Listener()
    result = trainer(
        torch_scripts.line,
        tmp_path,
        {"epochs": 4, "folder": str(tmp_path / "work"), "fail_at": 2, "datasets": True},
        workers,
        datasets={"numbers": lambda: list(range(9))},
        run={
            "failure_config": FailureConfig(max_failures=1),
            "callbacks": [listener],
            "worker_runtime_env": {"env_vars": {"LEYDEN_TEST_VARIABLE": 7}} if workers else None,
        },
    ).fit()
    value = result.return_value
    world = max(1, workers)
    assert value["started_at"] == 2  # two epochs were committed before the failure
    assert value["device"] == "cpu"
    assert value["devices"] == ["cpu"]
    assert value["ranks"] == (0, world, 0, world, 0)
    assert value["from_rank_zero"] == 0
    assert value["name"] == "run"
    assert value["shard"] == (list(range(9)) if world == 1 else [0, 2, 4, 6])
    assert value["variable"] == ("7" if workers else None)
    assert value["bias"] == pytest.approx(1, abs=0.1)
    assert result.error is None
    assert result.metrics["epoch"] == 3
    assert [row["epoch"] for row in result.metrics_history] == [0, 1, 2, 3]
    assert listener.reports[0] == ([0] * world, "checkpoint_000000")
    assert len(listener.reports) == 4
    assert isinstance(listener.failures[0][0], ValueError)
    again = Result.from_path(result.path)
    assert again.metrics == result.metrics
    assert again.checkpoint == result.checkpoint
    assert len(again.best_checkpoints) == 4
    with result.checkpoint.as_directory() as folder:
        assert torch.load(os.path.join(folder, "model.pt"))["epoch"] == 3


def test_the_error_of_the_function_comes_with_it(tmp_path):
    """In the driver the exception itself is the cause, with its frames."""

    def fails(config):
        leyden.train.report({"a": 1})
        raise ZeroDivisionError("as planned")

    with pytest.raises(TrainingFailedError, match="as planned") as caught:
        trainer(fails, tmp_path).fit()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    left = Result.from_path(tmp_path / "run")
    assert left.metrics == {"a": 1}
    assert isinstance(left.error, TrainingFailedError)


def test_ctrl_c_in_the_driver(tmp_path):
    def interrupted():
        leyden.train.report({"a": 1})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(interrupted, tmp_path).fit()
    assert worker_module.current() is None
    assert not [each for each in threading.enumerate() if each.name == "leyden-controller"]
    assert Result.from_path(tmp_path / "run").metrics == {"a": 1}
    result = trainer(lambda: "done", tmp_path).fit()  # an aborted run goes on
    assert result.return_value == "done"
    with pytest.raises(Exception, match="finished"):
        trainer(lambda: "again", tmp_path).fit()


def test_the_driver_is_left_as_it_was(tmp_path):
    seen = trainer(lambda: threading.current_thread() is threading.main_thread(), tmp_path).fit()
    assert seen.return_value is True
    assert worker_module.current() is None
    with pytest.raises(RuntimeError, match="worker"):
        leyden.train.report({"a": 1})


def test_a_second_fit_without_a_name_is_another_run(tmp_path):
    made = TorchTrainer(
        lambda: 1, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(storage_path=str(tmp_path))
    )
    assert made.fit().path != made.fit().path


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match=r"needs 2 arguments \(a, b\)"):
        TorchTrainer(lambda a, b: None)
    with pytest.raises(ConfigError, match="takes a function"):
        TorchTrainer("train")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scaling_config=\.\.\.\) takes a leyden"):
        TorchTrainer(print, scaling_config={"num_workers": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="same RunConfig"):
        TorchTrainer(print, resume_from_checkpoint=Checkpoint("x"))
    with pytest.raises(ConfigError, match="'local' or 'ray'"):
        TorchTrainer(print, backend="slurm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="init_method"):
        TorchConfig(init_method="file")
    with pytest.raises(ConfigError, match="timeout_s"):
        TorchConfig(timeout_s=0)
    with pytest.raises(ValueError, match="datasets_to_split"):
        TorchTrainer(print, datasets={"a": [1]}, dataset_config=DataConfig(datasets_to_split=["b"]))


def test_helpers_outside_of_a_worker():
    for call in (get_device, get_devices, lambda: prepare_model(nn.Linear(1, 1)), lambda: prepare_data_loader([])):
        with pytest.raises(RuntimeError, match="num_workers=0"):
            call()


def test_names_that_ray_train_removed_say_what_to_use():
    with pytest.raises(AttributeError, match=r"loss\.backward"):
        _ = leyden.train.torch.backward


# ---- loaders ---------------------------------------------------------------------------------------------------------


class Numbers(Dataset):
    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def _nothing(worker: int) -> None:
    pass


@pytest.fixture
def ranks() -> Iterator[Any]:
    """A function that makes this process the given rank of two."""

    def become(rank: int, world_size: int = 2) -> None:
        info = DistInfo(rank, rank, 0, world_size, world_size, "127.0.0.1", 29500)
        worker_module.set_current(Worker(info, "cpu", lambda *_: None, lambda: None, lambda: False))

    yield become
    worker_module.set_current(None)


def drawn(make: Any, ranks: Any, epoch: int = 0) -> list[list[int]]:
    """What each of two ranks gets of the loader that ``make`` returns."""
    found = []
    for rank in range(2):
        ranks(rank)
        torch.manual_seed(100 + rank)  # ranks need not have the same random state
        loader = prepare_data_loader(make())
        loader.sampler.set_epoch(epoch)
        found.append([int(value) for batch in loader for value in batch])
    return found


def test_prepared_loaders_share_all_samples(ranks):
    left, right = drawn(lambda: DataLoader(Numbers(), batch_size=3, shuffle=True), ranks)
    assert sorted(left + right) == list(range(20))
    assert drawn(lambda: DataLoader(Numbers(), batch_size=3, shuffle=True), ranks, epoch=1) != [left, right]
    assert drawn(lambda: DataLoader(Numbers(), batch_size=3), ranks)[1] == list(range(1, 20, 2))


def test_prepared_loaders_keep_every_argument(ranks):
    ranks(0)
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        shuffle=True,
        num_workers=1,
        collate_fn=torch.stack,
        drop_last=True,
        timeout=9,
        worker_init_fn=_nothing,
        multiprocessing_context="spawn",
        generator=torch.Generator(),
        prefetch_factor=3,
        persistent_workers=True,
    )
    prepared = prepare_data_loader(loader)
    changed = {
        "sampler",
        "batch_sampler",
        "_DataLoader__initialized",
        "_iterator",
        "_DataLoader__multiprocessing_context",
    }
    for name, value in vars(loader).items():
        if name not in changed:
            assert getattr(prepared, name) is value or getattr(prepared, name) == value, name
    assert prepared.multiprocessing_context is loader.multiprocessing_context
    assert len(prepared) == 2
    assert isinstance(loader.sampler, RandomSampler)  # the user's own is as it was


def test_prepared_loaders_keep_samplers_and_batch_samplers(ranks):
    def weighted():
        return DataLoader(Numbers(), batch_size=5, sampler=WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 16))

    left, right = drawn(weighted, ranks)
    assert len(left) == len(right) == 8
    assert min(left + right) >= 10

    def batches():
        return DataLoader(Numbers(12), batch_sampler=BatchSampler(SequentialSampler(range(12)), 4, False))

    left, right = drawn(batches, ranks)
    assert left == [0, 1, 2, 3, 8, 9, 10, 11]
    assert right == [4, 5, 6, 7, 0, 1, 2, 3]  # as many as the other rank has


def test_loaders_that_are_left_as_they_are(ranks):
    ranks(0)
    stream = DataLoader(Stream(), batch_size=2)
    assert prepare_data_loader(stream) is stream
    whole = DataLoader(Numbers())
    assert prepare_data_loader(whole, add_dist_sampler=False) is whole
    once = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
    assert prepare_data_loader(once) is once
    ranks(0, world_size=1)
    assert prepare_data_loader(whole) is whole


def test_subclasses_keep_their_class(ranks):
    class Special(DataLoader):
        def __init__(self, count: int) -> None:
            super().__init__(Numbers(count), batch_size=2)
            self.count = count

    ranks(1)
    prepared: Any = prepare_data_loader(Special(8))
    assert type(prepared) is Special
    assert prepared.count == 8
    assert [batch.tolist() for batch in prepared] == [[1, 3], [5, 7]]


def test_datasets_that_are_not_dealt_out():
    from leyden.train.datasets import dataset_sources

    sources = dataset_sources({"a": range(5), "b": Stream()}, DataConfig(datasets_to_split=["b"]))
    assert list(sources["a"].shard(1, 2)) == [0, 1, 2, 3, 4]
    assert list(sources["b"].shard(1, 2)) == [1, 3, 5]
    assert list(sources["b"].shard(0, 2)) == [0, 2, 4]


# ---- models and seeds ------------------------------------------------------------------------------------------------


def test_prepare_model_alone(ranks):
    ranks(0, world_size=1)
    model = nn.Linear(1, 1)
    assert prepare_model(model) is model
    ranks(0)
    assert prepare_model(model, parallel_strategy=None) is model
    for wrong, text in (("fsdp", "not in this version"), ("zero", "unknown")):
        with pytest.raises(ValueError, match=text):
            prepare_model(model, parallel_strategy=wrong)  # type: ignore[arg-type]


def test_enable_reproducibility(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        values = []
        for _ in range(2):
            enable_reproducibility(5)
            values.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert values[0] == values[1]
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
