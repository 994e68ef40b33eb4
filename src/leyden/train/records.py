"""The records of a run folder, and pure decisions over them; nothing here touches a file."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.checkpoint.retain import Entry, Mode, rankable, retain
from leyden.train.config import CheckpointConfig

__all__ = [
    "COMMIT_RECORD",
    "UPLOAD_MARKER",
    "Record",
    "by_score",
    "check_folder_name",
    "checkpoint_folder",
    "decode_record",
    "encode_record",
    "is_own_name",
    "live_rows",
    "score_of",
    "to_drop",
]

# Written last into a checkpoint folder: it makes the files there a checkpoint.
COMMIT_RECORD = ".commit.json"
# Lies in a checkpoint folder from the first upload into it until that.
UPLOAD_MARKER = ".uploading"

_FORMAT = 1
_OWN_FOLDER = re.compile(r"checkpoint_\d{6,}")
_ROW = {"attempt", "base", "rank", "index", "values"}  # what every line of metrics.jsonl has
_RESERVED = frozenset({"logs"})  # of the names in a run folder, the one that looks like a checkpoint's


@dataclass(frozen=True)
class Record:
    """One committed checkpoint.

    Attributes:
        index: Of the report that it came with.
        folder: Name in the run folder.
        metrics: Reported with it, by the lowest rank that reported.
        time: When it was committed, seconds since the epoch.
        attempt: Of the run's starts, the one that it comes from.
        world_size: Number of ranks then.
        parts: Rank -> its files -> size in bytes. Only in the commit record, not in the ledger, which stays short.
    """

    index: int
    folder: str
    metrics: Mapping[str, Any]
    time: float = 0.0
    attempt: int = 0
    world_size: int = 1
    parts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, int]:
        """Path -> size of all files. Where several ranks wrote the same path, any of their sizes is right."""
        return {name: size for part in self.parts.values() for name, size in part.items()}

    @property
    def sizes(self) -> dict[str, set[int]]:
        """Path -> the sizes that it may have."""
        sizes: dict[str, set[int]] = {}
        for part in self.parts.values():
            for name, size in part.items():
                sizes.setdefault(name, set()).add(size)
        return sizes


def checkpoint_folder(index: int, name: str | None = None) -> str:
    """The folder of the checkpoint of report ``index``: ``name`` if the user gave one, checked."""
    if name is None:
        return f"checkpoint_{index:06d}"
    check_folder_name(name)
    return name


def is_own_name(folder: str) -> bool:
    """Whether this is a name that `checkpoint_folder` makes up."""
    return _OWN_FOLDER.fullmatch(folder) is not None


def check_folder_name(name: str) -> None:
    """Refuses what can't be the name of a checkpoint in a run folder.

    Raises:
        ValueError: Saying what can.
    """
    if not isinstance(name, str) or not name or len(name) > 200 or set(name) & set("/\\\0"):
        raise ValueError(f"checkpoint_dir_name={name!r}: pass the name of one folder, such as 'epoch=3', without /")
    if name.startswith(".") or name in _RESERVED:
        raise ValueError(f"checkpoint_dir_name={name!r}: names with a dot in front, and 'logs', have another use")


def encode_record(record: Record, parts: bool = True) -> dict[str, Any]:
    """The record as plain values, with or without its files."""
    return {
        "format": _FORMAT,
        "index": record.index,
        "folder": record.folder,
        "metrics": record.metrics,
        "time": record.time,
        "attempt": record.attempt,
        "world_size": record.world_size,
        "parts": record.parts if parts else {},  # JSON makes text of the ranks
    }


def decode_record(data: bytes | Mapping[str, Any]) -> Record:
    """The record that `encode_record` gave, also from the bytes of a commit record.

    Raises:
        ValueError: If it is torn, or is no such record.
    """
    plain = json.loads(data) if isinstance(data, bytes) else data
    try:
        if plain["format"] > _FORMAT:
            raise ValueError(f"written by a newer version (format {plain['format']}, this one reads {_FORMAT})")
        return Record(
            index=int(plain["index"]),
            folder=str(plain["folder"]),
            metrics=dict(plain["metrics"]),
            time=float(plain["time"]),
            attempt=int(plain["attempt"]),
            world_size=int(plain["world_size"]),
            parts={int(rank): dict(part) for rank, part in plain["parts"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no record of a checkpoint: {type(error).__name__}: {error}") from error


def score_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """The value of a metric as a number; ``a/b`` also means ``{"a": {"b": ...}}``. None: absent, or no number."""
    value: Any = metrics.get(name)
    if value is None and name not in metrics:
        value = metrics
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, (bool, int, float)):
        return float(value)
    return None


def _mode(config: CheckpointConfig) -> Mode:
    return "newest" if config.checkpoint_score_attribute is None else config.checkpoint_score_order


def _entries(records: Sequence[Record], config: CheckpointConfig) -> list[Entry]:
    """One entry for each record, in order; without the metric it scores as badly as NaN."""
    mode, name = _mode(config), config.checkpoint_score_attribute
    entries = []
    for record in records:
        score = None if name is None else score_of(record.metrics, name)
        entries.append(Entry(record.folder, rankable(float("nan") if score is None else score, mode)))
    return entries


def to_drop(records: Sequence[Record], config: CheckpointConfig) -> list[Record]:
    """Of ``records`` (oldest first), those to give up: beside the best ``num_to_keep``, the newest always stays."""
    if config.num_to_keep is None or not records:
        return []
    _, drop = retain(_entries(records, config), config.num_to_keep, _mode(config))
    folders = {entry.path for entry in drop} - {records[-1].folder}
    return [record for record in records if record.folder in folders]


def by_score(records: Sequence[Record], config: CheckpointConfig) -> list[Record]:
    """``records`` (oldest first) with the best last; of equal ones the newer is the better."""
    mode = _mode(config)
    if mode == "newest":
        return list(records)
    sign = -1.0 if mode == "min" else 1.0
    scored = zip(_entries(records, config), records, strict=True)
    return [record for _, record in sorted(scored, key=lambda each: sign * each[0].score)]


def live_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lines of metrics.jsonl, without those that a later attempt made again.

    An attempt that goes on from the checkpoint of report ``base`` takes the place of all that earlier ones reported
    after it. Lines without these numbers are left out: nothing here wrote them.
    """
    every = [row for row in rows if row.keys() >= _ROW]
    bases: dict[int, int] = {row["attempt"]: row["base"] for row in every}
    limits: dict[int, float] = {}
    lowest = float("inf")
    for attempt in sorted(bases, reverse=True):
        limits[attempt] = lowest
        lowest = min(lowest, bases[attempt])
    return [row for row in every if row["index"] <= limits[row["attempt"]]]
