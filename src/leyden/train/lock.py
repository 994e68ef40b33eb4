"""One driver for one run folder."""

import os
import threading

from leyden.train.storage import Storage

__all__ = ["RunLock"]

_here: set[str] = set()  # folders that this process holds: the system's lock would let us take them twice
_guard = threading.Lock()


class RunLock:
    """Held until `release`, or until this process ends in any way.

    It keeps out drivers on this machine, and on others that mount the folder with locks. Object stores have no locks:
    there only other runs of this process are kept out.
    """

    def __init__(self, url: str, file: int | None) -> None:
        self._url: str | None = url
        self._file = file

    @classmethod
    def take(cls, storage: Storage) -> "RunLock | None":
        """The lock of a run folder, or None when another driver has it."""
        with _guard:
            if storage.url in _here:
                return None
            file = None
            if storage.is_local:
                # Record locks belong to this process: ranks that are forked from it don't hold on to them.
                file = os.open(storage.url_of(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                if not _lock(file):
                    os.close(file)
                    return None
            _here.add(storage.url)
            return cls(storage.url, file)

    def release(self) -> None:
        """Lets other drivers in. May be called twice."""
        with _guard:
            if self._url is not None:
                _here.discard(self._url)
                self._url = None
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _lock(file: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a network folder without locks
    return True
