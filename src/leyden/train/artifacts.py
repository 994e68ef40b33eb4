"""What a run leaves behind: `Checkpoint`, a pointer to a folder of files; and `Result`."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from leyden.base import files
from leyden.train import downloads
from leyden.train.storage import Storage

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pandas import DataFrame

__all__ = [
    "Checkpoint",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
]

_METADATA = ".metadata.json"


class CheckpointUploadMode(Enum):
    """How `report` brings a checkpoint into the run folder.

    SYNC: it returns when the files are there. ASYNC: a thread copies them, and the folder must not be changed
    meanwhile. NO_UPLOAD: the files were written into the run folder already.
    """

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


class CheckpointConsistencyMode(Enum):
    """Which checkpoints `get_all_reported_checkpoints` waits for; no validation runs here, so both mean committed."""

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(Enum):
    """Where a reported checkpoint stands; no validation runs here, so it is COMMITTED once it is listed."""

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


class Checkpoint:
    """A folder of files, somewhere. Making one reads and writes nothing.

    Args:
        path: A local folder, or a URL that fsspec knows.
        filesystem: The fsspec (or pyarrow) file system that ``path`` is in.
        storage_options: For the file system's constructor; see `Storage`.

    Attributes:
        path: As it was given; a local one is absolute.
    """

    def __init__(
        self,
        path: files.PathLike,
        filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = {} if filesystem is None else {"filesystem": filesystem}
        self._storage = Storage(path, {**(storage_options or {}), **given})
        self.path = self._storage.url

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @classmethod
    def from_directory(cls, path: files.PathLike) -> "Checkpoint":
        """The checkpoint whose files lie in a local folder; nothing is copied."""
        return cls(path)

    @property
    def storage(self) -> Storage:
        """The folder as a `Storage`."""
        return self._storage

    @property
    def filesystem(self) -> "AbstractFileSystem":
        """The fsspec file system that ``path`` is in."""
        return self._storage.filesystem

    def to_directory(self, path: files.PathLike | None = None) -> str:
        """Copies the files to a local folder and returns it.

        Processes of one machine that ask for the same folder at the same time share one download.

        Args:
            path: The folder, made if needed. None: one under the system's temporary folder, the same for all processes
                of this machine; it is yours to delete.

        Raises:
            FileNotFoundError: If the checkpoint is not there any more.
        """
        if path is None:
            return downloads.to_shared(self._storage)
        return downloads.to_folder(self._storage, os.path.abspath(os.fspath(path)))

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A local folder with the files, to read from.

        For a local checkpoint the folder itself. For a remote one a download, which all processes of this machine
        share, and the last one to leave deletes.

        Raises:
            FileNotFoundError: If the checkpoint is not there any more.
        """
        if self._storage.is_local:
            if not os.path.isdir(self.path):
                raise FileNotFoundError(f"{self.path} is not there: the checkpoint was deleted, or never written")
            yield self.path
        else:
            with downloads.shared(self._storage) as folder:
                yield folder

    @property
    def metadata(self) -> dict[str, Any]:
        """The same as `get_metadata`."""
        return self.get_metadata()

    def get_metadata(self) -> dict[str, Any]:
        """What `set_metadata` stored; empty when nothing was."""
        try:
            return json.loads(self._storage.read(_METADATA))
        except FileNotFoundError:
            return {}

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Stores a dict of plain values beside the files, in place of what was there.

        Raises:
            TypeError: If a value can't be written as JSON.
        """
        self._storage.write_atomic(_METADATA, json.dumps(dict(metadata)).encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds to what is stored; a key that is there gets the new value."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def delete_local(self) -> None:
        """Deletes the folder of a local checkpoint; a remote one is left alone. Nothing happens when it isn't there."""
        if self._storage.is_local:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.path)


@dataclass(frozen=True)
class ReportedCheckpoint:
    """A committed checkpoint, with the metrics reported with it."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


@dataclass
class Result:
    """How a run ended, and what it left.

    Attributes:
        metrics: What rank 0 reported last; None when nothing was reported.
        checkpoint: The newest committed checkpoint; None where there is none.
        error: Why the run did not succeed, else None.
        path: The run folder; None for a run that has none.
        best_checkpoints: The checkpoints that are kept, each with its metrics, the best last; by age when no score
            attribute was given.
        return_value: What rank 0's function returned. `from_path` gives it where JSON can hold it, else None.
        filesystem: The fsspec file system of ``path`` where one was given, else None.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: Exception | None = None
    path: str | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    return_value: Any = None
    filesystem: Any = None
    rows: Callable[[], Sequence[Mapping[str, Any]]] = field(default=tuple, repr=False, compare=False)

    @property
    def metrics_dataframe(self) -> "DataFrame":
        """All that rank 0 reported, a row for each report that counts; nested values get names such as ``a/b``.

        Reports that a restart made again appear once.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "Result.metrics_dataframe needs pandas: `pip install pandas`, or read Result.metrics_history"
            ) from error
        return pandas.DataFrame(self.metrics_history)

    @property
    def metrics_history(self) -> list[dict[str, Any]]:
        """The rows of `metrics_dataframe` as dicts."""
        return [_flat(row) for row in self.rows()]

    def get_best_checkpoint(self, metric: str, mode: Literal["min", "max"]) -> Checkpoint | None:
        """Of the checkpoints that are kept, the one with the best value; None where none has that metric.

        Args:
            metric: A reported name; ``a/b`` for nested values.
            mode: Whether low or high is good.
        """
        from leyden.train.records import score_of

        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: pass 'min' or 'max'")
        scored = [(score_of(metrics, metric), number) for number, (_, metrics) in enumerate(self.best_checkpoints)]
        usable = [(score, number) for score, number in scored if score is not None and score == score]
        if not usable:
            names = sorted({name for _, metrics in self.best_checkpoints for name in _flat(metrics)})
            if self.best_checkpoints and metric not in names:
                raise ValueError(f"no kept checkpoint has a metric {metric!r}; there are {', '.join(names) or 'none'}")
            return None
        best = (max if mode == "max" else min)(usable, key=lambda each: each[0])
        return self.best_checkpoints[best[1]][0]

    @classmethod
    def from_path(
        cls,
        path: files.PathLike,
        storage_filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "Result":
        """The result of a run from its folder, also of one that failed or was killed. Changes nothing there.

        Args:
            path: The run folder, or its URL.
            storage_filesystem: The fsspec or pyarrow file system that it is in.
            storage_options: See `RunConfig`.

        Raises:
            FileNotFoundError: If there is no run in that folder.
        """
        from leyden.train.ledger import Ledger

        given = {} if storage_filesystem is None else {"filesystem": storage_filesystem}
        result = Ledger.load(Storage(path, {**(storage_options or {}), **given})).to_result()
        result.filesystem = storage_filesystem
        return result


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
