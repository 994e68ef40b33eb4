"""The agent: one process per node that owns its ranks. It needs an address and a key to connect to, and nothing else.

It starts the warm process, has ranks forked there, passes on what they say, notices their end within milliseconds, and
ends them all when whoever it serves is gone.
"""

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leyden.dist.env import find_free_port
from leyden.train import node
from leyden.train.link import Link, connect
from leyden.train.logs import RankLog, open_log
from leyden.train.messages import (
    AgentUp,
    Boundary,
    CloseAgent,
    Committed,
    Died,
    Down,
    Failed,
    Finished,
    Hung,
    Idle,
    Output,
    RankPlan,
    StartRanks,
    StopRanks,
)
from leyden.train.signs import Beat, Busy
from leyden.train.zygote import MAX_RANKS_PER_FORK, ForkRanks, KillRanks, RankExit, RankForked, send_fork

__all__ = ["AUTHKEY", "agent_command", "main"]

AUTHKEY = "LEYDEN_AGENT_KEY"  # environment variable: the key as hexadecimal digits; arguments would be public
_TICK = 0.1  # seconds between looks at output and clocks, while ranks run
_STACK_WAIT = 0.3
_END_WAIT = 5.0
_UPLOAD_WAIT = 60.0
_PORTS = 4


def agent_command(
    address: str | tuple[str, int], node_id: str, own_address: str, modules: Sequence[str] = ()
) -> list[str]:
    """The command line that starts an agent, which finds its modules where this process does.

    Args:
        address: Where the controller listens: a path, or a host and a port.
        node_id: How the controller calls this node.
        own_address: Where ranks of other nodes reach this one.
        modules: What the warm process imports besides torch.
    """
    where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    code = f"import sys; sys.path[:] = {_absolute_paths()!r}; from leyden.train.agent import main; main()"
    options = ["--controller", where, "--node", node_id, "--address", own_address, "--modules", *modules]
    return [sys.executable, "-c", code, *options]


def main() -> None:
    """Entry point of the agent's process."""
    parser = argparse.ArgumentParser(prog="leyden agent")
    parser.add_argument("--controller", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--modules", nargs="*", default=[])
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    warm = _WarmProcess(options.modules)  # first, because it takes the longest
    host, _, port = options.controller.rpartition(":")
    address = (host, int(port)) if port.isdigit() and not options.controller.startswith("/") else options.controller
    link = connect(address, bytes.fromhex(os.environ.pop(AUTHKEY)))
    _Agent(link, warm, parent).run(options.node, options.address)


class _WarmProcess:
    """The warm process as the agent sees it."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = modules
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {_absolute_paths()!r}; from leyden.train.zygote import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {modules!r})"
        )
        environment = {name: value for name, value in os.environ.items() if name != AUTHKEY}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        self._sock = ours
        self.link = Link(ours)

    def request(self, message: ForkRanks | KillRanks, descriptors: list[int]) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the loop notices by the end of its messages
            send_fork(self._sock, message, descriptors)
        self._sock.setblocking(False)

    def end(self) -> None:
        """Ends it, and with it its ranks."""
        self.process.terminate()
        try:
            self.process.wait(_END_WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.link.close()


@dataclass(eq=False)
class _Rank:
    plan: RankPlan
    link: Link
    log: RankLog
    pid: int = 0
    sign: float = 0.0  # of progress, by time.monotonic(); 0: not watched
    busy: bool = False  # storing a checkpoint, which is no hang however long it takes
    hung: bool = False  # and said so


class _Agent:
    def __init__(self, link: Link, warm: _WarmProcess, parent: int) -> None:
        self._controller = link
        self._warm = warm
        self._parent = parent
        self._logs = ""  # folder for those that have no other place, once there are any
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._kill_at: float | None = None
        self._stopping = False
        self._asked_idle = False
        self._stops = 0
        self._name = self._address = ""
        self._upload: threading.Thread | None = None
        self._oom_kills = node.oom_kills()
        self._selector = selectors.DefaultSelector()
        self._running = True

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, name: str, address: str) -> None:
        """Serves until told to close, or until the controller or its process is gone."""
        self._watch(self._controller, self._from_controller)
        self._watch(self._warm.link, self._from_warm_process)
        with contextlib.suppress(OSError, AttributeError):  # an older kernel, or another system: the loop looks itself
            self._watch(os.pidfd_open(self._parent), self._parent_ended)
        self._name, self._address = name, address
        self._announce()
        try:
            while self._running:
                for key, _ in self._selector.select(_TICK if self._ranks or self._asked_idle else 1.0):
                    key.data()
                self._tick()
        finally:
            self._end_all()

    def _announce(self) -> None:
        """Again after every attempt, since the next one needs a port that is free then."""
        ports = tuple({find_free_port() for _ in range(_PORTS)})
        self._say(AgentUp(self._name, self._address, node.cpu_count(), node.device_ids(), os.getpid(), ports))

    def _watch(self, source: Any, handle: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handle)

    def _say(self, message: Any) -> None:
        self._controller.send(message)

    def _tick(self) -> None:
        now = time.monotonic()
        for link in [self._controller, *(rank.link for rank in self._ranks.values())]:
            if not link.closed:
                self._selector.modify(link, *self._interest(link))
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._warm.request(KillRanks(signal.SIGKILL), [])
        for rank in list(self._ranks.values()):
            self._pass_output(rank)
            limit = rank.plan.hang_timeout_s
            if limit and rank.sign and not rank.hung and not rank.busy and now - rank.sign > limit:
                self._report_hang(rank, now - rank.sign)
        if self._asked_idle and not self._ranks and not (self._upload and self._upload.is_alive()):
            self._asked_idle = self._stopping = False
            self._say(Idle(self._stops))
        if os.getppid() != self._parent:
            self._running = False

    def _interest(self, link: Link) -> tuple[int, Callable[[], None]]:
        handle = self._selector.get_key(link).data
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if link.pending else 0), handle

    def _parent_ended(self) -> None:
        self._running = False

    # ---- from the controller -----------------------------------------------------------------------------------------

    def _from_controller(self) -> None:
        self._controller.flush()
        for message in self._controller.receive():
            self._obey(message)
        if self._controller.closed:
            self._running = False

    def _obey(self, message: Down) -> None:
        if isinstance(message, StartRanks):
            self._start(message)
        elif isinstance(message, StopRanks):
            self._stop(message.grace_s)
        elif isinstance(message, (Boundary, Committed)):
            for rank in self._ranks.values():
                rank.link.send(message)
        elif isinstance(message, CloseAgent):
            self._running = False

    def _start(self, message: StartRanks) -> None:
        self._stopping = False
        with tempfile.TemporaryFile() as payload:  # every rank reads it there: nobody waits for a big one to be sent
            payload.write(message.payload)
            payload.flush()
            for start in range(0, len(message.plans), MAX_RANKS_PER_FORK):
                plans = message.plans[start : start + MAX_RANKS_PER_FORK]
                theirs: list[socket.socket] = []
                descriptors = [payload.fileno()]
                for plan in plans:
                    ours, their = socket.socketpair()
                    theirs.append(their)
                    rank = self._add(plan, ours)
                    descriptors += [their.fileno(), rank.log.descriptor]
                self._warm.request(ForkRanks(plans), descriptors)
                for their in theirs:
                    their.close()

    def _add(self, plan: RankPlan, sock: socket.socket) -> _Rank:
        path = plan.log_path
        if not path:
            self._logs = self._logs or tempfile.mkdtemp(prefix="leyden-logs-")
            path = os.path.join(self._logs, plan.run_name.replace(os.sep, "_"), f"rank-{plan.rank}.log")
        log, trouble = open_log(path, plan.attempt)
        if trouble:
            self._say(Output(plan.rank, f"leyden: {trouble}\n"))
        rank = _Rank(plan, Link(sock), log)
        self._ranks[plan.attempt, plan.rank] = rank
        self._watch(rank.link, lambda: self._from_rank(rank))
        return rank

    def _stop(self, grace: float) -> None:
        self._asked_idle = True
        self._stops += 1
        if not self._ranks:
            return
        self._stopping = True
        self._warm.request(KillRanks(signal.SIGTERM if grace > 0 else signal.SIGKILL), [])
        if grace > 0:
            self._kill_at = min(time.monotonic() + grace, self._kill_at or float("inf"))

    # ---- from the ranks and the warm process -------------------------------------------------------------------------

    def _from_rank(self, rank: _Rank, ended: bool = False) -> None:
        rank.link.flush()
        for message in rank.link.receive(None) if ended else rank.link.receive():
            rank.sign = time.monotonic()
            rank.hung = False
            if isinstance(message, Busy):
                rank.busy = message.busy
            elif isinstance(message, Failed):
                rank.sign = 0.0
                self._pass_output(rank)
                self._say(replace(message, log_tail=rank.log.tail()))
            elif not isinstance(message, Beat):
                if isinstance(message, Finished):
                    rank.sign = 0.0  # it may have to wait for the others now
                self._say(message)
        if rank.link.closed and rank.link.fileno() >= 0:
            self._selector.unregister(rank.link)
            rank.link.close()

    def _pass_output(self, rank: _Rank) -> None:
        if rank.plan.rank == 0 and (text := rank.log.fresh()):
            self._say(Output(0, text))

    def _from_warm_process(self) -> None:
        for message in self._warm.link.receive():
            rank = self._ranks.get((message.attempt, message.rank))
            if rank is not None and isinstance(message, RankForked):
                rank.pid = message.pid
            elif rank is not None and isinstance(message, RankExit):
                self._bury(rank, message.exit_code, self._reason(message.exit_code))
        if self._warm.link.closed:
            self._replace_warm_process()

    def _reason(self, exit_code: int) -> str:
        if exit_code >= 0:
            return ""
        if self._stopping:
            return "killed by the agent"
        before, self._oom_kills = self._oom_kills, node.oom_kills()
        return "out of memory" if exit_code == -signal.SIGKILL and self._oom_kills > before else ""

    def _bury(self, rank: _Rank, exit_code: int, reason: str) -> None:
        """Passes on the last words of a rank that is gone; they are all here by now."""
        if not rank.link.closed:
            self._from_rank(rank, ended=True)
        if rank.link.fileno() >= 0:  # held open by nobody else now, but by a process that left the rank's group
            self._selector.unregister(rank.link)
            rank.link.close()
        self._pass_output(rank)
        self._say(Died(rank.plan.attempt, rank.plan.rank, exit_code, rank.log.tail(), reason, time.time()))
        rank.log.close()
        del self._ranks[rank.plan.attempt, rank.plan.rank]
        if not self._ranks:
            self._kill_at = None
            self._store_logs(rank)
            self._announce()

    def _replace_warm_process(self) -> None:
        """It was killed: its ranks go with it, and the next ones come from a new one."""
        self._selector.unregister(self._warm.link)
        self._warm.link.close()
        code = self._warm.process.wait()
        reason = f"the process that ranks are forked from ended with exit code {code}"
        for rank in list(self._ranks.values()):
            _end_group(rank.pid)
            self._bury(rank, -signal.SIGKILL, "killed by the agent" if self._stopping else reason)
        self._warm = _WarmProcess(self._warm.modules)
        self._watch(self._warm.link, self._from_warm_process)

    def _report_hang(self, rank: _Rank, seconds: float) -> None:
        rank.hung = True
        before = rank.log.size
        state = _process_state(rank.pid)
        stack = ""
        if state not in ("T", "t", "D", "Z"):
            os.kill(rank.pid, signal.SIGUSR2)  # rank.py has it print all stacks
            time.sleep(_STACK_WAIT)
            stack = rank.log.since(before)
        stack = stack or f"no stack: process {rank.pid} is in state {state or '?'} and doesn't answer signals"
        self._say(Hung(rank.plan.attempt, rank.plan.rank, seconds, stack))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _store_logs(self, rank: _Rank) -> None:
        """Uploads the logs where they don't lie in the run folder, beside whatever comes next."""
        url, options, folder = rank.plan.run_url, rank.plan.storage_options, str(rank.log.path.parent)
        if rank.plan.log_path:
            return
        before = self._upload

        def upload() -> None:
            from leyden.train.storage import Storage

            if before is not None:
                before.join()
            try:
                storage = Storage(url, dict(options))
                for name in os.listdir(folder):
                    storage.put_file(os.path.join(folder, name), f"logs/{name}")
            except Exception as error:
                sys.stderr.write(f"leyden: the logs in {folder} could not be stored in {url}/logs: {error!r}\n")

        self._upload = threading.Thread(target=upload, name="leyden-logs")
        self._upload.start()

    def _end_all(self) -> None:
        pids = [rank.pid for rank in self._ranks.values()]
        self._warm.end()
        for pid in pids:
            _end_group(pid)
        if self._upload is not None:
            self._upload.join(_UPLOAD_WAIT)
            if self._upload.is_alive():
                os._exit(0)  # the logs stay where they are
        if self._logs:
            shutil.rmtree(self._logs, ignore_errors=True)


def _end_group(pid: int) -> None:
    """Ends a rank that the warm process can't end any more, and waits until it is gone."""
    deadline = time.monotonic() + _END_WAIT
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while pid and time.monotonic() < deadline:
            os.killpg(pid, signal.SIGKILL)
            if _process_state(pid) == "Z":  # waits for its new parent only
                return
            time.sleep(0.005)


def _process_state(pid: int) -> str:
    """As in ``ps``: R, S, D, T, Z; "" where it can't be had."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _absolute_paths() -> list[str]:
    return [os.path.abspath(path) if path else os.getcwd() for path in sys.path]
