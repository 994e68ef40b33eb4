"""What the user's training function calls: reports, checkpoints and who it is."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from leyden.train import session
from leyden.train.session import Session

if TYPE_CHECKING:
    from leyden.train.artifacts import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode, ReportedCheckpoint
    from leyden.train.storage import Storage

__all__ = [
    "TrainContext",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "report",
]

_MODES = {"SYNC": "sync", "ASYNC": "async", "NO_UPLOAD": "none"}


def _session(name: str) -> Session:
    current = session.current()
    if current is None:
        raise RuntimeError(
            f"leyden.train.{name}() works in a training worker only: call it inside the function that is given to "
            "TorchTrainer(train_loop_per_worker) and run by fit(). In the driver, what was reported is in the Result "
            "that fit() returns"
        )
    return current


def report(
    metrics: Mapping[str, Any],
    checkpoint: "Checkpoint | None" = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: "CheckpointUploadMode | None" = None,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Any = None,
    validation: Any = False,
) -> None:
    """Reports metrics and, if there is one, a checkpoint.

    Metrics alone cost microseconds, and never wait for other ranks, which may report more or less often. They are kept
    even if the process dies in the next instruction. A checkpoint is committed when every rank has reported as often as
    this one, and the files of all that had one are stored.

    Args:
        metrics: Numbers, strings, booleans, None, numpy and tensor scalars, and nested dicts and lists of these.
        checkpoint: A local folder's, of which this rank's files are copied to the run folder.
        checkpoint_dir_name: Its name there; default: ``checkpoint_`` and the number of the report. All ranks give
            the same.
        checkpoint_upload_mode: SYNC (default) returns when the files are stored, ASYNC at once: they are copied in the
            background, and an error is raised by the next report, or at the end. NO_UPLOAD: they lie in the run folder.
        delete_local_checkpoint_after_upload: Default: True for ASYNC only.
        checkpoint_upload_fn: Copies the files instead: ``(checkpoint, checkpoint_dir_name) -> Checkpoint``.
        validation: Not supported: validate in the training function, or in a run of its own.

    Raises:
        TypeError: A metric is none of the above; named by its path.
        RuntimeError: Called outside of a worker.
    """
    current = _session("report")
    if checkpoint is None:
        current.report(metrics, None, None, "sync", False, None)
        return
    if validation:
        raise ValueError(
            "report(validation=...) is not supported; validate in the training function and report the metrics there"
        )
    mode = "sync" if checkpoint_upload_mode is None else _MODES[_name(checkpoint_upload_mode)]
    delete = mode == "async" if delete_local_checkpoint_after_upload is None else delete_local_checkpoint_after_upload
    if not hasattr(checkpoint, "as_directory"):
        raise TypeError(
            f"report(checkpoint={checkpoint!r}) takes a Checkpoint: pass Checkpoint.from_directory(folder), not a "
            f"{type(checkpoint).__name__}"
        )
    current.report(metrics, checkpoint, checkpoint_dir_name, mode, delete, checkpoint_upload_fn)


def _name(mode: Any) -> str:
    name = getattr(mode, "name", str(mode)).upper()
    if name not in _MODES:
        raise ValueError(
            f"checkpoint_upload_mode={mode!r} is unknown; use one of CheckpointUploadMode: {', '.join(_MODES)}"
        )
    return name


def get_checkpoint() -> "Checkpoint | None":
    """The last committed checkpoint: of this run, or of the one it continues; None where there is none."""
    current = _session("get_checkpoint")
    folder = current.checkpoint_folder()
    return None if folder is None else _checkpoint(current, folder)


def _checkpoint(current: Session, folder: str) -> "Checkpoint":
    from leyden.train.artifacts import Checkpoint

    return Checkpoint(current.storage.url_of(folder), storage_options=dict(current.plan.storage_options))


def get_all_reported_checkpoints(
    consistency_mode: "CheckpointConsistencyMode | None" = None, timeout_s: float | None = None
) -> "list[ReportedCheckpoint]":
    """All committed checkpoints that are kept, oldest first.

    Waits until the last one that this rank reported is committed, for which the other ranks must have reported too.

    Args:
        consistency_mode: Both modes mean the same here: checkpoints are committed, and not validated afterwards.
        timeout_s: Then returns what there is; None: waits.
    """
    current = _session("get_all_reported_checkpoints")
    current.finish_upload()
    current.wait_for_commit(timeout_s)
    from leyden.train.ledger import Ledger

    return Ledger.load(current.storage).reported()


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This rank's part of a dataset that was given to the trainer.

    Args:
        dataset_name: Default: the only one, or ``"train"``.

    Raises:
        KeyError: No dataset has this name.
    """
    current = _session("get_dataset_shard")
    datasets = current.datasets
    name = dataset_name or (next(iter(datasets)) if len(datasets) == 1 else "train")
    if name not in datasets:
        known = ", ".join(map(repr, datasets)) or "none"
        raise KeyError(f"no dataset {name!r} was given to TorchTrainer(datasets=...); given: {known}")
    from leyden.train.datasets import DatasetSource

    dataset = datasets[name]
    if isinstance(dataset, DatasetSource):
        return dataset.shard(current.plan.rank, current.plan.world_size)
    return dataset


def get_context() -> "TrainContext":
    """Who this worker is."""
    return TrainContext(_session("get_context"))


class TrainContext:
    """Who this worker is among the others, and in which run."""

    def __init__(self, current: Session) -> None:
        self._session = current
        self._plan = current.plan

    def get_experiment_name(self) -> str:
        """Name of the run."""
        return self._plan.run_name

    def get_world_size(self) -> int:
        """Number of workers on all nodes."""
        return self._plan.world_size

    def get_world_rank(self) -> int:
        """0-based, among all workers."""
        return self._plan.rank

    def get_local_rank(self) -> int:
        """0-based, among the workers of this node."""
        return self._plan.local_rank

    def get_local_world_size(self) -> int:
        """Number of workers on this node."""
        return self._plan.local_world_size

    def get_node_rank(self) -> int:
        """0-based, the same for all workers of a node."""
        return self._plan.node_rank

    def get_storage(self) -> "Storage":
        """The run folder."""
        return self._session.storage

    def __getattr__(self, name: str) -> Any:
        if name in {"get_metadata", "get_trial_name", "get_trial_id", "get_trial_resources", "get_trial_dir"}:
            raise AttributeError(
                f"get_context().{name}() belongs to trials of a tuner, which a worker knows nothing of; use "
                "get_experiment_name() for the run, and train_loop_config for what the trial decided"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def report_folder(metrics: Mapping[str, Any], folder: str | None) -> None:
    """For `leyden.dist.worker`: `report` with the path of a folder."""
    if folder is None:
        report(metrics)
        return
    from leyden.train.artifacts import Checkpoint

    report(metrics, Checkpoint.from_directory(folder))


def latest_folder() -> str | None:
    """For `leyden.dist.worker`: a local folder with the last committed checkpoint; None where there is none."""
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return None
    path = str(checkpoint.path)
    return path if os.path.isdir(path) else str(checkpoint.to_directory())
