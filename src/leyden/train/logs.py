"""The output of a rank: a file from the first byte on, of which others read the end."""

import codecs
import os
import tempfile
from pathlib import Path

__all__ = ["RankLog", "open_log"]

_TAIL_BYTES = 32768
_TAIL_LINES = 50
_CHUNK = 1 << 18


class RankLog:
    """The log of one rank's attempt; the rank writes to ``descriptor`` itself, so nothing is lost with the agent.

    Args:
        path: Of the file, which grows from attempt to attempt; its folders are made.
        attempt: Above 0 a line announces it.

    Raises:
        OSError: The file can't be written.
    """

    def __init__(self, path: str, attempt: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if attempt:
            os.write(self.descriptor, f"---- attempt {attempt} ----\n".encode())
        self._start = self._read = self.size
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.descriptor).st_size

    def fresh(self) -> str:
        """What was written since the last call."""
        parts = []
        while data := os.pread(self.descriptor, _CHUNK, self._read):
            self._read += len(data)
            parts.append(self._decoder.decode(data))
        return "".join(parts)

    def since(self, offset: int) -> str:
        """What was written after the byte ``offset``."""
        return os.pread(self.descriptor, _CHUNK, offset).decode(errors="replace")

    def tail(self) -> tuple[str, ...]:
        """The last lines of this attempt."""
        size = self.size
        start = max(self._start, size - _TAIL_BYTES)
        lines = os.pread(self.descriptor, size - start, start).decode(errors="replace").splitlines()
        return tuple(lines[-_TAIL_LINES:])

    def close(self) -> None:
        """Closes this process's descriptor."""
        os.close(self.descriptor)


def open_log(path: str, attempt: int) -> tuple[RankLog, str]:
    """Opens ``path``, or a file in a new temporary folder where that fails; the second value says why."""
    name = Path(path).name
    try:
        return RankLog(path, attempt), ""
    except OSError as error:
        folder = tempfile.mkdtemp(prefix="leyden-logs-")
        return RankLog(os.path.join(folder, name), attempt), f"can't write {path} ({error}); the log is in {folder}"
