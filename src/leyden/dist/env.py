"""Who this process is among the others: read from whoever started it, or decided here when nobody did."""

import os
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass

from leyden.base.log import rank_zero_only, warn_once

__all__ = [
    "ClusterEnvironment",
    "DistInfo",
    "KubeflowEnvironment",
    "LightningEnvironment",
    "TorchElasticEnvironment",
    "detect_environment",
    "dist_info",
    "find_free_port",
]

_DEFAULT_ADDRESS = "127.0.0.1"
_DEFAULT_PORT = 12910


@dataclass(frozen=True)
class DistInfo:
    """The place of this process in the group, fixed for the whole run.

    Attributes:
        global_rank: 0-based, unique among all processes.
        local_rank: 0-based, unique on this node; also the index of this process's device.
        node_rank: 0-based, the same for all processes of a node.
        world_size: Number of processes on all nodes.
        local_world_size: Number of processes on this node.
        main_address: Host that runs global rank 0.
        main_port: Port on that host where the group meets.
    """

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    main_address: str
    main_port: int


class ClusterEnvironment(ABC):
    """Where ranks, sizes and the meeting point come from. Subclass it for a scheduler that Leyden does not know."""

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """True when all processes were started by something else, so that Leyden must start none."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host of global rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on `main_address` where the process group meets."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """True when this process was started by what the class stands for."""

    @abstractmethod
    def world_size(self) -> int:
        """Number of processes on all nodes."""

    @abstractmethod
    def set_world_size(self, size: int) -> None:
        """Takes the size from the strategy; ignored where the scheduler decides."""

    @abstractmethod
    def global_rank(self) -> int:
        """Rank of this process among all."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Takes the rank from the strategy; ignored where the scheduler decides."""

    @abstractmethod
    def local_rank(self) -> int:
        """Rank of this process on its node."""

    @abstractmethod
    def node_rank(self) -> int:
        """Rank of this node."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:  # noqa: B027 - optional by design
        """Raises ValueError when what the user asked for is not what was started."""

    def teardown(self) -> None:  # noqa: B027 - optional by design
        """Undoes what this object changed in the process environment."""


class ExternalEnvironment(ClusterEnvironment):
    """Base of the environments whose processes were started by someone else: the setters have nothing to decide."""

    @property
    def creates_processes_externally(self) -> bool:
        """Always True."""
        return True

    def set_world_size(self, size: int) -> None:
        """Ignored: the scheduler decides."""

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the scheduler decides."""

    def _int(self, name: str) -> int:
        value = os.environ.get(name)
        if value is None or not value.lstrip("-").isdigit():
            raise ValueError(
                f"{type(self).__name__} needs the environment variable {name} to be a whole number, but it is "
                f"{'not set' if value is None else repr(value)}; start this script with the scheduler's own launcher, "
                "or pass another cluster environment in Trainer(plugins=...)"
            )
        return int(value)


class LightningEnvironment(ClusterEnvironment):
    """No scheduler: Leyden starts the other processes of this node, or the user starts all with ``LOCAL_RANK`` set.

    On several nodes without a scheduler, start the script once per node with ``MASTER_ADDR``, ``MASTER_PORT`` and
    ``NODE_RANK`` set. (The name is that of the class it stands in for.)
    """

    def __init__(self) -> None:
        self._main_port: int | None = None
        self._global_rank = 0
        self._world_size = 1

    @property
    def creates_processes_externally(self) -> bool:
        """True once ``LOCAL_RANK`` is set, by the user or by Leyden's own launcher."""
        return "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or this host."""
        return os.environ.get("MASTER_ADDR", _DEFAULT_ADDRESS)

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, or a port that was free when first asked."""
        if self._main_port is None:
            port = os.environ.get("MASTER_PORT")
            self._main_port = find_free_port() if port is None else int(port)
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """Always True: this is what remains when nothing else was found."""
        return True

    def world_size(self) -> int:
        """What the strategy set."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Sets the size."""
        self._world_size = size

    def global_rank(self) -> int:
        """What the strategy set."""
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        """Sets the rank."""
        self._global_rank = rank
        rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]

    def local_rank(self) -> int:
        """``LOCAL_RANK``, or 0."""
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        """``NODE_RANK``, then ``GROUP_RANK``, or 0."""
        return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", 0)))

    def teardown(self) -> None:
        """Removes ``WORLD_SIZE``, which the launcher set for libraries that read it."""
        os.environ.pop("WORLD_SIZE", None)


class TorchElasticEnvironment(ExternalEnvironment):
    """Started by ``torchrun`` or another torchelastic agent."""

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``; this host, with a warning, when it is missing."""
        if "MASTER_ADDR" not in os.environ:
            warn_once(f"MASTER_ADDR is not set; using {_DEFAULT_ADDRESS}, which is right on one node only")
            os.environ["MASTER_ADDR"] = _DEFAULT_ADDRESS
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``; 12910, with a warning, when it is missing."""
        if "MASTER_PORT" not in os.environ:
            warn_once(f"MASTER_PORT is not set; using {_DEFAULT_PORT}")
            os.environ["MASTER_PORT"] = str(_DEFAULT_PORT)
        return self._int("MASTER_PORT")

    @staticmethod
    def detect() -> bool:
        """True when an elastic agent started this process."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    def world_size(self) -> int:
        """``WORLD_SIZE``."""
        return self._int("WORLD_SIZE")

    def global_rank(self) -> int:
        """``RANK``."""
        return self._int("RANK")

    def local_rank(self) -> int:
        """``LOCAL_RANK``."""
        return self._int("LOCAL_RANK")

    def node_rank(self) -> int:
        """``GROUP_RANK``, or 0."""
        return int(os.environ.get("GROUP_RANK", 0))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ValueError when ``devices * num_nodes`` is not the number of processes that torchrun started."""
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"devices={num_devices} times num_nodes={num_nodes} is {num_devices * num_nodes}, but torchrun started "
                f"{self.world_size()} processes: make --nproc-per-node equal to devices and --nnodes equal to num_nodes"
            )


class KubeflowEnvironment(ExternalEnvironment):
    """Started by Kubeflow's training operator (``PyTorchJob``): one process per pod."""

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``."""
        return self._int("MASTER_PORT")

    @staticmethod
    def detect() -> bool:
        """True in a Kubernetes pod that has the operator's four variables and no ``LOCAL_RANK`` of another launcher."""
        needed = {"KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
        return needed <= os.environ.keys() and not {"LOCAL_RANK", "GROUP_RANK"} & os.environ.keys()

    def world_size(self) -> int:
        """``WORLD_SIZE``."""
        return self._int("WORLD_SIZE")

    def global_rank(self) -> int:
        """``RANK``."""
        return self._int("RANK")

    def local_rank(self) -> int:
        """Always 0: a pod holds one process."""
        return 0

    def node_rank(self) -> int:
        """The global rank: a pod is a node."""
        return self.global_rank()


def detect_environment() -> ClusterEnvironment:
    """Finds who started this process: leyden.train, torchrun, SLURM, LSF, MPI, Kubeflow, else Leyden itself."""
    # Here and not at the top: both files build on the classes above.
    from leyden.dist.schedulers import LSFEnvironment, MPIEnvironment, SLURMEnvironment
    from leyden.dist.worker import TrainWorkerEnvironment

    schedulers = (SLURMEnvironment, LSFEnvironment, MPIEnvironment, KubeflowEnvironment)
    for cls in (TrainWorkerEnvironment, TorchElasticEnvironment, *schedulers):
        if cls.detect():
            return cls()
    return LightningEnvironment()


def dist_info(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> DistInfo:
    """Fixes the ranks: proposes them to ``environment`` and takes what it answers, since schedulers have their own.

    Args:
        environment: Who knows the ranks.
        num_devices: Processes per node, one per device.
        num_nodes: Number of nodes.
    """
    environment.set_global_rank(environment.node_rank() * num_devices + environment.local_rank())
    environment.set_world_size(num_devices * num_nodes)
    return DistInfo(
        global_rank=environment.global_rank(),
        local_rank=environment.local_rank(),
        node_rank=environment.node_rank(),
        world_size=environment.world_size(),
        local_world_size=num_devices,
        main_address=environment.main_address,
        main_port=environment.main_port,
    )


def find_free_port() -> int:
    """A TCP port that is free on this host now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def __getattr__(name: str) -> object:
    # The schedulers' classes are part of this module's surface; they live apart to keep both files short.
    if name in {"LSFEnvironment", "MPIEnvironment", "SLURMEnvironment"}:
        from leyden.dist import schedulers

        return getattr(schedulers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
