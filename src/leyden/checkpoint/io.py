"""Reading and writing one checkpoint file. Reading runs no code that the file names, unless it is asked to."""

import errno
import io
import os
import pickle
import shutil
import tempfile
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

import torch

from leyden.base import files
from leyden.base.errors import CheckpointError, UnsafeCheckpointError

__all__ = ["CheckpointIO", "MapLocation", "TorchCheckpointIO", "load", "save"]

PathLike = files.PathLike
MapLocation = Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None

_HTTP_TIMEOUT_S = 60
_harmless_lock = threading.Lock()
# For the text of a refusal only: everything that isn't known to be harmless is refused.
_COMMAND_MODULES = frozenset({"ctypes", "importlib", "nt", "os", "posix", "pty", "runpy", "socket", "subprocess"})
_COMMANDS = frozenset(
    f"{module}{name}" for module in ("", "builtins.", "__builtin__.") for name in ("eval", "exec", "compile", "open")
)


def _to_cpu(storage: Any, location: str) -> Any:
    return storage


def _where_saved(storage: Any, location: str) -> Any:
    """The device that a tensor was saved from, where this machine has it; else the CPU."""
    kind, _, index = location.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        return storage
    if kind == "mps" and not torch.backends.mps.is_available():
        return storage
    return None  # torch then restores it to where it was


class CheckpointIO(ABC):
    """How a strategy turns a checkpoint dictionary into a file and back; pass your own as ``Trainer(plugins=...)``."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Writes ``checkpoint`` to ``path``.

        Args:
            checkpoint: The dictionary to write.
            path: Where to; its folder may not exist yet.
            storage_options: What the user gave to ``trainer.save_checkpoint(storage_options=...)``.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the dictionary back.

        Args:
            path: What `save_checkpoint` wrote.
            map_location: Where tensors go, as for ``torch.load``.
            weights_only: False allows the file to run code; None lets the implementation choose.
        """

    @abstractmethod
    def remove_checkpoint(self, path: PathLike) -> None:
        """Removes what `save_checkpoint` wrote at ``path``; does nothing when it isn't there."""

    def teardown(self) -> None:  # noqa: B027 - optional to override
        """Ends what the object has running; called when the trainer is done with it."""


class TorchCheckpointIO(CheckpointIO):
    """One file per checkpoint, in ``torch.save`` format, at a local path or an fsspec URL, whole or absent."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """See `CheckpointIO.save_checkpoint`.

        Raises:
            TypeError: If ``storage_options`` is given: this class has no use for it.
            OSError: If the file can't be written; what was at ``path`` before is intact.
            CheckpointError: If the dictionary holds an object that can't be pickled.
        """
        if storage_options is not None:
            raise TypeError(
                f"`Trainer.save_checkpoint(..., storage_options=...)` is not supported by {type(self).__name__}, "
                f"got {storage_options!r}: pass a CheckpointIO that uses it as `Trainer(plugins=...)`"
            )
        save(checkpoint, path)

    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = _to_cpu, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """See `load`; tensors go to the CPU by default."""
        return load(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """See `CheckpointIO.remove_checkpoint`; a folder (a sharded checkpoint) goes with all in it."""
        files.rm(path)


def save(checkpoint: Any, path: PathLike) -> None:
    """Writes ``checkpoint`` with ``torch.save``, atomically (see `leyden.base.files.atomic_write`).

    The folder is made when it is missing. A folder at ``path`` itself (a sharded checkpoint) is not replaced.

    Raises:
        OSError: Of the class and number that the system gave (``PermissionError``, "no space left", ...), with the
            sizes that matter in its text.
        CheckpointError: If something in ``checkpoint`` can't be pickled.
    """
    try:
        files.makedirs(files.parent(path))
        files.atomic_write(path, lambda file: torch.save(checkpoint, file))
    except OSError as error:
        raise _write_error(error, path) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"can't write checkpoint {os.fspath(path)!r}: it holds an object that can't be pickled ({error}); "
            "keep it out of hparams (`self.save_hyperparameters(ignore=[...])`), of state_dict() and of "
            "on_save_checkpoint()"
        ) from error


def _write_error(error: OSError, path: PathLike) -> OSError:
    """The same error, told so that the reader knows what to do. Its number picks the same subclass again."""
    if error.errno is None:
        return error
    advice = "what was there before is intact"
    folder = files.local_path(files.parent(path)) or os.curdir if files.is_local(path) else ""
    if os.path.isdir(folder):
        free = shutil.disk_usage(folder).free
        advice = f"{free / 2**20:.1f} MiB are free in its folder; {advice}"
    return OSError(error.errno, f"can't write checkpoint: {os.strerror(error.errno)}; {advice}", os.fspath(path))


def load(path_or_url: PathLike | IO[bytes], map_location: MapLocation = None, weights_only: bool | None = None) -> Any:
    """Reads a checkpoint, from Leyden or Lightning, without running any code that it names.

    Args:
        path_or_url: A local path, an ``http(s)`` or fsspec URL, or an open binary file.
        map_location: Where tensors go, as for ``torch.load``. None: to the device they were saved from, or to the CPU
            where this machine doesn't have it.
        weights_only: None and True accept tensors and plain Python objects only. False unpickles anything, and so
            runs whatever code the file's author put in.

    Raises:
        FileNotFoundError: If there is no such file.
        UnsafeCheckpointError: If the file needs a class that is not known to be harmless; the text names it.
        CheckpointError: If the file is empty, cut short, damaged, a folder, or not a checkpoint at all.
    """
    if map_location is None:
        map_location = _where_saved
    with _opened(path_or_url) as (file, name):
        try:
            return torch.load(file, map_location=map_location, weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            unsafe = _unsafe_globals(file, error) if weights_only is not False else None
            if unsafe is None:
                raise _damaged(name, file, error) from error
            harmless = _harmless_classes()
            if not unsafe or not set(unsafe) <= harmless.keys():
                raise _refusal(name, sorted(set(unsafe) - harmless.keys()), error) from error
            return _load_with(file, map_location, [harmless[each] for each in unsafe])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise _damaged(name, file, error) from error  # a table of contents that points before the file's start
        except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError) as error:
            raise _damaged(name, file, error) from error


@contextmanager
def _opened(source: PathLike | IO[bytes]) -> Iterator[tuple[BinaryIO, str]]:
    """A seekable binary file, and what to call it in an error."""
    if not isinstance(source, (str, os.PathLike)):
        yield cast(BinaryIO, source), repr(getattr(source, "name", source))
        return
    text = os.fspath(source)
    if text.startswith(("http://", "https://")):
        with tempfile.TemporaryFile(prefix="leyden-download-") as file:
            with urllib.request.urlopen(text, timeout=_HTTP_TIMEOUT_S) as response:
                shutil.copyfileobj(response, file, 1 << 20)
            file.seek(0)
            yield cast(BinaryIO, file), repr(text)
        return
    if not files.exists(source):
        raise FileNotFoundError(_missing(text))
    if files.is_dir(source):
        raise CheckpointError(
            f"checkpoint {text!r} is a folder with {len(files.list_dir(source))} entries, not a file: "
            "a sharded checkpoint can only be read by the strategy that wrote it"
        )
    if files.is_local(source):
        with open(files.local_path(source), "rb") as file:
            yield file, repr(text)
    else:
        with files.get_filesystem(source).open(text, "rb") as file:
            yield cast(BinaryIO, file), repr(text)


def _missing(path: str) -> str:
    folder = files.parent(path)
    beside = [os.path.basename(each) for each in files.list_dir(folder or os.curdir) if each.endswith(".ckpt")]
    if beside:
        more = f" and {len(beside) - 5} more" if len(beside) > 5 else ""
        return f"checkpoint {path!r} does not exist; its folder has {', '.join(beside[:5])}{more}"
    if folder and not files.exists(folder):
        return f"checkpoint {path!r} does not exist, and neither does its folder"
    return f"checkpoint {path!r} does not exist, and its folder has no .ckpt files"


def _size(file: BinaryIO) -> int:
    return file.seek(0, io.SEEK_END)


def _damaged(name: str, file: BinaryIO, error: BaseException) -> CheckpointError:
    size = _size(file)
    if size == 0:
        what = "is empty (0 bytes)"
    else:
        file.seek(0)
        zipped = file.read(2) == b"PK"
        what = f"is damaged or cut short ({size} bytes)" if zipped else f"is not a checkpoint ({size} bytes)"
    first_line = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0]
    return CheckpointError(f"checkpoint {name} {what}: use another one, or copy it again [{first_line}]")


def _harmless_classes() -> dict[str, Any]:
    """Plain value classes that torch does not list but hyper-parameters often hold; making one runs no other code."""
    import datetime
    import pathlib

    classes = [
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
        frozenset,
        range,
        slice,
        datetime.timedelta,
        datetime.timezone,
        datetime.date,
        datetime.time,
        datetime.datetime,
    ]
    named = {f"{each.__module__}.{each.__qualname__}": each for each in classes}
    # Python 3.13 pickles paths under the name of a private module; both spellings must be readable everywhere.
    for each in classes[:4]:
        for module in ("pathlib", "pathlib._local"):
            named.setdefault(f"{module}.{each.__name__}", (each, f"{module}.{each.__name__}"))
    return named


def _load_with(file: BinaryIO, map_location: MapLocation, allowed: list[Any]) -> Any:
    # torch's list of allowed classes is one for the process: hold it for as short as possible, one thread at a time.
    with _harmless_lock, torch.serialization.safe_globals(allowed):
        file.seek(0)
        return torch.load(file, map_location=map_location, weights_only=True)


def _unsafe_globals(file: BinaryIO, error: BaseException) -> list[str] | None:
    """The classes and functions that the file names and that are not allowed; None when it is no checkpoint."""
    file.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:
        # Not a zip file, or its pickle can't be parsed. If torch got as far as to refuse a name, it is an old-format
        # checkpoint, and torch's own text has the name.
        _, found, rest = str(error).partition("GLOBAL ")
        return [rest.split()[0]] if found and rest else None


def _refusal(name: str, unsafe: list[str], error: BaseException) -> UnsafeCheckpointError:
    if not unsafe:
        reason = str(error).strip().splitlines()[0]
        return UnsafeCheckpointError(
            f"checkpoint {name} holds more than tensors and plain Python objects ({reason}); nothing in it was run. "
            "If you trust whoever wrote it, pass weights_only=False"
        )
    listed = ", ".join(unsafe)
    classes = ", ".join(each.rpartition(".")[2] for each in unsafe)
    verb = "is" if len(unsafe) == 1 else "are"
    suspicious = [each for each in unsafe if each.partition(".")[0] in _COMMAND_MODULES or each in _COMMANDS]
    alarm = f"A training has no use for {', '.join(suspicious)}: this looks like an attack. " if suspicious else ""
    return UnsafeCheckpointError(
        f"checkpoint {name} needs {listed}, which loading would have to call; nothing in the file was run. {alarm}"
        f"If you trust whoever wrote it, pass weights_only=False; if you know that {listed} {verb} harmless, "
        f"call torch.serialization.add_safe_globals([{classes}]) first"
    )
