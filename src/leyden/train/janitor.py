"""Deletions in the background. One that fails is a warning, never an error of the run."""

import queue
import threading
from collections.abc import Callable

from leyden.base.log import log

__all__ = ["Janitor"]

_PATIENCE_S = 60.0


class Janitor:
    """A thread, begun with the first job, that does jobs one after another.

    Args:
        remove: Deletes a folder.
    """

    def __init__(self, remove: Callable[[str], object]) -> None:
        self._remove = remove
        self._jobs: queue.Queue[tuple[Callable[[], object], str] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def remove(self, folder: str) -> None:
        """Deletes ``folder`` soon."""
        self.do(lambda: self._remove(folder), folder)

    def do(self, job: Callable[[], object], what: str) -> None:
        """Runs ``job`` soon; ``what`` it is about is named if it fails."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="leyden-janitor", daemon=True)
            self._thread.start()
        self._jobs.put((job, what))

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, what = item
            try:
                job()
            except Exception as error:  # whatever a file system raises: the run goes on, and the next sweep tries again
                log.warning("%s could not be cleaned up: %s: %s", what, type(error).__name__, error)
            del job, item

    def wait(self, timeout: float = _PATIENCE_S) -> bool:
        """Waits until all jobs given so far are done; False when that takes longer."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._jobs.put((done.set, "a wait"))
        if not done.wait(timeout):
            log.warning("old checkpoints are still being deleted after %.0f s", timeout)
            return False
        return True

    def close(self) -> None:
        """Waits for all jobs, and ends the thread. A later job begins a new one."""
        if self.wait() and self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._thread = None
