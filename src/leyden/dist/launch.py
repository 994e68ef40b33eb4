"""Starts the other processes of this node, watches them, and says which one failed and why."""

import abc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from leyden.dist.children import Children, WorkerFailedError, die_with_parent, looks_like_a_lost_peer
from leyden.dist.command import script_command
from leyden.dist.env import ClusterEnvironment
from leyden.dist.results import collect_results, restore_results

__all__ = ["Launcher", "MultiProcessingLauncher", "SubprocessScriptLauncher", "WorkerFailedError"]


class Launcher(abc.ABC):
    """Runs a function in all processes of this node."""

    @property
    @abc.abstractmethod
    def is_interactive_compatible(self) -> bool:
        """True when it works in a notebook, where there is no script to start again."""

    @property
    @abc.abstractmethod
    def runs_in_children(self) -> bool:
        """True when this process is none of the ranks, so that it only gets results back."""

    @abc.abstractmethod
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs ``function(*args, **kwargs)`` in every process and returns what rank 0 returned."""

    @abc.abstractmethod
    def kill(self, signum: int = signal.SIGTERM) -> None:
        """Sends a signal to the processes that this object started and that still run."""


class SubprocessScriptLauncher(Launcher):
    """Starts the user's script again for each further local rank; this process is local rank 0.

    The children find ``LOCAL_RANK`` set, run the same script up to the same call, and meet there. When the processes
    were started by someone else, there is nothing to start and the function just runs.

    Args:
        cluster_environment: Knows whether there is something to start, and where to meet.
        num_processes: Processes on this node.
        num_nodes: Number of nodes.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.cluster_environment = cluster_environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        self._children: Children | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """False: a notebook is no script."""
        return False

    @property
    def runs_in_children(self) -> bool:
        """False: this process is local rank 0."""
        return False

    @property
    def procs(self) -> list[Any]:
        """The ``subprocess.Popen`` objects of the children."""
        return [] if self._children is None else self._children.procs

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the children when there are none yet, then runs the function here.

        Raises:
            WorkerFailedError: A child failed, and that is why the function failed here.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._start_children()
        else:
            die_with_parent()
        _share_threads(self.num_processes)
        if self._children is None:
            return function(*args, **kwargs)
        with self._children.watched():
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if looks_like_a_lost_peer(error):
                    self._children.raise_failure(error)
                raise

    def kill(self, signum: int = signal.SIGTERM) -> None:
        """Signals the children."""
        if self._children is not None:
            self._children.signal(signum)

    def _start_children(self) -> None:
        environment = self.cluster_environment
        if environment.local_rank() != 0:
            raise RuntimeError(
                f"processes can be started from local rank 0 only, but this is local rank {environment.local_rank()}: "
                f"is {type(environment).__name__}.creates_processes_externally right?"
            )
        # Users' libraries read these too; and LOCAL_RANK tells the next Trainer of this script that the children exist.
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = "0"
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        self._children = Children()
        for local_rank in range(1, self.num_processes):
            command, folder = script_command(local_rank)
            variables = {**os.environ, "LOCAL_RANK": str(local_rank)}
            variables.setdefault("OMP_NUM_THREADS", str(_threads_per_process(self.num_processes)))
            self._children.start(local_rank, command, variables, folder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_children": None}  # processes can't be sent to a process


class MultiProcessingLauncher(Launcher):
    """Runs the function in worker processes, one per local rank, and brings the results back to this process.

    Args:
        cluster_environment: Where the workers meet.
        num_processes: Number of workers on this node.
        num_nodes: Number of nodes.
        start_method: ``"spawn"`` (everything is pickled; the script needs ``if __name__ == "__main__":``), ``"fork"``
            (immediate, works in notebooks; nothing may have used CUDA before) or ``"forkserver"``.

    Raises:
        ValueError: The platform lacks the start method.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int = 1,
        start_method: str = "spawn",
    ) -> None:
        available = multiprocessing.get_all_start_methods()
        if start_method not in available:
            raise ValueError(f"start_method={start_method!r} is not available here; use one of {', '.join(available)}")
        self.cluster_environment = cluster_environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes
        self.start_method = start_method
        self.procs: list[Any] = []
        self._has_fitted = False

    @property
    def is_interactive_compatible(self) -> bool:
        """True for fork: the other methods import the main module again."""
        return self.start_method == "fork"

    @property
    def runs_in_children(self) -> bool:
        """True."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs the function in all workers.

        Args:
            function: Must be picklable, with its arguments, unless the start method is fork.
            *args: For the function.
            trainer: Gets the trained weights, `callback_metrics`, callbacks' state and `state` of rank 0.
            **kwargs: For the function.

        Returns:
            What rank 0 returned, with tensors on the CPU.

        Raises:
            RuntimeError: The main module is not guarded, or CUDA was used before a fork.
            NotImplementedError: A second fit of one trainer, whose progress stayed in the first workers.
            torch.multiprocessing.ProcessException: A worker failed; its traceback is in the message.
        """
        fitting = trainer is not None and trainer.state.fn == "fit"
        self._check_start(fitting)
        with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
            path = Path(folder) / "rank_0.pt"
            # The port is chosen here, so that all workers meet at one.
            port = self.cluster_environment.main_port
            job = _Job(function, args, kwargs, trainer, path, self.num_processes, port, _GlobalState.capture())
            context: Any = start_processes(job, nprocs=self.num_processes, start_method=self.start_method, join=False)
            self.procs = context.processes
            try:
                while not context.join():
                    pass
            finally:
                self.kill(signal.SIGKILL)  # none is left unless join was interrupted
                self.procs = []
            # Our own file in our own folder: it holds the user's results, which weights_only would refuse.
            payload = torch.load(path, map_location="cpu", weights_only=False)
        self._has_fitted = self._has_fitted or fitting
        if trainer is not None:
            restore_results(trainer, payload["trainer"])
        return payload["result"]

    def kill(self, signum: int = signal.SIGTERM) -> None:
        """Signals the workers."""
        for process in self.procs:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signum)

    def _check_start(self, fitting: bool) -> None:
        if self.start_method != "spawn" and torch.cuda.is_initialized():
            raise RuntimeError(
                f"CUDA was used in this process, which start_method={self.start_method!r} can't copy: don't touch the "
                "GPU before Trainer.fit (restart the notebook kernel), or use strategy='ddp_spawn' in a script"
            )
        if self.start_method != "fork" and getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "a worker process ran the main script again while it was starting: put the code that makes and uses "
                'the Trainer under `if __name__ == "__main__":`'
            )
        if fitting and self._has_fitted:
            raise NotImplementedError(
                f"start_method={self.start_method!r} can't fit the same Trainer twice, because its progress stayed in "
                "the worker processes: make a new Trainer and pass fit(ckpt_path=...), or use strategy='ddp'"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "procs": []}  # processes can't be sent to a process


class _Job:
    """What a worker runs; called with the local rank."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainer: Any,
        path: Path,
        num_processes: int,
        main_port: int,
        global_state: "_GlobalState",
    ) -> None:
        self.call = (function, args, kwargs)
        self.trainer = trainer
        self.path = path
        self.num_processes = num_processes
        self.main_port = main_port
        self.global_state = global_state

    def __call__(self, local_rank: int) -> None:
        self.global_state.restore()
        os.environ["LOCAL_RANK"] = str(local_rank)
        os.environ["MASTER_PORT"] = str(self.main_port)
        _share_threads(self.num_processes)
        function, args, kwargs = self.call
        _unshare([*args, *kwargs.values(), getattr(self.trainer, "lightning_module", None)])
        result = function(*args, **kwargs)
        # On all ranks: a state_dict may hold metrics, whose state is gathered.
        state = None if self.trainer is None else collect_results(self.trainer)
        if local_rank == 0:
            torch.save({"result": result, "trainer": state}, self.path)


def _unshare(values: list[Any]) -> None:
    """Gives this worker its own weights: tensors that were pickled for a process lie in memory that all workers share.

    Every rank would step the same weights otherwise. That memory stays shared in the main process, too, so a later fork
    inherits it.
    """
    for value in values:
        if isinstance(value, torch.nn.Module):
            for tensor in [*value.parameters(), *value.buffers()]:
                if tensor.device.type == "cpu" and tensor.is_shared():
                    tensor.data = tensor.data.clone()


class _GlobalState:
    """Settings of torch, and RNG states, that a fresh process would not have."""

    def __init__(self, deterministic: tuple[bool, bool], benchmark: bool, rng: dict[str, Any]) -> None:
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.rng = rng

    @classmethod
    def capture(cls) -> "_GlobalState":
        """Reads them here."""
        from leyden.base.seed import collect_rng_state  # on use: layer 0, but not needed by most runs

        strict, warn = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        return cls((strict, warn), torch.backends.cudnn.benchmark, collect_rng_state(include_cuda=False))

    def restore(self) -> None:
        """Sets them in the worker."""
        from leyden.base.seed import set_rng_state

        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        torch.backends.cudnn.benchmark = self.benchmark
        set_rng_state(self.rng)


def _threads_per_process(num_processes: int) -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity
        cores = os.cpu_count() or 1
    return max(1, cores // num_processes)


def _share_threads(num_processes: int) -> None:
    """Splits the cores among the processes unless the user has chosen: more threads than cores slow all down."""
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = _threads_per_process(num_processes)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for loader workers, too
        torch.set_num_threads(threads)
