"""The orchestrator: runs a training function in workers, here or on a cluster, and keeps what it reports.

The names that scripts need are here, in `leyden.train.torch` (`TorchTrainer` and helpers), in `leyden.train.lightning`
and in `leyden.train.collective`; they are those of Ray Train.
"""

from leyden.base.registry import lazy_exports

_CONFIG = "leyden.train.config"
_CONTEXT = "leyden.train.context"
_ARTIFACTS = "leyden.train.artifacts"
_FAILURE = "leyden.train.failure"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Checkpoint": _ARTIFACTS,
        "CheckpointConfig": _CONFIG,
        "CheckpointConsistencyMode": _ARTIFACTS,
        "CheckpointUploadMode": _ARTIFACTS,
        "ControllerError": _FAILURE,
        "FailureConfig": _CONFIG,
        "LoggingConfig": _CONFIG,
        "ReportedCheckpoint": _ARTIFACTS,
        "Result": _ARTIFACTS,
        "RunConfig": _CONFIG,
        "ScalingConfig": _CONFIG,
        "TrainingFailedError": _FAILURE,
        "UserCallback": "leyden.train.callbacks",
        "WorkerGroupError": _FAILURE,
        "get_all_reported_checkpoints": _CONTEXT,
        "get_checkpoint": _CONTEXT,
        "get_context": _CONTEXT,
        "get_dataset_shard": _CONTEXT,
        "report": _CONTEXT,
    },
    submodules=("collective", "lightning", "torch"),
)
