"""Everything that crosses a process: plain frozen records, pickled.

Down: controller -> agent (`StartRanks`, `StopRanks`, `Boundary`, `Committed`, `CloseAgent`).
Up: rank -> agent -> controller (`Ready` to `Failed`), and agent -> controller (`AgentUp`, `Died`, `Output`, `Hung`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AgentUp",
    "Boundary",
    "CheckpointPart",
    "CloseAgent",
    "Committed",
    "Died",
    "Down",
    "ErrorInfo",
    "Failed",
    "Finished",
    "Hung",
    "Idle",
    "Metrics",
    "Output",
    "RankPlan",
    "Ready",
    "StartRanks",
    "StopRanks",
    "Up",
]


@dataclass(frozen=True)
class RankPlan:
    """All that one rank is told before it runs the user's function."""

    attempt: int  # 0 for the first start of the run, then one more for each restart; messages of others are ignored
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    run_name: str
    run_url: str  # storage_path/name
    storage_options: Mapping[str, Any]
    checkpoint: str | None  # folder name of the last committed checkpoint, relative to run_url
    next_report: int  # index of the first report of this attempt
    use_gpu: bool
    devices: tuple[int, ...]  # accelerator ids of this rank; empty on CPU
    visible_devices: tuple[int, ...]  # of all ranks on this node, in numeric order
    threads: int  # for OMP and torch, 0: leave as it is
    backend: str | None  # of the process group; None: by device
    timeout_s: float  # of the process group
    log_path: str  # of the output, on the node; "": in a folder of the agent, stored in run_url/logs at the end
    environment: Mapping[str, str] = field(default_factory=dict)
    hang_timeout_s: float = 0.0  # seconds without a sign of progress before `Hung`; 0: never
    unset: tuple[str, ...] = ()  # environment variables that the rank must not have


@dataclass(frozen=True)
class ErrorInfo:
    """An exception as text, so that any of them can be sent."""

    type: str
    text: str
    traceback: str
    time: float  # time.time()


# ---- down ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRanks:
    """Fork these ranks and run the function in them."""

    plans: tuple[RankPlan, ...]
    payload: bytes  # as `payload.pack_payload` makes it: train_func, config or None, datasets


@dataclass(frozen=True)
class StopRanks:
    """End all ranks: SIGTERM, after ``grace_s`` SIGKILL to their process groups. Answered by their `Died`."""

    grace_s: float


@dataclass(frozen=True)
class Boundary:
    """Ask the ranks to end at their next boundary (``stop_requested`` turns True)."""


@dataclass(frozen=True)
class Committed:
    """A checkpoint is whole and recorded."""

    index: int
    folder: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class CloseAgent:
    """End the ranks, the warm process and the agent."""


# ---- up --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentUp:
    """The agent runs and can start ranks. Sent at its start, and again when all ranks of an attempt are gone."""

    node: str  # host name or node id
    address: str  # where ranks of other nodes reach this one
    cpus: int
    devices: tuple[int, ...]
    pid: int
    ports: tuple[int, ...]  # that were free here a moment ago, for rank 0 to meet the others


@dataclass(frozen=True)
class Ready:
    """The rank has joined its process group and calls the user's function now."""

    attempt: int
    rank: int
    pid: int
    time: float


@dataclass(frozen=True)
class Metrics:
    """One `report` call: metrics as plain numbers, strings, booleans, None, and nested dicts and lists of these."""

    attempt: int
    rank: int
    index: int  # 0, 1, ... over all attempts, by rank
    values: Mapping[str, Any]
    has_checkpoint: bool
    time: float


@dataclass(frozen=True)
class CheckpointPart:
    """This rank's files of report ``index`` are in storage, under ``folder``."""

    attempt: int
    rank: int
    index: int
    folder: str  # relative to run_url
    files: Mapping[str, int]  # path in the folder -> size in bytes; {} where the rank had none
    time: float


@dataclass(frozen=True)
class Finished:
    """The user's function returned."""

    attempt: int
    rank: int
    value: bytes | None  # cloudpickle of what it returned, rank 0 only; None for None
    time: float


@dataclass(frozen=True)
class Failed:
    """The user's function, or an upload, raised."""

    attempt: int
    rank: int
    error: ErrorInfo
    log_tail: tuple[str, ...]


@dataclass(frozen=True)
class Died:
    """The rank's process is gone. Comes for every rank, after `Finished` or `Failed` too."""

    attempt: int
    rank: int
    exit_code: int  # negative: killed by that signal
    log_tail: tuple[str, ...]
    reason: str  # "", or what the agent knows: "out of memory", "killed by the agent", ...
    time: float


@dataclass(frozen=True)
class Hung:
    """No sign of progress for the time allowed; ``stack`` is the rank's, where it could be had."""

    attempt: int
    rank: int
    seconds: float
    stack: str


@dataclass(frozen=True)
class Idle:
    """Answer to `StopRanks`, after the `Died` of all: nothing runs on the node, and its logs are stored.

    Groups wait for it in ``release``; the controller never sees it.
    """

    stops: int  # how many `StopRanks` this agent has had


@dataclass(frozen=True)
class Output:
    """Lines that rank 0 printed, for the driver's terminal."""

    rank: int
    text: str


Down = StartRanks | StopRanks | Boundary | Committed | CloseAgent
Up = AgentUp | Ready | Metrics | CheckpointPart | Finished | Failed | Died | Hung | Output | Idle
