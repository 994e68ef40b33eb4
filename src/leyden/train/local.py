"""The workers of this machine: an agent in a process of its own, which stays warm for the next run of this driver."""

import atexit
import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from leyden.dist.env import find_free_port
from leyden.train import node
from leyden.train.agent import AUTHKEY, agent_command
from leyden.train.groups import Event, Node, Placement
from leyden.train.link import Link, accept, listen
from leyden.train.messages import AgentUp, CloseAgent, Down, Idle, RankPlan, StartRanks, StopRanks

__all__ = ["LocalGroup", "close_warm_agents", "warm_up"]

NODE = "local"
_ADDRESS = "127.0.0.1"
_CONNECT_S = 60.0
_RELEASE_S = 90.0  # logs may have to be uploaded
_CLOSE_S = 10.0
_PORTS = 4
_HEAVY = ("torchmetrics", "lightning.pytorch", "pytorch_lightning", "transformers", "accelerate", "torchvision")
# Read when Python or its libraries start: a warm process can't take another value.
_AT_START = ("PYTHON", "LD_", "VIRTUAL_ENV", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "OMP_")


def _modules_to_warm() -> list[str]:
    """What this process has imported already and a rank will import again: the warm process does it once for all."""
    own = [name for name in sys.modules if name.startswith("leyden.") and not name.startswith("leyden.train")]
    return own + [name for name in _HEAVY if name in sys.modules]


class _LocalAgent:
    """The agent's process, and the connection to it."""

    def __init__(self) -> None:
        key = secrets.token_bytes(32)
        self.variables = dict(os.environ)
        folder = tempfile.mkdtemp(prefix="leyden-")  # for our eyes only
        path = os.path.join(folder, "agent")
        with listen(path) as server:
            self.process = subprocess.Popen(
                agent_command(path, NODE, _ADDRESS, _modules_to_warm()),
                stdin=subprocess.DEVNULL,
                env={**os.environ, AUTHKEY: key.hex()},
                start_new_session=True,  # Ctrl-C is the driver's to handle
            )
            try:
                self.link: Link = accept(server, key, _CONNECT_S)
            except BaseException:
                self.process.kill()
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # one agent, one connection
        self.owner = os.getpid()
        self.up: AgentUp | None = None
        self.stops = 0  # how many `StopRanks` it was sent

    @property
    def alive(self) -> bool:
        return not self.link.closed and self.process.poll() is None

    def stale(self) -> bool:
        """Whether this process's environment has changed in a way that only a new agent can follow."""
        names = self.variables.keys() | os.environ.keys()
        return any(self.variables.get(name) != os.environ.get(name) for name in names if name.startswith(_AT_START))

    def follow(self, plan: RankPlan) -> RankPlan:
        """The plan, with what has changed in this process's environment since the agent started."""
        changed = {name: value for name, value in os.environ.items() if self.variables.get(name) != value}
        gone = tuple(self.variables.keys() - os.environ.keys())
        return replace(plan, environment={**changed, **plan.environment}, unset=(*gone, *plan.unset))

    def close(self) -> None:
        """Ends it and all below it; waits for that."""
        if self.owner != os.getpid():  # a fork of the driver has a copy of the connection, and no business with it
            self.link.close()
            return
        self.link.send(CloseAgent())
        deadline = time.monotonic() + _CLOSE_S
        while self.link.pending and time.monotonic() < deadline:
            select.select([], [self.link], [], 0.1)
            self.link.flush()
        self.link.close()  # says the same, should the message not have got through
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_idle: list[_LocalAgent] = []
_all: list[_LocalAgent] = []


def _acquire() -> _LocalAgent:
    with _lock:
        while _idle:
            agent = _idle.pop()
            if agent.alive and not agent.stale():
                return agent
            _all.remove(agent)
            agent.close()
        agent = _LocalAgent()
        _all.append(agent)
        return agent


def _give_back(agent: _LocalAgent) -> None:
    with _lock:
        if agent.alive:
            _idle.append(agent)
            return
        _all.remove(agent)
    agent.close()


def warm_up() -> None:
    """Starts an agent ahead of its use, in a fraction of a second; its imports go on while the caller does."""
    _give_back(_acquire())


def close_warm_agents() -> None:
    """Ends all agents of this process and what they run. Called at exit; a later run starts a new one."""
    with _lock:
        agents = list(_all)
        _all.clear()
        _idle.clear()
    for agent in agents:
        agent.close()


def _forget_in_fork() -> None:
    global _lock
    _lock = threading.Lock()
    close_warm_agents()  # closes the copies of the connections, so that the agents see the end of their driver


atexit.register(close_warm_agents)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


class LocalGroup:
    """A `WorkerGroup` on this machine.

    CPU ranks may be as many as one likes: they share the CPUs. GPU ranks get a device each, or as many as they ask for.

    Args:
        use_gpu: Whether ranks need devices.
        gpus_per_worker: How many; parts of one share it.
    """

    def __init__(self, use_gpu: bool = False, gpus_per_worker: float = 1.0) -> None:
        self._use_gpu = use_gpu
        self._gpus_per_worker = gpus_per_worker
        self._agent: _LocalAgent | None = None
        self._lost = False

    def place(self, least: int, most: int, timeout: float) -> Placement:
        """This machine for all of them, where it has the devices; starts the agent, or takes a warm one."""
        if not hasattr(os, "fork"):
            return Placement(
                (),
                waiting_for="local workers are forked, which Windows can't: use num_workers=0, or run under WSL",
                impossible=True,
            )
        devices = node.device_ids() if self._use_gpu else ()
        room = int(len(devices) / self._gpus_per_worker + 1e-9) if self._use_gpu else most
        if room < least:
            return Placement(
                (),
                waiting_for=f"{least} workers need {least * self._gpus_per_worker:g} GPUs, but this machine has "
                f"{len(devices)} visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): "
                "use fewer workers, or use_gpu=False",
                impossible=True,
            )
        if self._agent is None or not self._agent.alive:
            self._drop()
            self._agent = _acquire()
            self._lost = False
        ranks = min(most, room)
        ports = tuple({find_free_port() for _ in range(_PORTS)})
        here = Node(NODE, _ADDRESS, ranks, devices, node.cpu_count(), ports)
        return Placement((here,))

    def send(self, node: str, message: Down) -> None:
        """Sends to the agent; a dead one is no error."""
        agent = self._agent
        if agent is None:
            return
        if isinstance(message, StartRanks):
            message = replace(message, plans=tuple(map(agent.follow, message.plans)))
        agent.stops += isinstance(message, StopRanks)
        agent.link.send(message)

    def poll(self, timeout: float) -> Sequence[Event]:
        """What the agent and the ranks said; an `Event` without a message when the agent is gone, once."""
        deadline = time.monotonic() + timeout
        while True:
            events = self._events()
            left = deadline - time.monotonic()
            if events or left <= 0:
                return events
            if self._agent is None or self._agent.link.closed:
                time.sleep(min(left, 0.05))
                continue
            link = self._agent.link
            select.select([link], [link] if link.pending else [], [], left)

    def _events(self) -> list[Event]:
        agent = self._agent
        if agent is None or self._lost:
            return []
        agent.link.flush()
        events = []
        for message in agent.link.receive():
            if isinstance(message, AgentUp):
                agent.up = message
            if not isinstance(message, Idle):
                events.append(Event(NODE, message))
        if agent.link.closed:
            self._lost = True
            events.append(Event(NODE, None))
        return events

    def release(self) -> None:
        """Ends all ranks; the agent stays for the next run of this process."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        agent.stops += 1
        agent.link.send(StopRanks(0.0))
        deadline = time.monotonic() + _RELEASE_S
        idle = False
        try:
            while not idle and agent.alive and time.monotonic() < deadline:
                link = agent.link
                select.select([link], [link] if link.pending else [], [], 0.5)
                link.flush()
                idle = any(message == Idle(agent.stops) for message in link.receive())
        finally:
            if not idle:  # it doesn't answer, or the user pressed Ctrl-C: nothing may stay behind
                with contextlib.suppress(OSError):
                    agent.close()
            _give_back(agent)

    def _drop(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            _give_back(agent)
