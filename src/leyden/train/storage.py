"""Where a run lives: one folder, local, on a network file system or behind an fsspec URL such as ``s3://bucket/run``.

Names inside of it are relative, with ``/`` between the parts. Every operation is tried again on errors that pass by
themselves (`RetryPolicy`); what one operation leaves behind when it is cut off is harmless, because a checkpoint counts
only when its commit record is there, which is written last (`leyden.train.ledger`).
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from leyden.base import files
from leyden.base.errors import CheckpointError
from leyden.base.events import LineLog, LocalLines, SegmentedLines, parse_lines
from leyden.base.files import PathLike
from leyden.base.log import log
from leyden.train.records import COMMIT_RECORD, UPLOAD_MARKER, check_folder_name
from leyden.train.retry import RetryPolicy
from leyden.train.transfer import copy_file, remove_folder, walk

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["Storage", "StorageError", "split_options"]

T = TypeVar("T")

_PARALLEL = 8


class StorageError(CheckpointError):
    """The place that a run should be kept in can't be used as asked."""


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], Any, RetryPolicy]:
    """Parts ``storage_options`` into fsspec's own options, a given file system or None, and the retry policy."""
    rest = dict(options or {})
    filesystem = rest.pop("filesystem", None)
    retry = rest.pop("retry", None)
    return rest, filesystem, RetryPolicy() if retry is None else retry


class Storage:
    """A folder that all processes of a run can reach. Can be pickled, and used from several threads and after a fork.

    Args:
        url: A local path, or a URL that fsspec knows.
        options: For the file system's constructor (credentials, ``endpoint_url``, ...). Two keys are Leyden's own:
            ``"retry"``, a `RetryPolicy`; and ``"filesystem"``, an fsspec (or pyarrow) file system to use for ``url``.
        parallel: How many files are copied at the same time.
    """

    def __init__(self, url: PathLike, options: Mapping[str, Any] | None = None, *, parallel: int = _PARALLEL) -> None:
        self.options = dict(options or {})
        self.fs_options, self._given, self.retry = split_options(options)
        self.parallel = parallel
        self.is_local = self._given is None and files.is_local(url)
        text = os.fspath(url)
        self.url = os.path.abspath(files.local_path(text)) if self.is_local else text.rstrip("/")
        self._fs: tuple[int, Any] | None = None  # process id, file system

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fs": None}

    def sub(self, rel: str) -> "Storage":
        """The storage whose folder is ``rel`` in this one."""
        return Storage(self.url_of(rel), self.options, parallel=self.parallel)

    def url_of(self, rel: str = "") -> str:
        """The full path or URL of ``rel``."""
        return files.join(self.url, *rel.split("/")) if rel else self.url

    @property
    def filesystem(self) -> "AbstractFileSystem":
        """The fsspec file system, also for a local folder."""
        if self._fs is None or self._fs[0] != os.getpid():  # a forked process needs connections of its own
            self._fs = (os.getpid(), self._make_filesystem())
        return self._fs[1]

    def _make_filesystem(self) -> Any:
        if self._given is None:
            try:
                return files.get_filesystem(self.url, **self.fs_options)
            except ImportError as error:
                scheme = self.url.partition("://")[0]
                raise StorageError(
                    f"{self.url} can't be reached: the package for {scheme}:// is not installed ({error}). "
                    "For s3:// run `pip install s3fs`, for gs:// `pip install gcsfs`"
                ) from error
        if type(self._given).__module__.partition(".")[0] == "pyarrow":
            from fsspec.implementations.arrow import ArrowFSWrapper

            return ArrowFSWrapper(self._given)
        return self._given

    def _do(self, what: str, rel: str, operation: Callable[[], T]) -> T:
        return self.retry.call(operation, f"{what} {self.url_of(rel)}")

    # ---- single objects ----------------------------------------------------------------------------------------------

    def write_atomic(self, rel: str, data: bytes) -> None:
        """Makes ``rel`` hold ``data``: a reader, and a crash, see the old content or the new one, never a part.

        Other than object stores and local disks, remote file systems may show a part; whoever reads such a file checks
        what it reads. Folders on the way are made.
        """

        def write() -> None:
            if self.is_local:
                os.makedirs(os.path.dirname(self.url_of(rel)), exist_ok=True)
                files.atomic_write(self.url_of(rel), lambda file: file.write(data))
                return
            self._make_parents(rel)
            self.filesystem.pipe_file(self.url_of(rel), data)

        self._do("writing", rel, write)

    def _make_parents(self, rel: str) -> None:
        """Makes the folder that will hold ``rel``; object stores have none, and may not let us ask for the bucket."""
        protocol = self.filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        if not names & {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}:
            self.filesystem.makedirs(files.parent(self.url_of(rel)), exist_ok=True)

    def read(self, rel: str) -> bytes:
        """The content of ``rel``.

        Raises:
            FileNotFoundError: If it isn't there.
        """

        def read() -> bytes:
            if self.is_local:
                with open(self.url_of(rel), "rb") as file:
                    return file.read()
            self._forget(rel)
            content = self.filesystem.cat_file(self.url_of(rel))
            return content if isinstance(content, bytes) else content.encode()

        return self._do("reading", rel, read)

    def _forget(self, rel: str) -> None:
        """Listings that the file system remembers may be older than what other processes wrote."""
        for path in (self.url_of(rel), files.parent(self.url_of(rel))):
            self.filesystem.invalidate_cache(path)

    def exists(self, rel: str = "") -> bool:
        """Whether a file or folder ``rel`` is there."""
        if self.is_local:
            return os.path.exists(self.url_of(rel))
        self._forget(rel)
        return self._do("looking for", rel, lambda: bool(self.filesystem.exists(self.url_of(rel))))

    def is_dir(self, rel: str = "") -> bool:
        """Whether ``rel`` is a folder; in an object store: whether anything lies under it."""
        if self.is_local:
            return os.path.isdir(self.url_of(rel))
        self._forget(rel)
        return self._do("looking for", rel, lambda: bool(self.filesystem.isdir(self.url_of(rel))))

    def listdir(self, rel: str = "", folders: bool = False) -> list[str]:
        """The names directly in a folder, sorted, or only those of its ``folders``; empty when it isn't there."""
        if self.is_local:
            try:
                with os.scandir(self.url_of(rel)) as entries:
                    return sorted(each.name for each in entries if not folders or each.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []

        def names() -> list[str]:
            self._forget(rel)
            try:
                found = self.filesystem.ls(self.url_of(rel), detail=True)
            except FileNotFoundError:
                return []
            own = str(self.filesystem._strip_protocol(self.url_of(rel))).rstrip("/")
            paths = (each["name"].rstrip("/") for each in found if each["type"] == "directory" or not folders)
            # Some stores list the folder itself, as an empty object.
            return sorted({path.rpartition("/")[2] for path in paths if path != own})

        return self._do("listing", rel, names)

    def delete(self, rel: str) -> None:
        """Removes one file; nothing happens when it isn't there."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                if self.is_local:
                    os.unlink(self.url_of(rel))
                else:
                    self.filesystem.rm_file(self.url_of(rel))

        self._do("deleting", rel, delete)

    # ---- folders -----------------------------------------------------------------------------------------------------

    def files(self, rel: str = "") -> dict[str, int]:
        """Path below ``rel`` -> size in bytes, of all files there; empty when there are none."""
        return {name: size for name, (size, _) in self.stamps(rel).items()}

    def stamps(self, rel: str = "") -> dict[str, tuple[int, str]]:
        """Path below ``rel`` -> (size in bytes, a text that differs when the file was written again)."""
        if self.is_local:
            stamps = {}
            for name, path in walk(self.url_of(rel), strict=False).items():
                with contextlib.suppress(FileNotFoundError):  # gone since, or a link to nothing
                    stat = os.stat(path)
                    stamps[name] = (stat.st_size, str(stat.st_mtime_ns))
            return stamps

        def found() -> dict[str, tuple[int, str]]:
            self._forget(rel)
            prefix = str(self.filesystem._strip_protocol(self.url_of(rel))).rstrip("/") + "/"
            entries: dict[str, dict[str, Any]] = self.filesystem.find(self.url_of(rel), detail=True)  # pyright: ignore
            result = {}
            for path, info in entries.items():
                if path.startswith(prefix) and info["type"] == "file":
                    stamp = next((info[key] for key in ("ETag", "etag", "mtime", "LastModified") if key in info), "")
                    result[path[len(prefix) :]] = (int(info["size"] or 0), str(stamp))
            return result

        return self._do("listing", rel, found)

    def put_dir(self, local: PathLike, rel: str) -> dict[str, int]:
        """Copies all files under a local folder into ``rel``, several at a time, and returns path -> size.

        Files that are there already stay, unless they have the same name: several ranks fill one folder. A folder that
        is ``rel`` itself is only listed. Links are followed.

        Raises:
            FileNotFoundError: If ``local`` isn't a folder, or a file in it goes away meanwhile.
            OSError: If a file can't be written, at the first such file.
        """
        source = os.path.abspath(os.fspath(local))
        if not os.path.isdir(source):
            raise FileNotFoundError(f"{source} is not a folder; a checkpoint is made of the files in a local folder")
        found = walk(source)
        if self.is_local and os.path.realpath(source) == os.path.realpath(self.url_of(rel)):
            return {name: os.path.getsize(path) for name, path in found.items()}
        sizes = self.each(found.items(), lambda item: (item[0], self.put_file(item[1], f"{rel}/{item[0]}")))
        return dict(sizes)

    def put_checkpoint(self, local: PathLike, folder: str) -> dict[str, int]:
        """`put_dir` for a rank's part of a checkpoint: what becomes of ``folder`` is up to its commit record.

        Until that is written the folder holds a marker, by which `Ledger.sweep` knows that it was begun.

        Raises:
            StorageError: If the folder holds a committed checkpoint: it would be whole no more while this is copied.
        """
        check_folder_name(folder)
        if self.exists(f"{folder}/{COMMIT_RECORD}"):
            raise StorageError(
                f"{self.url_of(folder)} holds a checkpoint that is committed already; "
                "pass report() another checkpoint_dir_name for each checkpoint, or none"
            )
        self.write_atomic(f"{folder}/{UPLOAD_MARKER}", b"")
        return self.put_dir(local, folder)

    def put_file(self, local: str, rel: str) -> int:
        """Copies one local file to ``rel`` and returns its size in bytes."""

        def put() -> int:
            size = os.path.getsize(local)
            if self.is_local:
                os.makedirs(os.path.dirname(self.url_of(rel)), exist_ok=True)
                return copy_file(local, self.url_of(rel))
            self._make_parents(rel)
            self.filesystem.put_file(local, self.url_of(rel))
            return size

        return self._do("writing", rel, put)

    def get_dir(self, rel: str, local: PathLike) -> dict[str, int]:
        """Copies all files under ``rel`` into a local folder, several at a time, and returns path -> size.

        Raises:
            FileNotFoundError: If there is no such folder.
            StorageError: If a file arrives with another size than the listing gave.
        """
        target = os.path.abspath(os.fspath(local))
        sizes = self.files(rel)
        if not sizes and not self.is_dir(rel):
            raise FileNotFoundError(f"{self.url_of(rel)} is not there: it was deleted, or never written")
        os.makedirs(target, exist_ok=True)

        def get(item: tuple[str, int]) -> None:
            name, size = item
            destination = os.path.join(target, *name.split("/"))
            os.makedirs(os.path.dirname(destination), exist_ok=True)
            source = f"{rel}/{name}" if rel else name
            got = self._do("reading", source, lambda: self._get_file(source, destination))
            if got != size:
                raise StorageError(f"{self.url_of(source)} has {size} bytes, but {got} arrived at {destination}")

        names = {name: size for name, size in sizes.items() if name not in (UPLOAD_MARKER, COMMIT_RECORD)}
        self.each(names.items(), get)
        return names

    def _get_file(self, rel: str, destination: str) -> int:
        if self.is_local:
            return copy_file(self.url_of(rel), destination)
        partial = f"{destination}.{uuid.uuid4().hex[:12]}.unfinished"
        try:
            self.filesystem.get_file(self.url_of(rel), partial)
            os.replace(partial, destination)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
        return os.path.getsize(destination)

    def each(self, items: Iterable[Any], do: Callable[[Any], T]) -> list[T]:
        """Runs ``do`` on all items, some at a time; at the first error no further one is begun, and it is raised."""
        todo = list(items)
        if len(todo) <= 1 or self.parallel <= 1:
            return [do(item) for item in todo]
        with ThreadPoolExecutor(min(self.parallel, len(todo)), "leyden-copy") as pool:
            futures = [pool.submit(do, item) for item in todo]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
            if failed:
                pool.shutdown(wait=True, cancel_futures=True)
                failed[0].result()
            return [future.result() for future in futures]

    def delete_tree(self, rel: str) -> None:
        """Removes a folder with all in it; nothing happens when it isn't there."""
        if not rel:
            raise ValueError("the folder of a run is never deleted as a whole")

        def delete() -> None:
            if self.is_local:
                remove_folder(self.url_of(rel))
                return
            self._forget(rel)
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.rm(self.url_of(rel), recursive=True)

        self._do("deleting", rel, delete)

    # ---- logs and checks ---------------------------------------------------------------------------------------------

    def open_lines(self, name: str) -> LineLog:
        """A log of JSON lines in this folder, continued where it is there already."""
        if self.is_local:
            os.makedirs(self.url, exist_ok=True)
            return LocalLines(self.url_of(name))
        return SegmentedLines(self.write_atomic, name, first=self._next_segment(name))

    def _next_segment(self, name: str) -> int:
        there = SegmentedLines.segments(name, self.listdir())
        return int(there[-1].split(".")[-2]) + 1 if there else 0

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a log that `open_lines` wrote; empty when there is none."""
        if self.is_local:
            with contextlib.suppress(FileNotFoundError):
                return parse_lines([self.read(name)])
            return []
        return parse_lines(self.each(SegmentedLines.segments(name, self.listdir()), self.read))

    def check(self) -> None:
        """Writes, reads and deletes a small file, before a run spends any time.

        Raises:
            StorageError: Naming the folder, what went wrong, and what to look at.
        """
        name, data = f".probe-{uuid.uuid4().hex[:12]}", uuid.uuid4().bytes
        try:
            self.write_atomic(name, data)
            if self.read(name) != data:
                raise OSError("what was written reads back differently")
        except StorageError:
            raise
        except Exception as error:  # whatever a file system raises, the user needs the same sentence
            advice = (
                "make the folder writable, or pass another RunConfig(storage_path=...)"
                if self.is_local
                else "check that the bucket or folder exists, and the credentials and endpoint in "
                "RunConfig(storage_options=...)"
            )
            raise StorageError(f"{self.url} can't be used: {type(error).__name__}: {error}; {advice}") from error
        finally:
            try:
                self.delete(name)
            except Exception as error:  # the probe is harmless, and the error that counts is already on its way
                log.debug("left %s where it is: %s", self.url_of(name), error)
