"""Drives a real `LocalGroup` without a controller: start a function in ranks, and collect what they say."""

import time
from pathlib import Path
from typing import Any

from leyden.train.local import LocalGroup
from leyden.train.messages import Died, Metrics, RankPlan, Ready, StartRanks
from leyden.train.payload import pack_payload

TIMEOUT_S = 60.0


def make_plan(rank: int, world_size: int, folder: Path, port: int, **changes: Any) -> RankPlan:
    values: dict[str, Any] = {
        "attempt": 0,
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "local_world_size": world_size,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "run_name": folder.name,
        "run_url": str(folder),
        "storage_options": {},
        "checkpoint": None,
        "next_report": 0,
        "use_gpu": False,
        "devices": (),
        "visible_devices": (),
        "threads": 1,
        "backend": None,
        "timeout_s": 60.0,
        "log_path": str(folder / "logs" / f"rank-{rank}.log"),
    }
    return RankPlan(**{**values, **changes})


class LocalRun:
    """One attempt after the other on one group; ``messages`` holds (arrival by time.time(), message)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = LocalGroup()
        self.messages: list[tuple[float, Any]] = []
        self.node_lost = False

    def __enter__(self) -> "LocalRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.group.release()

    def start(self, function: Any, config: Any = None, world_size: int = 1, **changes: Any) -> None:
        node = self.group.place(world_size, world_size, 1.0).nodes[0]
        plans = tuple(make_plan(rank, world_size, self.folder, node.ports[0], **changes) for rank in range(world_size))
        self.group.send(node.id, StartRanks(plans, pack_payload(function, config)))

    def send(self, message: Any) -> None:
        self.group.send("local", message)

    def of(self, kind: type, rank: int | None = None) -> list[Any]:
        return [each for _, each in self.messages if isinstance(each, kind) and rank in (None, each.rank)]

    def arrival(self, message: Any) -> float:
        return next(when for when, each in self.messages if each is message)

    def poll(self, timeout: float = 0.5) -> None:
        for event in self.group.poll(timeout):
            if event.message is None:
                self.node_lost = True
            else:
                self.messages.append((time.time(), event.message))

    def until(self, kind: type, count: int = 1, timeout: float = TIMEOUT_S) -> list[Any]:
        """Waits for ``count`` messages of a kind."""
        deadline = time.monotonic() + timeout
        while len(self.of(kind)) < count:
            assert time.monotonic() < deadline, f"{kind.__name__} x {count} did not come: {self.messages}"
            self.poll()
        return self.of(kind)

    def values(self, rank: int = 0) -> list[dict[str, Any]]:
        return [each.values for each in self.of(Metrics, rank)]

    def pids(self) -> dict[int, int]:
        return {each.rank: each.pid for each in self.of(Ready)}

    def log(self, rank: int = 0) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()

    def until_dead(self, world_size: int = 1) -> list[Any]:
        return self.until(Died, world_size)


def running(pid: int) -> bool:
    """Whether a process runs: not gone, and no zombie that its parent hasn't seen yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def wait_gone(pids: list[int], timeout: float) -> list[int]:
    """Those that still run after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def wait_for_file(path: Path, timeout: float = TIMEOUT_S) -> str:
    deadline = time.monotonic() + timeout
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()
