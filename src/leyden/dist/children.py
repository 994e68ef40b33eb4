"""The processes that a launcher started: their errors are kept, their ends are noticed, and none is left behind."""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, NoReturn

from leyden.dist.comm import note_lost_peer

__all__ = ["Children", "WorkerFailedError", "die_with_parent", "looks_like_a_lost_peer"]

_PARENT = "LEYDEN_PARENT_PID"
_TAIL_BYTES = 16384
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch puts it before each line of a traceback
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (was )?(reset|closed|refused)|broken pipe|tcpstore|socket|peer", re.IGNORECASE
)


class WorkerFailedError(RuntimeError):
    """A process of this run failed, and took the others with it.

    Attributes:
        local_rank: Of the process that failed first.
        exit_code: Its exit code; 128 + n when signal n killed it.
    """

    def __init__(self, message: str, local_rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.local_rank = local_rank
        self.exit_code = exit_code


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """True when an error may be the echo of another process's end: a collective that lost its connection."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _LOST_PEER.search(str(error)) is not None


def die_with_parent() -> None:
    """In a process that Leyden started, asks the kernel to end it when its parent ends, however that happens.

    A rank whose rank 0 was killed would else wait for it until the collective's timeout. In other processes it does
    nothing.
    """
    parent = os.environ.get(_PARENT, "")
    if not parent.isdigit():
        return
    if os.getppid() == int(parent) and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if not _is_alive(int(parent)):
        raise RuntimeError(f"process {parent}, local rank 0 of this run, has ended before this process joined it")


@dataclass(eq=False)
class _Child:
    local_rank: int
    process: subprocess.Popen
    tail: bytearray = field(default_factory=bytearray)
    reader: threading.Thread | None = None

    @property
    def exit_code(self) -> int | None:
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code


class Children:
    """Started processes of one launcher.

    Their stderr passes through this process, so that the end of it can be shown when one fails. When one fails while
    this process is inside `watched`, the connection usually breaks and the caller turns that into `raise_failure`; when
    nothing breaks (a hanging NCCL collective), this process is ended with the child's exit code.

    Args:
        grace: Seconds between a child's failure and the end of this process, should it not notice by itself.
        exit_grace: Seconds that children may need longer than this process at the end of a good run.
    """

    def __init__(self, grace: float = 10.0, exit_grace: float = 30.0) -> None:
        self._grace = grace
        self._exit_grace = exit_grace
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        self._first_failure: _Child | None = None
        self._failed = threading.Event()
        self._outside = threading.Event()
        self._outside.set()
        self._stopping = False
        self._told = False
        atexit.register(self._finish)

    @property
    def procs(self) -> list[subprocess.Popen]:
        """The processes, by local rank."""
        return [child.process for child in self._children]

    def start(self, local_rank: int, command: list[str], variables: dict[str, str], folder: str | None) -> None:
        """Starts one process and its two watchers.

        Args:
            local_rank: Of the new process.
            command: What to run.
            variables: Its whole environment.
            folder: Where it runs; None: here.
        """
        if threading.current_thread() is threading.main_thread():
            # The kernel ties the death signal to the thread that started the child, so only the main one will do.
            variables = {**variables, _PARENT: str(os.getpid())}
        process = subprocess.Popen(command, env=variables, cwd=folder, stderr=subprocess.PIPE)
        child = _Child(local_rank, process)
        name = f"leyden-child-{local_rank}"
        child.reader = threading.Thread(target=_copy_stderr, args=(child,), name=f"{name}-stderr", daemon=True)
        child.reader.start()
        self._children.append(child)
        threading.Thread(target=self._watch, args=(child,), name=name, daemon=True).start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context of the work that all processes share.

        Raises:
            WorkerFailedError: A child has failed already.
        """
        if self._failed.is_set():
            self.raise_failure(None)
        self._outside.clear()
        try:
            yield
        finally:
            self._outside.set()

    def raise_failure(self, error: BaseException | None, wait: float = 3.0) -> None:
        """Raises what a child's end explains; returns when all children live, ``wait`` seconds after the call.

        Args:
            error: What happened here; becomes the cause.
            wait: Seconds: a connection breaks before the kernel reports the process's end.

        Raises:
            WorkerFailedError: A child has ended.
        """
        deadline = time.monotonic() + wait
        while not self._failed.wait(0.05):
            ended = next((child for child in self._children if child.exit_code is not None), None)
            if ended is not None and ended.exit_code == 0:
                note_lost_peer()
                raise WorkerFailedError(_description(ended), ended.local_rank, 0) from error
            if time.monotonic() > deadline:
                return
        self._told = True
        note_lost_peer()
        raise self._failure() from error

    def signal(self, signum: int) -> None:
        """Sends a signal to the children that still run."""
        self._stopping = True
        for child in self._children:
            child.process.send_signal(signum)  # does nothing when the process has been waited for

    def _failure(self) -> WorkerFailedError:
        child = self._first_failure
        assert child is not None  # whoever sets _failed sets it before
        return WorkerFailedError(_description(child), child.local_rank, child.exit_code or 1)

    def _watch(self, child: _Child) -> None:
        child.process.wait()
        if child.reader is not None:
            child.reader.join(timeout=1.0)  # a loader worker may hold the pipe open for longer
        if child.exit_code == 0 or self._stopping:
            return
        with self._lock:
            if self._first_failure is not None:
                return
            self._first_failure = child
        self._failed.set()
        if not self._outside.wait(self._grace):
            self._end_this_process()

    def _end_this_process(self) -> NoReturn:
        """The main thread hangs in a call that no exception reaches: say why and leave."""
        failure = self._failure()
        _say(f"\nleyden: {failure}\n")
        self._stop(term_after=0.0, kill_after=1.0)
        os._exit(failure.exit_code)

    def _finish(self) -> None:
        """At interpreter exit: lets the children end, ends those that don't, and passes a failure on."""
        uncaught = getattr(sys, "last_value", None)
        if uncaught is None:
            self._stop(term_after=self._exit_grace, kill_after=2.0)
        else:
            self._stop(term_after=1.0, kill_after=1.0)
        if isinstance(uncaught, WorkerFailedError) and uncaught.exit_code not in (0, 1):
            _leave(uncaught.exit_code)  # Python itself would exit with 1
        if uncaught is None and self._failed.is_set() and not self._told:
            failure = self._failure()
            _say(f"\nleyden: {failure}\n")
            _leave(failure.exit_code)

    def _stop(self, term_after: float, kill_after: float) -> None:
        if self._wait(term_after):
            return
        self.signal(signal.SIGTERM)
        if not self._wait(kill_after):
            self.signal(signal.SIGKILL)
            self._wait(5.0)

    def _wait(self, seconds: float) -> bool:
        """True when all children have ended within ``seconds``."""
        deadline = time.monotonic() + seconds
        for child in self._children:
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


def _copy_stderr(child: _Child) -> None:
    """Passes a child's stderr on as it comes, and keeps the end of it."""
    stream: IO[bytes] | None = child.process.stderr
    assert stream is not None
    while chunk := os.read(stream.fileno(), 65536):
        child.tail += chunk
        del child.tail[:-_TAIL_BYTES]
        with contextlib.suppress(OSError):  # our own stderr may be closed; the tail is kept all the same
            os.write(2, chunk)


def _description(child: _Child) -> str:
    code = child.process.returncode
    if code == 0:
        return (
            f"local rank {child.local_rank} (process {child.process.pid}) ended normally while local rank 0 was still "
            "running: all ranks must make the same Trainer calls"
        )
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        end = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        end = f"failed with exit code {code}"
    text = _RANK_PREFIX.sub("", child.tail.decode(errors="replace")).strip()
    start = text.rfind("Traceback (most recent call last):")
    shown = text[start:] if start >= 0 else "\n".join(text.splitlines()[-20:])
    detail = f"; its error:\n{shown}" if shown else "; it wrote no error"
    return f"local rank {child.local_rank} (process {child.process.pid}) {end}{detail}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and is someone else's
        return True
    return True


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None under pythonw
            stream.flush()
    os._exit(code)
