"""The import paths that Lightning has lead to the same things here, without a second copy of any class."""

import importlib
import pickle
import warnings

import pytest

from leyden.utilities.enums import GradClipAlgorithmType

PATHS = {
    "leyden.accelerators:CUDAAccelerator": "leyden.dist.devices:CUDAAccelerator",
    "leyden.plugins:MixedPrecision": "leyden.strategies.precision:MixedPrecision",
    "leyden.plugins.environments:SLURMEnvironment": "leyden.dist.schedulers:SLURMEnvironment",
    "leyden.plugins.io:TorchCheckpointIO": "leyden.checkpoint.io:TorchCheckpointIO",
    "leyden.plugins.layer_sync:TorchSyncBatchNorm": "leyden.strategies.layer_sync:TorchSyncBatchNorm",
    "leyden.plugins.precision:Precision": "leyden.strategies.precision:Precision",
    "leyden.utilities:CombinedLoader": "leyden.loops.combined:CombinedLoader",
    "leyden.utilities:rank_zero_only": "leyden.base.log:rank_zero_only",
    "leyden.utilities.apply_func:move_data_to_device": "leyden.base.tree:move_to_device",
    "leyden.utilities.combined_loader:CombinedLoader": "leyden.loops.combined:CombinedLoader",
    "leyden.utilities.compile:to_uncompiled": "leyden.core.compile:to_uncompiled",
    "leyden.utilities.data:extract_batch_size": "leyden.base.tree:extract_batch_size",
    "leyden.utilities.exceptions:MisconfigurationException": "leyden.base.errors:MisconfigurationException",
    "leyden.utilities.grads:grad_norm": "leyden.base.modules:grad_norm",
    "leyden.utilities.memory:garbage_collection_cuda": "leyden.base.memory:garbage_collection_cuda",
    "leyden.utilities.model_helpers:is_overridden": "leyden.core.hooks:is_overridden",
    "leyden.utilities.model_summary:ModelSummary": "leyden.callbacks.summary_data:ModelSummary",
    "leyden.utilities.parameter_tying:find_shared_parameters": "leyden.base.modules:find_shared_parameters",
    "leyden.utilities.parsing:AttributeDict": "leyden.core.hparams:AttributeDict",
    "leyden.utilities.rank_zero:rank_zero_warn": "leyden.base.log:rank_zero_warn",
    "leyden.utilities.seed:isolate_rng": "leyden.base.seed:isolate_rng",
    "leyden.utilities.types:LRSchedulerConfig": "leyden.core.optim:LRSchedulerConfig",
    "leyden.utilities.warnings:PossibleUserWarning": "leyden.base.errors:PossibleUserWarning",
}


def target(path: str):
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("alias", PATHS)
def test_alias_is_the_thing_itself(alias):
    assert target(alias) is target(PATHS[alias])


def test_possible_user_warnings_can_be_silenced():
    from leyden.utilities import disable_possible_user_warnings
    from leyden.utilities.warnings import PossibleUserWarning

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warnings.warn("a", PossibleUserWarning, stacklevel=1)
        disable_possible_user_warnings()
        warnings.warn("b", PossibleUserWarning, stacklevel=1)
        warnings.warn("c", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["a", "c"]


def test_is_picklable():
    from leyden.utilities import is_picklable

    assert is_picklable({"a": 1})
    assert not is_picklable(lambda: None)


def test_enum_compares_with_strings_in_any_case():
    assert GradClipAlgorithmType.NORM == "Norm"
    assert GradClipAlgorithmType.NORM != "value"
    assert GradClipAlgorithmType.NORM != 3
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert GradClipAlgorithmType.supported_type("norm")
    assert not GradClipAlgorithmType.supported_type("norms")
    assert GradClipAlgorithmType.from_str("VALUE") is GradClipAlgorithmType.VALUE
    assert {GradClipAlgorithmType.NORM: 1}["norm"] == 1
    assert pickle.loads(pickle.dumps(GradClipAlgorithmType.NORM)) is GradClipAlgorithmType.NORM
    with pytest.raises(ValueError, match=r"'max' is not one of 'value', 'norm'"):
        GradClipAlgorithmType.from_str("max")


def test_types_can_be_used_in_annotations():
    from typing import get_type_hints

    from leyden.utilities.types import STEP_OUTPUT, OptimizerLRScheduler

    def step(batch: STEP_OUTPUT) -> OptimizerLRScheduler: ...

    assert set(get_type_hints(step)) == {"batch", "return"}
