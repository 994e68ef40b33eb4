"""Values that are checked, all at once, where they are written."""

import copy
import dataclasses
import os
import pickle

import pytest

from leyden.base.errors import MisconfigurationException
from leyden.train.config import CheckpointConfig, ConfigError, FailureConfig, LoggingConfig, RunConfig, ScalingConfig


def test_defaults_are_those_of_the_documents():
    scaling = ScalingConfig()
    assert (scaling.num_workers, scaling.use_gpu, scaling.placement_strategy) == (1, False, "PACK")
    assert scaling.worker_resources == {"CPU": 1}
    run = RunConfig()
    assert (run.storage_path, run.resume, run.callbacks, run.worker_runtime_env) == ("~/leyden_results", "auto", [], {})
    assert (run.failure_config.max_failures, run.checkpoint_config.num_to_keep) == (0, None)
    assert run.checkpoint_config.checkpoint_score_order == "max"


@pytest.mark.parametrize(
    ("given", "resources"),
    [
        ({"use_gpu": True}, {"GPU": 1}),
        ({"resources_per_worker": {"CPU": 4}, "use_gpu": True}, {"CPU": 4, "GPU": 1}),
        ({"resources_per_worker": {"CPU": 0}}, {}),
        ({"resources_per_worker": {"GPU": 0.5}, "use_gpu": True}, {"GPU": 0.5}),
        ({"resources_per_worker": {"my_disk": 2, "memory": 2**30}}, {"my_disk": 2, "memory": 2**30}),
    ],
)
def test_what_each_worker_needs(given, resources):
    scaling = ScalingConfig(num_workers=3, **given)
    assert scaling.worker_resources == resources
    assert scaling.total_resources == {name: 3 * amount for name, amount in resources.items()}
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    assert scaling.additional_resources_per_worker == others


def test_an_elastic_number_of_workers():
    scaling = ScalingConfig(num_workers=(1, 4))
    assert (scaling.elasticity_enabled, scaling.min_workers, scaling.max_workers) == (True, 1, 4)
    assert not ScalingConfig(num_workers=0).elasticity_enabled


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 2.0}, "whole number"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_workers": [1, 4]}, r"\(least, most\)"),
        ({"num_workers": (4, 1)}, "1 <= least <= most"),
        ({"num_workers": (0, 1)}, "1 <= least <= most"),
        ({"resources_per_worker": {"gpu": 1}}, "did you mean 'GPU'"),
        ({"resources_per_worker": {"num_cpus": 1}}, "did you mean 'CPU'"),
        ({"resources_per_worker": {"Memory": 2**30}}, "did you mean 'memory'"),
        ({"resources_per_worker": {"memory": 8}}, "in bytes"),
        ({"resources_per_worker": {"GPU": 1}}, "use_gpu=True"),
        ({"resources_per_worker": {"GPU": 0}, "use_gpu": True}, "use_gpu=False"),
        ({"resources_per_worker": {"GPU": 1.5}, "use_gpu": True}, "whole number"),
        ({"resources_per_worker": {"CPU": -1}}, "0 or more"),
        ({"resources_per_worker": {"CPU": float("nan")}}, "0 or more"),
        ({"placement_strategy": "SPRED"}, "'SPREAD'"),
        ({"label_selector": [{"a": "b"}], "num_workers": 2}, "1 entries for 2 workers"),
        ({"label_selector": {"a": 1}}, "dict of text to text"),
        ({"use_tpu": True}, "TPU"),
        ({"trainer_resources": {"CPU": 1}}, "remove it"),
        ({"elastic_resize_monitor_interval_s": -1}, "0 or more"),
        ({"accelerator_type": ""}, "'A100'"),
    ],
)
def test_a_wrong_scaling_says_what_is_right(given, words):
    with pytest.raises(ConfigError, match=words):
        ScalingConfig(**given)


def test_all_problems_are_in_one_error_that_both_families_catch():
    with pytest.raises(ValueError, match="3 problems") as caught:
        ScalingConfig(num_workers=-1, placement_strategy="X", resources_per_worker={"gpus": 1})
    assert isinstance(caught.value, MisconfigurationException)
    for name in ("num_workers", "placement_strategy", "gpus"):
        assert name in str(caught.value)


def test_values_changed_later_are_checked_again():
    scaling = ScalingConfig()
    scaling.num_workers = -3
    with pytest.raises(ConfigError, match="-3"):
        scaling.check()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RunConfig(verbose=2), "logging_config"),
        (lambda: RunConfig(stop={"loss": 1}), "return from your function"),
        (lambda: RunConfig(sync_config=object()), "storage_options"),
        (lambda: RunConfig(progress_reporter=1), "live"),
        (lambda: RunConfig(log_to_file=True), "logs/rank-N.log"),
        (lambda: CheckpointConfig(checkpoint_frequency=1), "report"),
        (lambda: CheckpointConfig(checkpoint_at_end=False), "report"),
        (lambda: FailureConfig(fail_fast=True), "max_failures=0"),
        (lambda: FailureConfig(preemption_grace_s=3.0), "not supported"),
        (lambda: FailureConfig(max_failures=-2), "-1 for no limit"),
        (lambda: FailureConfig(hang_timeout_s=0), "more than 0"),
        (lambda: CheckpointConfig(num_to_keep=0), "1 or more"),
        (lambda: CheckpointConfig(checkpoint_score_order="maximum"), "'max'"),
        (lambda: CheckpointConfig(checkpoint_score_attribute=""), "reported metric"),
        (lambda: LoggingConfig(log_level="info"), "INFO"),
        (lambda: RunConfig(resume="yes"), "'auto'"),
        (lambda: RunConfig(name="../up"), "relative"),
        (lambda: RunConfig(name="/abs"), "relative"),
        (lambda: RunConfig(name=" "), "folder name"),
        (lambda: RunConfig(name="x" * 300), "at most 200"),
        (lambda: RunConfig(failure_config=3), "FailureConfig"),
        (lambda: RunConfig(callbacks=[dict]), "dict()"),
        (lambda: RunConfig(storage_path=""), "s3://"),
    ],
)
def test_a_wrong_run_says_what_is_right(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_the_place_of_a_run(tmp_path, monkeypatch):
    assert RunConfig(storage_path="~/x", name="a").run_url == os.path.expanduser("~/x/a")
    assert RunConfig(storage_path="s3://bucket/p/", name="a/b").run_url == "s3://bucket/p/a/b"
    assert RunConfig(storage_path=f"file://{tmp_path}", name="a").run_url == str(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert RunConfig(storage_path="here", name="a").run_url == str(tmp_path / "here" / "a")
    filesystem = object()
    run = RunConfig(storage_path="bucket/p", name="a", storage_filesystem=filesystem, storage_options={"x": 1})
    assert (run.run_url, run.run_options) == ("bucket/p/a", {"x": 1, "filesystem": filesystem})


def test_a_made_up_name_is_fresh_and_can_be_made_up_again():
    first, second = RunConfig(), RunConfig()
    assert first.name != second.name
    name = first.name
    first.rename()
    assert first.name != name
    with pytest.raises(ValueError, match="given"):
        RunConfig(name="mine").rename()


def test_configs_can_be_copied_compared_replaced_and_pickled():
    run = RunConfig(name="a", checkpoint_config=CheckpointConfig(num_to_keep=2))
    assert copy.deepcopy(run) == run
    assert pickle.loads(pickle.dumps(run)) == run
    assert dataclasses.replace(run, name="b").name == "b"
    assert dataclasses.replace(run.checkpoint_config, num_to_keep=3) == CheckpointConfig(num_to_keep=3)
