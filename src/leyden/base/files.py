"""Files by path or URL (fsspec), and a write that is whole or absent.

Local paths never touch fsspec, which is imported only for URLs such as ``s3://bucket/run``.
"""

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from leyden.base.log import log

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "PathLike",
    "atomic_write",
    "exists",
    "get_filesystem",
    "is_dir",
    "is_local",
    "join",
    "latest",
    "list_dir",
    "local_path",
    "makedirs",
    "modified",
    "parent",
    "replace_link",
    "rm",
    "sweep_unfinished",
]

PathLike = str | os.PathLike[str]

_LOCAL_PREFIXES = ("file://", "local://")
_UNFINISHED_SUFFIX = ".unfinished"
_BUFFER_BYTES = 1 << 20
# A file younger than this may belong to a writer that has created it and not locked it yet.
_UNFINISHED_MIN_AGE_S = 60.0
# Object stores show an object only when its upload is complete, and can't rename without copying.
_ATOMIC_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2", "hf"})


def get_filesystem(path: PathLike, **options: Any) -> "AbstractFileSystem":
    """The fsspec file system that owns ``path``; ``options`` go to its constructor (credentials, endpoints)."""
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **options)[0]


def is_local(path: PathLike) -> bool:
    """Whether ``path`` is a plain path or a ``file://`` URL."""
    text = os.fspath(path)
    return text.startswith(_LOCAL_PREFIXES) or ("://" not in text and "::" not in text)


def local_path(path: PathLike) -> str:
    """A local ``path`` without its ``file://`` prefix."""
    text = os.fspath(path)
    for prefix in _LOCAL_PREFIXES:
        if text.startswith(prefix):
            return text[len(prefix) :]
    return text


def join(base: PathLike, *parts: str) -> str:
    """Joins like ``os.path.join`` locally; with ``/`` and a kept scheme for URLs."""
    if is_local(base):
        return os.path.join(os.fspath(base), *parts)
    return "/".join([os.fspath(base).rstrip("/"), *(part.strip("/") for part in parts)])


def parent(path: PathLike) -> str:
    """The folder that holds ``path``; ``""`` for a bare file name."""
    text = os.fspath(path)
    return os.path.dirname(text) if is_local(text) else text.rpartition("/")[0]


def exists(path: PathLike) -> bool:
    """Whether a file or folder is there; a symbolic link counts when its target is there."""
    return os.path.exists(local_path(path)) if is_local(path) else get_filesystem(path).exists(os.fspath(path))


def is_dir(path: PathLike) -> bool:
    """Whether ``path`` is a folder; in an object store: whether anything lies under it."""
    return os.path.isdir(local_path(path)) if is_local(path) else get_filesystem(path).isdir(os.fspath(path))


def makedirs(path: PathLike) -> None:
    """Makes a folder and its parents; does nothing for ``""`` and for one that is there."""
    if not os.fspath(path):
        return
    if is_local(path):
        os.makedirs(local_path(path), exist_ok=True)
    else:
        get_filesystem(path).makedirs(os.fspath(path), exist_ok=True)


def list_dir(path: PathLike) -> list[str]:
    """Full paths (URLs keep their scheme) of what lies directly in a folder, sorted; empty when it isn't there."""
    if is_local(path):
        folder = local_path(path)
        if not os.path.isdir(folder):
            return []
        return sorted(os.path.join(folder, name) for name in os.listdir(folder))
    fs = get_filesystem(path)
    if not fs.exists(os.fspath(path)):
        return []
    return sorted(fs.unstrip_protocol(name) for name in fs.ls(os.fspath(path), detail=False))


def rm(path: PathLike) -> None:
    """Removes a file, a symbolic link (not its target) or a folder with all in it; nothing when it isn't there."""
    if not is_local(path):
        fs = get_filesystem(path)
        if fs.exists(os.fspath(path)):
            fs.rm(os.fspath(path), recursive=True)
        return
    target = local_path(path)
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    else:
        Path(target).unlink(missing_ok=True)


def replace_link(target: str, link: str) -> None:
    """Puts a relative symbolic link to ``target`` at ``link``, both local; a copy where the system has no links.

    A file or link that is there is replaced in one step; a folder is removed first.
    """
    target, link = local_path(target), local_path(link)
    if os.path.abspath(target) == os.path.abspath(link):
        return
    fresh = f"{link}.{uuid.uuid4().hex[:12]}{_UNFINISHED_SUFFIX}"
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(link)), fresh)
    except OSError:  # Windows lets only some users make links
        shutil.copy(target, fresh)
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    os.replace(fresh, link)


def modified(path: PathLike) -> float:
    """Seconds since the epoch when ``path`` was last written.

    Raises:
        FileNotFoundError: If it isn't there.
    """
    if is_local(path):
        return os.path.getmtime(local_path(path))
    stamp: datetime = get_filesystem(path).modified(os.fspath(path))
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=timezone.utc)).timestamp()


def latest(*paths: PathLike) -> str | None:
    """Of the paths that exist, the one written last; of equal times the last in order. None when none exists."""
    best: tuple[float, str] | None = None
    for path in paths:
        # One that goes away while we look is one that doesn't exist.
        with contextlib.suppress(FileNotFoundError):
            stamp = modified(path)
            if best is None or stamp >= best[0]:
                best = (stamp, os.fspath(path))
    return None if best is None else best[1]


def atomic_write(path: PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Calls ``write(file)`` so that ``path`` afterwards holds all that was written, or what it held before.

    A local file is written under another name in the same folder, forced to disk, and renamed; a reader, a crash or
    a power cut at any moment sees the old file or the new one. What a killed writer leaves behind is named
    ``.NAME.*.unfinished`` and is taken away by `sweep_unfinished`. A remote file is first written to local disk, then
    uploaded in a way that shows it only when it is complete.

    Args:
        path: Local path or URL; its folder must exist.
        write: Gets a binary file, open for writing. Whatever it raises is raised here, and ``path`` is untouched.

    Raises:
        OSError: When the file can't be written (no space, no permission, too large), even if ``write`` hid the
            error under another.
    """
    if is_local(path):
        _write_local(local_path(path), write)
    else:
        _write_remote(os.fspath(path), write)


class _ErrorKeeper:
    """A binary file that remembers the first `OSError`: writers in C++ replace it by one that says nothing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _fill(file: BinaryIO, write: Callable[[BinaryIO], object]) -> None:
    keeper = _ErrorKeeper(file)
    try:
        write(cast(BinaryIO, keeper))
        file.flush()
        os.fsync(file.fileno())
    except OSError:
        raise
    except Exception as error:
        if keeper.error is not None:
            raise keeper.error from error
        raise


def _write_local(path: str, write: Callable[[BinaryIO], object]) -> None:
    folder, name = os.path.split(path)
    # The name is cut so that even a longest allowed name leaves room for the rest.
    temporary = os.path.join(folder, f".{name[:50]}.{uuid.uuid4().hex[:12]}{_UNFINISHED_SUFFIX}")
    # Not `tempfile`: its files are readable by their owner only, and a checkpoint is shared like any other file.
    try:
        with open(temporary, "xb", buffering=_BUFFER_BYTES) as file:
            _lock(file.fileno())
            _fill(file, write)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(folder or os.curdir)


def _sync_folder(folder: str) -> None:
    """Forces the rename itself to disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse to sync a folder; they order a rename after the data by themselves.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_remote(url: str, write: Callable[[BinaryIO], object]) -> None:
    fs = get_filesystem(url)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    with tempfile.TemporaryDirectory(prefix="leyden-upload-") as folder:
        staged = os.path.join(folder, "data")
        with open(staged, "wb", buffering=_BUFFER_BYTES) as file:
            _fill(file, write)
        if protocols & _ATOMIC_PROTOCOLS:
            fs.put_file(staged, url)
            return
        temporary = f"{url}.{uuid.uuid4().hex[:12]}{_UNFINISHED_SUFFIX}"
        try:
            fs.put_file(staged, temporary)
            fs.mv(temporary, url)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one that counts
                fs.rm(temporary)
            raise


def _lock(descriptor: int) -> bool:
    """Marks an open file as being written, until it is closed or its process ends in any way."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False  # no locks on this system: its unfinished files are never swept
    return True


def _unfinished(folder: str, now: float) -> Iterator[Path]:
    for path in Path(folder or os.curdir).glob(f".*{_UNFINISHED_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime >= _UNFINISHED_MIN_AGE_S:
                yield path


def sweep_unfinished(folder: PathLike) -> list[str]:
    """Removes what killed writers left in a local folder, and returns their paths.

    A file is left alone while any process still writes it (it holds a lock), and for its first minute.
    """
    if not is_local(folder):
        return []
    removed = []
    for path in list(_unfinished(local_path(folder), time.time())):
        try:
            with open(path, "rb") as file:
                dead = _lock(file.fileno())
            if dead:
                path.unlink(missing_ok=True)
                removed.append(str(path))
        except OSError as error:
            log.debug("left %s where it is: %s", path, error)
    return removed
