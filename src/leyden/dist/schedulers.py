"""Environments of batch schedulers: SLURM, LSF and MPI."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from leyden.base.errors import PossibleUserWarning
from leyden.base.log import warn_once
from leyden.dist.env import ExternalEnvironment, find_free_port

__all__ = ["LSFEnvironment", "MPIEnvironment", "SLURMEnvironment"]

_INTERACTIVE_JOBS = ("bash", "interactive")


class SLURMEnvironment(ExternalEnvironment):
    """Started by ``srun``, one task per device.

    A job named ``bash`` or ``interactive`` counts as a shell to work in: SLURM is then not detected, so that processes
    can be started by hand inside it.

    Args:
        auto_requeue: Save and requeue the job when SLURM announces its end.
        requeue_signal: The signal of that announcement. Default: ``SIGUSR1`` where it exists.

    Raises:
        RuntimeError: The job asks for ``--ntasks`` without ``--ntasks-per-node``; node ranks would be unknown.
    """

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = getattr(signal, "SIGUSR1", None) if requeue_signal is None else requeue_signal
        _warn_if_srun_is_missing()
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if int(tasks) > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise RuntimeError(
                f"--ntasks={tasks} does not say how tasks are spread over nodes; use --ntasks-per-node with "
                "--nodes instead"
            )

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or the first host of ``SLURM_NODELIST``."""
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = self.resolve_root_node_address(os.environ.get("SLURM_NODELIST", "127.0.0.1"))
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, or one that all tasks derive from the job id: 15000 plus its last four digits."""
        if "MASTER_PORT" not in os.environ:
            job = os.environ.get("SLURM_JOB_ID")
            os.environ["MASTER_PORT"] = str(12910 if job is None else 15000 + int(job[-4:]))
        return self._int("MASTER_PORT")

    @staticmethod
    def detect() -> bool:
        """True for a task of ``srun`` outside an interactive job; warns when ``srun`` exists and was not used."""
        _warn_if_srun_is_missing()
        return _started_by_srun()

    @staticmethod
    def job_name() -> str | None:
        """``SLURM_JOB_NAME``."""
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """``SLURM_JOB_ID``; None in an interactive job, whose runs must not share a log folder."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return int(job) if job.isdigit() and not _is_interactive() else None

    def world_size(self) -> int:
        """``SLURM_NTASKS``."""
        return self._int("SLURM_NTASKS")

    def global_rank(self) -> int:
        """``SLURM_PROCID``."""
        return self._int("SLURM_PROCID")

    def local_rank(self) -> int:
        """``SLURM_LOCALID``."""
        return self._int("SLURM_LOCALID")

    def node_rank(self) -> int:
        """``SLURM_NODEID``."""
        return self._int("SLURM_NODEID")

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ValueError when ``devices`` or ``num_nodes`` differ from what the job has."""
        if _is_interactive():
            return
        tasks = os.environ.get("SLURM_NTASKS_PER_NODE")
        if tasks is not None and int(tasks) != num_devices:
            raise ValueError(
                f"devices={num_devices}, but the SLURM job has --ntasks-per-node={tasks}: set devices={tasks} or "
                f"--ntasks-per-node={num_devices}"
            )
        nodes = os.environ.get("SLURM_NNODES")
        if nodes is not None and int(nodes) != num_nodes:
            raise ValueError(
                f"num_nodes={num_nodes}, but the SLURM job has --nodes={nodes}: set num_nodes={nodes} or "
                f"--nodes={num_nodes}"
            )

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """The first host of a SLURM node list: ``"host[5-9],a"`` -> ``"host5"``; spaces or commas separate hosts."""
        first_of_ranges = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes)
        return re.split(r"[ ,]", first_of_ranges, maxsplit=1)[0]


def _is_interactive() -> bool:
    return SLURMEnvironment.job_name() in _INTERACTIVE_JOBS


def _started_by_srun() -> bool:
    return "SLURM_NTASKS" in os.environ and not _is_interactive()


def _warn_if_srun_is_missing() -> None:
    if shutil.which("srun") is not None and not _started_by_srun():
        command = " ".join(["srun", Path(sys.executable).name, *sys.argv])[:64]
        warn_once(
            f"this host has srun, but the script was started without it; on SLURM write: {command} ...",
            category=PossibleUserWarning,
            key="srun is not used",
        )


class LSFEnvironment(ExternalEnvironment):
    """Started by ``jsrun`` under LSF.

    Reads ``LSB_JOBID``, ``LSB_DJOB_RANKFILE`` (whose first line is the launch node) and ``JSM_NAMESPACE_{RANK,
    LOCAL_RANK,SIZE}``.
    """

    def __init__(self) -> None:
        hosts = self._read_hosts()
        self._main_address = hosts[0]
        self._main_port = self._int("MASTER_PORT") if "MASTER_PORT" in os.environ else self._port_of_job()
        self._node_rank = self._rank_of_node(hosts)
        os.environ["MASTER_ADDR"] = self._main_address
        os.environ["MASTER_PORT"] = str(self._main_port)

    @property
    def main_address(self) -> str:
        """The first compute host of the rank file."""
        return self._main_address

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, or 10000 plus the last three digits of the job id."""
        return self._main_port

    @staticmethod
    def detect() -> bool:
        """True when the variables of ``jsrun`` are all there."""
        needed = {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"}
        return needed <= os.environ.keys()

    def world_size(self) -> int:
        """``JSM_NAMESPACE_SIZE``."""
        return self._int("JSM_NAMESPACE_SIZE")

    def global_rank(self) -> int:
        """``JSM_NAMESPACE_RANK``."""
        return self._int("JSM_NAMESPACE_RANK")

    def local_rank(self) -> int:
        """``JSM_NAMESPACE_LOCAL_RANK``."""
        return self._int("JSM_NAMESPACE_LOCAL_RANK")

    def node_rank(self) -> int:
        """Place of this host among the compute hosts of the rank file."""
        return self._node_rank

    def _port_of_job(self) -> int:
        return 10000 + self._int("LSB_JOBID") % 1000

    @staticmethod
    def _read_hosts() -> list[str]:
        path = os.environ.get("LSB_DJOB_RANKFILE")
        if not path:
            raise ValueError("LSFEnvironment needs LSB_DJOB_RANKFILE, the job's rank file; start the script with jsrun")
        hosts = Path(path).read_text(encoding="utf-8").split()[1:]
        if not hosts:
            raise ValueError(f"LSB_DJOB_RANKFILE={path!r} names no compute host after the launch node")
        return hosts

    @staticmethod
    def _rank_of_node(hosts: list[str]) -> int:
        nodes = list(dict.fromkeys(hosts))
        name = socket.gethostname()
        if name not in nodes:
            raise ValueError(f"this host, {name!r}, is not in the LSF rank file, which has {nodes}")
        return nodes.index(name)


class MPIEnvironment(ExternalEnvironment):
    """Started by ``mpirun`` or the like; needs the package ``mpi4py``.

    Raises:
        ModuleNotFoundError: ``mpi4py`` is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("mpi4py") is None:
            raise ModuleNotFoundError("MPIEnvironment needs mpi4py: pip install mpi4py")
        from mpi4py import MPI

        self._world: Any = MPI.COMM_WORLD

    @property
    def main_address(self) -> str:
        """Host name of rank 0."""
        return self._meeting_point[0]

    @property
    def main_port(self) -> int:
        """A port that was free on rank 0."""
        return self._meeting_point[1]

    @staticmethod
    def detect() -> bool:
        """True when ``mpi4py`` works here and MPI runs more than one process."""
        if importlib.util.find_spec("mpi4py") is None:
            return False
        try:
            from mpi4py import MPI
        except ImportError:  # the package is there, an MPI library is not
            return False
        return MPI.COMM_WORLD.Get_size() > 1

    def world_size(self) -> int:
        """Size of MPI's world."""
        return self._world.Get_size()

    def global_rank(self) -> int:
        """Rank in MPI's world."""
        return self._world.Get_rank()

    def local_rank(self) -> int:
        """Rank among the processes of this host."""
        return self._node[1]

    def node_rank(self) -> int:
        """Place of this host's name in the sorted list of hosts."""
        return self._node[0]

    @cached_property
    def _meeting_point(self) -> tuple[str, int]:
        return self._world.bcast((socket.gethostname(), find_free_port()), root=0)

    @cached_property
    def _node(self) -> tuple[int, int]:
        name = socket.gethostname()
        node = sorted(set(self._world.allgather(name))).index(name)
        return node, self._world.Split(color=node).Get_rank()
