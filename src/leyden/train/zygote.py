"""The warm process: has imported all that is slow to import, and forks ranks from there in milliseconds.

It is a child of the agent and speaks with it over an inherited socket. One thread only, and CUDA is never touched, so
that a forked rank is as good as a new process.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from leyden.train.link import HEADER, pack
from leyden.train.messages import RankPlan

__all__ = ["ForkRanks", "KillRanks", "RankExit", "RankForked", "die_with_parent", "main", "send_fork"]

MAX_RANKS_PER_FORK = 100  # two descriptors each; the kernel passes 253 at once


@dataclass(frozen=True)
class ForkRanks:
    """Agent -> warm process. With it come the payload's descriptor, and for each rank its socket and its log."""

    plans: tuple[RankPlan, ...]


@dataclass(frozen=True)
class KillRanks:
    """Agent -> warm process: a signal to the process groups of all ranks."""

    signum: int


@dataclass(frozen=True)
class RankForked:
    """Warm process -> agent."""

    attempt: int
    rank: int
    pid: int


@dataclass(frozen=True)
class RankExit:
    """Warm process -> agent: the rank has ended, and what it left in its process group too."""

    attempt: int
    rank: int
    pid: int
    exit_code: int  # negative: killed by that signal


def die_with_parent(parent: int, signum: int) -> None:
    """Asks the kernel for ``signum`` when the parent ends, however that happens; ends at once if it has already."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signum)
    if os.getppid() != parent:
        os._exit(1)


def send_fork(sock: socket.socket, request: ForkRanks | KillRanks, descriptors: list[int]) -> None:
    """The agent's side of the requests; blocks until the kernel has them."""
    data = pack(request)
    sock.setblocking(True)
    if descriptors:
        socket.send_fds(sock, [data[: HEADER.size]], descriptors)
    else:
        sock.sendall(data[: HEADER.size])
    sock.sendall(data[HEADER.size :])


def main(descriptor: int, parent: int, modules: Sequence[str] = ()) -> None:
    """Entry point: imports, then serves the agent at the other end of ``descriptor`` until it closes.

    Args:
        descriptor: Inherited, of a stream socket.
        parent: Process number of the agent.
        modules: What to import besides torch, where it can be.
    """
    # The default action ends this process while it imports; `_Zygote` replaces it once there are ranks to end.
    die_with_parent(parent, signal.SIGTERM)
    sock = socket.socket(fileno=descriptor)
    _import_all(modules)
    _Zygote(sock).serve()


def _import_all(modules: Sequence[str]) -> None:
    gc.disable()
    # torch.cuda.is_available() would else start the CUDA driver, which doesn't survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import cloudpickle  # noqa: F401
    import fsspec.implementations.local  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    import leyden.train.rank
    import leyden.train.torch  # noqa: F401

    for name in modules:
        with contextlib.suppress(Exception):  # whoever needs it in a rank gets the error there
            importlib.import_module(name)
    # The first optimizer, its first step, and the first file, import more on their own.
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()
    torch.save(weight, io.BytesIO())
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    gc.collect()
    gc.freeze()  # the ranks then share these objects' pages for good
    gc.enable()


class _Zygote:
    """Forks and reaps."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._ranks: dict[int, RankPlan] = {}
        self._pid = os.getpid()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())

    def serve(self) -> NoReturn:
        """Until the agent is gone."""
        try:
            while True:
                ready, _, _ = select.select([self._sock, self._wake], [], [])
                if self._wake in ready:
                    os.read(self._wake, 4096)
                    self._reap()
                if self._sock in ready:
                    self._request()
        except (ConnectionError, EOFError):
            self._end()

    def _end(self) -> NoReturn:
        """The agent is gone, so nobody will end the ranks but this process."""
        if os.getpid() == self._pid:  # and not a rank that was signalled before it had reset its handlers
            self._kill(signal.SIGKILL)
        os._exit(0)

    def _kill(self, signum: int) -> None:
        for pid in list(self._ranks):
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(pid, signum)
                except ProcessLookupError:  # forked a moment ago and not yet in a group of its own
                    os.kill(pid, signum)

    def _request(self) -> None:
        header, descriptors, _, _ = socket.recv_fds(self._sock, HEADER.size, 2 * MAX_RANKS_PER_FORK + 1)
        header += self._exactly(HEADER.size - len(header)) if header else b""
        if not header:
            raise EOFError
        request: ForkRanks | KillRanks = pickle.loads(self._exactly(HEADER.unpack(header)[0]))
        if isinstance(request, KillRanks):
            self._kill(request.signum)
            return
        payload, *ends = descriptors
        for index, plan in enumerate(request.plans):
            sock, log = ends[2 * index : 2 * index + 2]
            pid = self._fork(plan, payload, sock, log, descriptors)
            self._ranks[pid] = plan
            self._tell(RankForked(plan.attempt, plan.rank, pid))
        for descriptor in descriptors:
            os.close(descriptor)

    def _fork(self, plan: RankPlan, payload: int, sock: int, log: int, all_descriptors: list[int]) -> int:
        parent = os.getpid()
        # Python counts numpy's BLAS threads, which end themselves before a fork.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()  # here at once, so that the group exists before anything can go wrong
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGKILL)
            self._sock.close()
            for descriptor in {self._wake, self._woken, *all_descriptors} - {payload, sock, log}:
                os.close(descriptor)
            from leyden.train.rank import main as rank_main

            rank_main(plan, payload, sock, log)
        finally:
            os._exit(1)  # never back into the loop of this process

    def _reap(self) -> None:
        for pid, plan in list(self._ranks.items()):
            if (code := _ended(pid)) is not None:
                del self._ranks[pid]
                self._tell(RankExit(plan.attempt, plan.rank, pid, code))

    def _tell(self, message: Any) -> None:
        self._sock.sendall(pack(message))

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._sock.recv(count)
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _ended(pid: int) -> int | None:
    """The exit code of a child that has ended, after ending what is left in its process group; None: it runs."""
    if hasattr(os, "waitid"):
        # The process stays until the waitpid below, so its number, and that of its group, are still its own.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _end_group(pid)
        status = os.waitpid(pid, 0)[1]
    else:  # older macOS
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _end_group(pid)
    return os.waitstatus_to_exitcode(status)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
