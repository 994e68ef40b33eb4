"""The worker's side of a run: what it reports, and what it has been told."""

import os
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from leyden.train.link import HEADER, pack
from leyden.train.messages import Boundary, CheckpointPart, Committed, Metrics, RankPlan
from leyden.train.metrics import plain_metrics
from leyden.train.records import COMMIT_RECORD, UPLOAD_MARKER, check_folder_name, checkpoint_folder
from leyden.train.signs import Beat, Busy

if TYPE_CHECKING:
    from leyden.train.artifacts import Checkpoint
    from leyden.train.storage import Storage

__all__ = ["Channel", "Session", "SocketChannel", "current", "set_current"]

_BEAT_EVERY = 0.5  # seconds at least between two signs of progress
_UPDATE_EVERY = 0.01  # seconds at least between two looks at what has arrived, for those who look at every step


class Channel(Protocol):
    """How a session reaches whoever runs it."""

    def send(self, message: Any) -> None:
        """Returns when the message is out of this process."""
        ...

    def receive(self) -> list[Any]:
        """What has arrived since the last call; doesn't wait."""
        ...


class SocketChannel:
    """The channel of a rank to its agent.

    What `send` was given is in the kernel when it returns, and stays readable after this process is gone.

    Args:
        sock: Connected; blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._in = bytearray()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send(self, message: Any) -> None:
        """Waits only where the kernel's buffer is full.

        Raises:
            RuntimeError: Called in a fork of the worker, whose bytes could mix with those of the worker.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"report() was called in process {os.getpid()}, which the worker (process {self._pid}) has forked, "
                "e.g. as a DataLoader's worker; call it in the training function itself"
            )
        data = pack(message)
        with self._sending:
            self._sock.sendall(data)

    def receive(self) -> list[Any]:
        """All whole messages that have arrived; none in a fork of the worker, which they are not for."""
        messages = []
        if os.getpid() != self._pid:
            return messages
        with self._receiving:
            try:
                while data := self._sock.recv(1 << 18, socket.MSG_DONTWAIT):
                    self._in += data
            except (BlockingIOError, ConnectionError):  # the end of the agent is the end of this process: no news here
                pass
            while len(self._in) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(self._in)[0]
                if len(self._in) < end:
                    break
                messages.append(pickle.loads(self._in[HEADER.size : end]))
                del self._in[:end]
        return messages


class Session:
    """One attempt of one worker.

    Args:
        plan: What it was told at its start.
        channel: To whoever runs it.
        datasets: What `get_dataset_shard` serves, by name.
    """

    def __init__(self, plan: RankPlan, channel: Channel, datasets: Mapping[str, Any]) -> None:
        self.plan = plan
        self.channel = channel
        self.datasets = datasets
        self.device = "cpu"
        self.committed: list[Committed] = []
        self._next = plan.next_report
        self._last_checkpoint = -1  # index of the last report that had one
        self._stop = False
        self._upload: threading.Thread | None = None
        self._upload_error: BaseException | None = None
        self._watched = plan.hang_timeout_s > 0
        self._beat_at = 0.0
        self._updated = 0.0
        self._lock = threading.Lock()  # a function may report from several threads

    @property
    def storage(self) -> "Storage":
        """The run folder."""
        from leyden.train.storage import Storage

        return Storage(self.plan.run_url, dict(self.plan.storage_options))

    def update(self) -> None:
        """Takes note of what has arrived."""
        for message in self.channel.receive():
            if isinstance(message, Committed):
                self.committed.append(message)
            elif isinstance(message, Boundary):
                self._stop = True

    def stop_requested(self) -> bool:
        """Whether the worker should end at its next boundary. Called once per step; counts as progress."""
        now = time.monotonic()
        if now - self._updated > _UPDATE_EVERY:
            self._updated = now
            self.update()
            if self._watched and now - self._beat_at > _BEAT_EVERY:
                self._beat_at = now
                self.channel.send(Beat())
        return self._stop

    def checkpoint_folder(self) -> str | None:
        """The last committed checkpoint, relative to the run folder; None: none yet."""
        self.update()
        return self.committed[-1].folder if self.committed else self.plan.checkpoint

    def wait_for_commit(self, timeout: float | None) -> None:
        """Waits until the last checkpoint that this worker reported is committed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.update()
        while all(each.index < self._last_checkpoint for each in self.committed) and self._last_checkpoint >= 0:
            if deadline is not None and time.monotonic() >= deadline:
                return
            time.sleep(0.01)
            self.update()

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: "Checkpoint | None",
        folder: str | None,
        mode: str,
        delete: bool,
        upload_fn: Any,
    ) -> None:
        """`leyden.train.report`, with all defaults filled in; ``mode``: ``"sync"``, ``"async"`` or ``"none"``."""
        values = plain_metrics(metrics)
        self._raise_upload_error()
        if checkpoint is None:
            self._send_metrics(values, False)
            return
        if folder is not None:
            check_folder_name(folder)
        self.finish_upload()  # one at a time: a rank may not pile up copies of its state
        self._last_checkpoint = index = self._send_metrics(values, True)
        arguments = (checkpoint, checkpoint_folder(index, folder), index, mode, delete, upload_fn)
        if mode == "async":
            self._upload = threading.Thread(target=self._store_apart, args=arguments, name="leyden-upload")
            self._upload.start()
        else:
            self._store(*arguments)

    def _send_metrics(self, values: Mapping[str, Any], has_checkpoint: bool) -> int:
        plan = self.plan
        with self._lock:
            index = self._next
            self._next = index + 1
            self.channel.send(Metrics(plan.attempt, plan.rank, index, values, has_checkpoint, time.time()))
        return index

    def finish_upload(self) -> None:
        """Waits for the upload in the background, and raises its error."""
        if self._upload is not None:
            self._upload.join()
            self._upload = None
        self._raise_upload_error()

    def _raise_upload_error(self) -> None:
        error, self._upload_error = self._upload_error, None
        if error is not None:
            raise error

    def _store_apart(self, *arguments: Any) -> None:
        try:
            self._store(*arguments)
        except BaseException as error:  # raised by the next report, or at the end
            self._upload_error = error

    def _store(
        self, checkpoint: "Checkpoint", folder: str, index: int, mode: str, delete: bool, upload_fn: Any
    ) -> None:
        self._say_busy(True)
        storage = self.storage
        if mode == "none":
            folder = _inside(storage.url, str(checkpoint.path), "checkpoint_upload_mode=NO_UPLOAD needs a checkpoint")
            files = _stored(storage, folder)
        elif upload_fn is not None:
            stored = upload_fn(checkpoint, folder)
            folder = _inside(storage.url, str(stored.path), "checkpoint_upload_fn must return a checkpoint")
            files = _stored(storage, folder)
        else:
            with checkpoint.as_directory() as local:
                files = storage.put_checkpoint(local, folder)
        plan = self.plan
        self.channel.send(CheckpointPart(plan.attempt, plan.rank, index, folder, files, time.time()))
        self._say_busy(False)
        if delete and mode != "none" and os.path.isdir(checkpoint.path):
            shutil.rmtree(checkpoint.path, ignore_errors=True)  # the copy is what counts

    def _say_busy(self, busy: bool) -> None:
        if self._watched:
            self.channel.send(Busy(busy))


def _stored(storage: "Storage", folder: str) -> dict[str, int]:
    """The files of a checkpoint that lies in storage already, without what marks it as begun or committed."""
    return {n: size for n, size in storage.files(folder).items() if n not in (UPLOAD_MARKER, COMMIT_RECORD)}


def _inside(root: str, path: str, what: str) -> str:
    """``path`` relative to the run folder ``root``."""
    full = path if "://" in path else os.path.abspath(path)
    if not full.startswith(root.rstrip("/") + "/"):
        raise ValueError(f"{what} that lies in the run folder {root}, but it is in {path}")
    return full[len(root.rstrip("/")) + 1 :]


_current: Session | None = None


def current() -> Session | None:
    """The session of this process; None outside of a worker."""
    return _current


def set_current(session: Session | None) -> None:
    """Called before the user's function runs, and with None after it."""
    global _current
    _current = session
