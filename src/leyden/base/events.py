"""Append-only logs of JSON lines, that survive a crash at any byte.

A line is whole or is skipped when it is read. What can't be written now (a full disk, a store that is away) is kept and
written later; nothing is dropped. NaN and infinities are written as ``NaN`` and ``Infinity``, as Python's json does.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from leyden.base.log import log

__all__ = ["EventLog", "LineLog", "LocalLines", "SegmentedLines", "decode_line", "encode_line", "parse_lines"]

_SEGMENT_BYTES = 1 << 20
_FLUSH_EVERY_S = 2.0


class LineLog(Protocol):
    """Something that lines can be appended to."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line; never raises for a store that can't be written now."""
        ...

    def flush(self) -> bool:
        """Writes all that was appended, so that a power cut does not lose it. False: not possible now, all is kept."""
        ...

    def close(self) -> bool:
        """Flushes, and frees what the log holds; False when lines had to be given up. May be called twice."""
        ...


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One JSON line. Values that JSON doesn't know are written as their text: an event must not end a run."""
    return json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for an empty line, and for one that is torn or is no JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def parse_lines(chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """The records of some files of lines, in order, without the lines that a crash left torn."""
    return [record for chunk in chunks for line in chunk.splitlines() if (record := decode_line(line)) is not None]


class LocalLines:
    """A local file of lines. Each goes to the kernel at once, so that it outlives this process, killed or not.

    Args:
        path: The file; made when it isn't there, continued when it is. Its folder must exist.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pending = b""
        self._warned = False
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not _ends_a_line(path):
            self._pending = b"\n"  # the line that a killed writer left torn stays apart from ours

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line; see `LineLog.append`."""
        line = encode_line(record)
        with self._lock:
            self._pending += line
            self._write()

    def _write(self) -> bool:
        if self._file is None:
            return not self._pending
        try:
            while self._pending:
                # A full disk may take a part of a line; the rest follows when there is room, so no line is torn.
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            if not self._warned:
                log.warning("%s can't be written now (%s); its lines are kept in memory until it can", self.path, error)
            self._warned = True
            return False
        self._warned = False
        return True

    def flush(self) -> bool:
        """Forces all lines to disk; see `LineLog.flush`."""
        with self._lock:
            if self._file is None:
                return not self._pending
            written = self._write()
            try:
                os.fsync(self._file)
            except OSError as error:
                log.warning("%s is not safe from a power cut: %s", self.path, error)
                return False
            return written

    def close(self) -> bool:
        """Flushes and closes the file; see `LineLog.close`."""
        done = self.flush()
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if self._pending.strip():
                lines = self._pending.count(b"\n")
                log.error("%s could not be written to the end: %d lines are lost", self.path, lines)
                self._pending = b""
        return done


def _ends_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


class SegmentedLines:
    """Lines in a store whose objects can't be appended to: ``NAME.000000.jsonl``, ``NAME.000001.jsonl``, ...

    A thread writes what is new every few seconds, by putting the last segment again; a full one is left alone. So a
    kill -9 of this process loses at most those seconds, and the cost of a flush is bounded however long the log is.

    Args:
        put: Writes an object: ``put(name, data)``. May raise anything; it is tried again at the next flush.
        name: Of the log, ``"metrics.jsonl"`` for example.
        first: Number of the first segment to write: those before it are there already.
        every_s: Seconds between flushes.
        segment_bytes: A segment this long is left, and the next one begun.
    """

    def __init__(
        self,
        put: Callable[[str, bytes], object],
        name: str,
        first: int = 0,
        every_s: float = _FLUSH_EVERY_S,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        self._put = put
        self._stem = name.removesuffix(".jsonl")
        self._segments: list[tuple[int, bytes]] = []  # full ones that are not in the store yet
        self._number = first
        self._lines: list[bytes] = []
        self._bytes = 0
        self._limit = segment_bytes
        self._every_s = every_s
        self._dirty = False
        self._warned = False
        self._lock = threading.Lock()  # of the lines
        self._writing = threading.Lock()  # of the store: one flush at a time
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def segment_name(name: str, number: int) -> str:
        """The name of a segment of the log ``name``."""
        return f"{name.removesuffix('.jsonl')}.{number:06d}.jsonl"

    @staticmethod
    def segments(name: str, names: Iterable[str]) -> list[str]:
        """Of the ``names`` in a folder, the segments of the log ``name``, in order."""
        stem = name.removesuffix(".jsonl") + "."
        numbered = [each for each in names if each.startswith(stem) and each.endswith(".jsonl")]
        return sorted(each for each in numbered if each[len(stem) : -len(".jsonl")].isdigit())

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line; see `LineLog.append`."""
        line = encode_line(record)
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line)
            self._dirty = True
            if self._bytes >= self._limit:
                self._segments.append((self._number, b"".join(self._lines)))
                self._number, self._lines, self._bytes = self._number + 1, [], 0
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._flush_now_and_then, name="leyden-lines", daemon=True)
                self._thread.start()

    def _flush_now_and_then(self) -> None:
        while not self._closed.wait(self._every_s):
            self.flush()

    def flush(self) -> bool:
        """Puts what is new into the store; see `LineLog.flush`."""
        with self._writing:
            with self._lock:
                if not self._dirty:
                    return True
                self._dirty = False
                due = [*self._segments, (self._number, b"".join(self._lines))]
            written = 0
            try:
                for number, data in due:
                    if data:
                        self._put(self.segment_name(self._stem, number), data)
                    written += 1
            except Exception as error:  # any error of the store: a later flush tries again
                if not self._warned:
                    log.warning("%s.jsonl can't be written now (%s); its lines are kept", self._stem, error)
                self._warned = True
                with self._lock:
                    self._dirty = True
                return False
            finally:
                with self._lock:
                    full = min(written, len(due) - 1)  # the last one may have grown, and is never forgotten
                    self._segments = self._segments[full:]
            self._warned = False
            return True

    def close(self) -> bool:
        """Flushes and ends the thread; see `LineLog.close`."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        done = self.flush()
        if not done:
            log.error("%s.jsonl could not be written to the end: its last lines are lost", self._stem)
        return done


class EventLog:
    """What happened in a run, one line per event: ``{"time": ..., "event": ..., ...}``.

    Args:
        lines: Where they go: `LocalLines` or `SegmentedLines`.
        clock: Seconds since the epoch.
    """

    def __init__(self, lines: LineLog, clock: Callable[[], float] = time.time) -> None:
        self._lines = lines
        self._clock = clock

    def emit(self, event: str, **fields: Any) -> None:
        """Records ``event`` with the time of now."""
        self._lines.append({"time": self._clock(), "event": event, **fields})

    def flush(self) -> bool:
        """See `LineLog.flush`."""
        return self._lines.flush()

    def close(self) -> bool:
        """See `LineLog.close`."""
        return self._lines.close()
