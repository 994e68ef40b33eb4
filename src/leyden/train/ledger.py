"""The truth about a run, in its folder::

    run.json          what was asked for, by which driver, and how it stands   (with run.json.bak)
    ledger.json       the checkpoints that count                               (with ledger.json.bak)
    metrics.jsonl     every report of every rank, as it arrived
    events.jsonl      starts, failures, changes of state
    checkpoint_000000/  the files of all ranks, and .commit.json, which makes them a checkpoint
    logs/rank-N.log

A commit record is written when all files are there, then the ledger, and only then are older checkpoints deleted, in
the background: a crash at any moment leaves a ledger that loads and names nothing that isn't whole.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from leyden.base.events import EventLog, LineLog
from leyden.base.log import log
from leyden.train.artifacts import Checkpoint, ReportedCheckpoint, Result
from leyden.train.config import CheckpointConfig
from leyden.train.documents import read_document, write_document
from leyden.train.index import LEDGER, load_records, read_commit, what_is_missing
from leyden.train.janitor import Janitor
from leyden.train.lock import RunLock
from leyden.train.messages import Metrics
from leyden.train.records import (
    COMMIT_RECORD,
    UPLOAD_MARKER,
    Record,
    by_score,
    encode_record,
    is_own_name,
    live_rows,
    to_drop,
)
from leyden.train.runfile import RUN, STATUSES, RunExistsError, check_resume, driver, is_plain, save_run
from leyden.train.storage import Storage

__all__ = ["Ledger"]

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


class Ledger:
    """The folder of one run. Use `open` for a run that is to go on, `load` to look at one; not from several threads.

    Attributes:
        storage: The run folder.
        config: Which checkpoints to keep.
        records: The checkpoints that count, oldest first.
        run: The content of run.json.
        resumed: Whether `open` found an earlier part of this run.
    """

    def __init__(
        self,
        storage: Storage,
        config: CheckpointConfig,
        run: dict[str, Any],
        records: list[Record],
        newest: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.storage = storage
        self.config = config
        self.run = run
        self.records = records
        self.resumed = False
        self._newest = newest
        self._clock = clock
        self._events: EventLog | None = None  # none of these three when only loaded
        self._metrics: LineLog | None = None
        self._lock: RunLock | None = None
        self._janitor = Janitor(self._remove)
        self._last: dict[int, Mapping[str, Any]] = {}  # rank -> its last metrics
        self._base: dict[int, int] = {}  # attempt -> index of the checkpoint that it began from, or -1

    # ---- making one --------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, storage: Storage) -> "Ledger":
        """Reads a run, also of a driver that is dead or still at work. Changes nothing.

        Raises:
            FileNotFoundError: If there is no run in that folder.
        """
        found = cls._read(storage, None)
        if found is None:
            raise FileNotFoundError(f"{storage.url} holds no run: neither {RUN}, nor a checkpoint, nor {METRICS}")
        return found

    @classmethod
    def _read(cls, storage: Storage, config: CheckpointConfig | None) -> "Ledger | None":
        written, _ = read_document(storage, RUN)
        records, newest = load_records(storage)
        if written is None and not records and newest < 0 and not storage.read_lines(METRICS):
            return None
        run: dict[str, Any] = {"status": "running"} if written is None else written
        known = {name: run.get("checkpoint_config", {}).get(name) for name in asdict(CheckpointConfig())}
        if config is None:
            config = CheckpointConfig(**{name: value for name, value in known.items() if value is not None})
        return cls(storage, config, run, records, newest)

    @classmethod
    def open(
        cls,
        storage: Storage,
        name: str = "",
        resume: str = "auto",
        config: CheckpointConfig | None = None,
        info: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> "Ledger":
        """Begins a run, or goes on with one; checks first that the folder can be written.

        Args:
            storage: The run folder; made if needed.
            name: Of the run.
            resume: See `RunConfig`.
            config: Which checkpoints to keep from now on.
            info: What else run.json should say (scaling, code version, ...), as plain values.
            clock: Seconds since the epoch.

        Raises:
            RunExistsError: If ``resume`` forbids it, or another driver is at work in this folder.
            StorageError: If the folder can't be used.
        """
        storage.check()
        lock = RunLock.take(storage)
        if lock is None:
            raise RunExistsError(
                f"{storage.url}: another process on this machine or network folder is running this run; "
                "wait for it, end it, or pass another RunConfig(name=...)"
            )
        try:
            config = CheckpointConfig() if config is None else config
            found = cls._read(storage, config)
            check_resume(storage, resume, None if found is None else str(found.run.get("status")))
            ledger = cls(storage, config, {"created": clock()}, [], -1) if found is None else found
            ledger._clock, ledger._lock, ledger.resumed = clock, lock, found is not None
            ledger._begin(name, info or {})
        except BaseException:
            lock.release()
            raise
        return ledger

    def _begin(self, name: str, info: Mapping[str, Any]) -> None:
        rows = self.storage.read_lines(METRICS) if self.resumed else []
        self._remember(rows)
        self.run.update(
            driver(),
            format=1,
            name=name,
            checkpoint_config=asdict(self.config),
            attempts=max([int(self.run.get("attempts", 0)), *(row["attempt"] + 1 for row in rows)]),
            error=None,
            return_value=None,
            info=dict(info),
        )
        self._events = EventLog(self.storage.open_lines(EVENTS), self._clock)
        self._metrics = self.storage.open_lines(METRICS)
        self.status("running")
        self._prune()
        self.sweep()
        self._newest = self.records[-1].index if self.records else -1  # reports go on from there, with these numbers

    def _remember(self, rows: list[dict[str, Any]]) -> None:
        for row in live_rows(rows):
            self._last[row["rank"]] = row["values"]

    # ---- what happens ------------------------------------------------------------------------------------------------

    def next_attempt(self) -> int:
        """One more than the highest attempt on record; 0 for a run that never started."""
        return int(self.run.get("attempts", 0))

    def event(self, name: str, **fields: Any) -> None:
        """A line in events.jsonl. With a "start" comes the ``attempt`` that begins now."""
        if name == "start" and "attempt" in fields:
            self.run["attempts"] = max(self.next_attempt(), int(fields["attempt"]) + 1)
            save_run(self.storage, self.run)
        if self._events is not None:
            self._events.emit(name, **fields)

    def metrics(self, message: Metrics) -> None:
        """A line in metrics.jsonl."""
        if self._metrics is None:
            raise ValueError(f"{self.storage.url} was only loaded, or is closed: use Ledger.open")
        base = self._base.get(message.attempt)
        if base is None:
            # No report of an attempt comes before its start, so what is committed now is what it began from.
            base = self._base[message.attempt] = self.records[-1].index if self.records else -1
        self._last[message.rank] = message.values
        self._metrics.append(
            {
                "time": message.time,
                "attempt": message.attempt,
                "base": base,
                "rank": message.rank,
                "index": message.index,
                "checkpoint": message.has_checkpoint,
                "values": message.values,
            }
        )

    def commit(self, record: Record) -> None:
        """Makes a checkpoint of a folder whose files are all there, then gives up those that are not kept.

        Returns when the commit record is safe. The ledger follows it: where it can't be written (a full disk) nothing
        is lost, because it is made again from the commit records; older checkpoints stay until it could be.

        Raises:
            OSError: If the commit record can't be written.
        """
        if self._metrics is not None:
            self._metrics.flush()
        data = json.dumps(encode_record(record), separators=(",", ":")).encode()
        self.storage.write_atomic(f"{record.folder}/{COMMIT_RECORD}", data)
        kept = [each for each in self.records if each.folder != record.folder]
        self.records = sorted([*kept, replace(record, parts={})], key=lambda each: each.index)
        self._newest = max(self._newest, record.index)
        self.event("commit", index=record.index, folder=record.folder, files=len(record.files))
        self._prune()
        self._janitor.do(lambda: self.storage.delete(f"{record.folder}/{UPLOAD_MARKER}"), record.folder)

    def _prune(self) -> None:
        """Gives up what is not kept; the new ledger is written before a file goes."""
        before, drop = self.records, to_drop(self.records, self.config)
        self.records = [record for record in before if record not in drop]
        try:
            self._save()
        except OSError as error:
            self.records = before
            log.warning("%s can't be written now (%s); no checkpoint is given up", self.storage.url_of(LEDGER), error)
            return
        for record in drop:
            self._janitor.remove(record.folder)

    def _remove(self, folder: str) -> None:
        """Deletes a checkpoint that no record names, so that at no moment it looks committed, or not ours to delete."""
        self.storage.write_atomic(f"{folder}/{UPLOAD_MARKER}", b"")
        self.storage.delete(f"{folder}/{COMMIT_RECORD}")
        self.storage.delete_tree(folder)

    def sweep(self) -> list[str]:
        """Removes what unfinished uploads, and deletions that were cut off, left. No rank may run. Never fails.

        Returns:
            The folders.
        """
        ours = {record.folder for record in self.records}
        left = [each for each in self.storage.listdir(folders=True) if each not in ours and self._is_left_over(each)]
        for folder in left:
            self._janitor.remove(folder)
        self._janitor.wait()
        return left

    def _is_left_over(self, folder: str) -> bool:
        if is_own_name(folder) or self.storage.exists(f"{folder}/{UPLOAD_MARKER}"):
            return True
        record = read_commit(self.storage, folder)
        return record is not None and record.index <= self._newest

    def status(self, status: str) -> None:
        """Writes how the run stands: "running", "finished", "errored" or "aborted"."""
        if status not in STATUSES:
            raise ValueError(f"status={status!r}: known: {', '.join(STATUSES)}")
        self.run.update(status=status, updated=self._clock())
        save_run(self.storage, self.run)

    def finish(self, error: BaseException | None = None, return_value: Any = None) -> Result:
        """Writes why the run failed, or what it returned, closes all, and gives the result."""
        self.run["error"] = None if error is None else {"type": type(error).__name__, "text": str(error)}
        self.run["return_value"] = return_value if is_plain(return_value) else None
        save_run(self.storage, self.run)
        self.close()
        return self.to_result(error if isinstance(error, Exception) else None, return_value)

    def close(self) -> None:
        """Waits for deletions, and frees logs and lock. May be called twice."""
        self._janitor.close()
        for each in (self._events, self._metrics):
            if each is not None:
                each.close()
        self._events = self._metrics = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _save(self) -> None:
        entries = [encode_record(record, parts=False) for record in self.records]
        write_document(self.storage, LEDGER, {"format": 1, "newest": self._newest, "checkpoints": entries})

    # ---- what there is -----------------------------------------------------------------------------------------------

    def latest(self) -> Record | None:
        """The newest checkpoint; looks whether it is whole, and falls back to the one before if it isn't."""
        while self.records:
            record = self.records[-1]
            whole = read_commit(self.storage, record.folder)
            missing = "it was deleted" if whole is None else what_is_missing(whole, self.storage.files(record.folder))
            if not missing:
                return record
            log.warning("the checkpoint %s is left out: %s", self.storage.url_of(record.folder), missing)
            self.records = self.records[:-1]
            self._newest = self.records[-1].index if self.records else -1
        return None

    def best(self) -> Record | None:
        """The checkpoint with the best score; the newest where there is no score attribute."""
        ranked = by_score(self.records, self.config)
        return ranked[-1] if ranked else None

    def checkpoint(self, record: Record) -> Checkpoint:
        """A record as users see it."""
        return Checkpoint(self.storage.url_of(record.folder), storage_options=self.storage.options)

    def reported(self) -> list[ReportedCheckpoint]:
        """All checkpoints that are kept, oldest first."""
        return [ReportedCheckpoint(self.checkpoint(each), dict(each.metrics)) for each in self.records]

    def rows(self) -> list[dict[str, Any]]:
        """What rank 0 reported, oldest first, without reports that a later attempt made again."""
        rows = live_rows(self.storage.read_lines(METRICS))
        first = min((row["rank"] for row in rows), default=0)
        return [dict(row["values"]) for row in rows if row["rank"] == first]

    def to_result(self, error: Exception | None = None, return_value: Any = None) -> Result:
        """The result as of now. ``error`` and ``return_value`` default to what run.json says."""
        if error is None and self.run.get("error"):
            from leyden.train.failure import TrainingFailedError

            error = TrainingFailedError(self.run["error"]["text"])
        if not self._last:
            self._remember(self.storage.read_lines(METRICS))
        newest = self.records[-1] if self.records else None
        return Result(
            metrics=dict(self._last[min(self._last)]) if self._last else None,
            checkpoint=None if newest is None else self.checkpoint(newest),
            error=error,
            path=self.storage.url,
            best_checkpoints=[(self.checkpoint(x), dict(x.metrics)) for x in by_score(self.records, self.config)],
            return_value=self.run.get("return_value") if return_value is None else return_value,
            rows=self.rows,
        )
