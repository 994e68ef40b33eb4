"""Copying local files so that a crash leaves the old file or the new one."""

import errno
import os
import shutil
from typing import Any

from leyden.base.files import atomic_write

__all__ = ["copy_file", "remove_folder", "walk"]

_BLOCK = 1 << 22
_RANGE = 1 << 30
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def walk(folder: str, strict: bool = True) -> dict[str, str]:
    """Path below ``folder``, with ``/`` -> full path, of all files in it, sorted; links are followed.

    What writers that were killed left behind (``*.unfinished``) is no file of anybody's.

    Args:
        folder: Nothing is found when it isn't there.
        strict: Whether something that can't be followed is an error, or is left out: a link back to a folder that
            holds it, a link to nothing, a folder that goes away meanwhile.

    Raises:
        OSError: See ``strict``.
    """
    found: dict[str, str] = {}
    todo: list[tuple[str, str, frozenset[str]]] = [(folder, "", frozenset())] if os.path.isdir(folder) else []
    while todo:
        path, prefix, parents = todo.pop()
        try:
            real = os.path.realpath(path)
            if real in parents:
                raise OSError(errno.ELOOP, f"{path} is a link to a folder that holds it")
            with os.scandir(path) as entries:
                for each in entries:
                    if each.is_dir():
                        todo.append((each.path, f"{prefix}{each.name}/", parents | {real}))
                    elif not each.name.endswith(".unfinished"):
                        found[prefix + each.name] = each.path
        except OSError as error:
            if strict or error.errno not in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR):
                raise
    return dict(sorted(found.items()))


def copy_file(source: str, destination: str) -> int:
    """Copies a local file; ``destination`` afterwards is whole and on disk, or untouched. Returns its size in bytes."""
    with open(source, "rb") as reader:
        atomic_write(destination, lambda writer: _copy(reader, writer))
        return os.fstat(reader.fileno()).st_size


def _copy(reader: Any, writer: Any) -> None:
    done = 0
    try:
        # In the kernel, and without copying at all where the file system can share blocks.
        while count := os.copy_file_range(reader.fileno(), writer.fileno(), _RANGE):
            done += count
    except (AttributeError, OSError) as error:
        if done or getattr(error, "errno", None) in _FULL:
            raise
        shutil.copyfileobj(reader, writer, _BLOCK)  # not possible between these two file systems, or on this one


def remove_folder(path: str) -> None:
    """Removes a folder with all in it, or a link to one; another process may do the same at the same time."""
    if os.path.islink(path):
        os.unlink(path)
    while os.path.isdir(path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # a part of it went away under our hands; the rest is still to do
