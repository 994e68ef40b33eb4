"""Remote checkpoints on local disk: one download for all processes of a machine."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import IO

from leyden.train.storage import Storage

try:
    import fcntl
except ImportError:  # Windows: no locks, so nothing is shared
    fcntl = None

__all__ = ["shared", "to_folder", "to_shared"]

_PREFIX = "leyden-checkpoint-"


def _fingerprint(storage: Storage) -> str:
    """Differs between two checkpoints, and between two states of one: a listing costs little, a stale file much."""
    stamps = storage.stamps()
    if not stamps and not storage.exists():
        raise FileNotFoundError(f"{storage.url} is not there: the checkpoint was deleted, or never written")
    text = json.dumps([storage.url, sorted(stamps.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _folder(key: str) -> str:
    # With the user's id: another user's files may not be ours to read, or to trust.
    user = getattr(os, "getuid", lambda: "")()
    return os.path.join(tempfile.gettempdir(), f"{_PREFIX}{user}-{key}")


@contextlib.contextmanager
def _locked(path: str, shared: bool = False) -> Iterator[IO[bytes]]:
    """Holds a lock on a file, until the block ends or the process dies in any way."""
    with open(path, "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield file


def _download(storage: Storage, folder: str) -> None:
    """Fills ``folder``, which appears only when all is there."""
    if os.path.isdir(folder):
        return
    partial = tempfile.mkdtemp(prefix=f"{os.path.basename(folder)}.", dir=os.path.dirname(folder))
    try:
        storage.get_dir("", partial)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def to_shared(storage: Storage) -> str:
    """A local copy that stays until somebody deletes it; made by the first of the processes that ask for it."""
    folder = _folder(f"kept-{_fingerprint(storage)}")
    with _locked(f"{folder}.lock"):
        _download(storage, folder)
    return folder


def to_folder(storage: Storage, folder: str) -> str:
    """Copies the files into ``folder``, unless another process did the very same while we waited for it."""
    key = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:24]
    wanted = _fingerprint(storage)
    lock = f"{_folder(f'to-{key}')}.lock"
    with open(lock, "a+b") as file:
        waited = False
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (waited and file.read().decode() == wanted and os.path.isdir(folder)):
            file.truncate(0)
            storage.get_dir("", folder)
            file.write(wanted.encode())
    return folder


@contextlib.contextmanager
def shared(storage: Storage) -> Iterator[str]:
    """A local copy that all processes of this machine share; the last one that leaves deletes it."""
    folder = _folder(f"{'' if fcntl else os.getpid()}{_fingerprint(storage)}")
    door, readers = f"{folder}.lock", f"{folder}.readers"
    # The lock on the readers' file says that the folder is in use. It is taken, and given up, behind the door.
    with contextlib.ExitStack() as stack:
        with _locked(door):
            reading = stack.enter_context(_locked(readers, shared=True))
            _download(storage, folder)
        try:
            yield folder
        finally:
            with _locked(door):
                if _alone(reading):
                    shutil.rmtree(folder, ignore_errors=True)


def _alone(file: IO[bytes]) -> bool:
    """Whether no other process holds the lock of a shared file that we hold."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
