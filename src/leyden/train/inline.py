"""``num_workers=0``: the training function runs in the driver, where a debugger reaches it; all else is the same."""

import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyden.dist import worker
from leyden.dist.env import find_free_port
from leyden.train import node, session
from leyden.train.groups import Event, Node, Placement
from leyden.train.messages import Boundary, Committed, Died, Down, Failed, Finished, RankPlan, Ready, StartRanks, Up
from leyden.train.payload import call_with_config, dump_value
from leyden.train.rank import error_info, install
from leyden.train.session import Session

__all__ = ["InlineGroup"]

_NODE = "driver"
_INTERRUPTED = -2  # exit code of a process that SIGINT ended


class InlineGroup:
    """A group of one rank that runs in this process; a `WorkerGroup`.

    The controller turns in a thread of its own, and whoever made the group calls `serve`, which runs the function in
    the calling thread as often as the controller asks for it.
    """

    def __init__(self, use_gpu: bool = False) -> None:
        self._use_gpu = use_gpu
        self._events: queue.SimpleQueue[Up | None] = queue.SimpleQueue()  # None: Ctrl-C
        self._orders: queue.SimpleQueue[StartRanks | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Down] = queue.SimpleQueue()
        self._interrupted = False
        self.error: BaseException | None = None  # what the function raised last, itself

    # ---- for the controller ------------------------------------------------------------------------------------------

    def place(self, least: int, most: int, timeout: float) -> Placement:
        """This process, with one place."""
        devices = node.device_ids()[:1] if self._use_gpu else ()
        if self._use_gpu and not devices:
            return Placement((), "a GPU, but this machine has none", impossible=True)
        ports = (find_free_port(),)
        return Placement((Node(_NODE, "127.0.0.1", 1, devices, node.cpu_count(), ports),))

    def send(self, node: str, message: Down) -> None:
        """Takes orders for `serve` and news for the rank; there is nothing to stop while the function runs here."""
        if isinstance(message, StartRanks):
            self._orders.put(message)
        elif isinstance(message, (Committed, Boundary)):
            self._told.put(message)

    def poll(self, timeout: float) -> Sequence[Event]:
        """What the rank said.

        Raises:
            KeyboardInterrupt: Ctrl-C ended the function.
        """
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt
        found: list[Event] = []
        try:
            message = self._events.get(timeout=timeout) if timeout > 0 else self._events.get_nowait()
            while message is not None:
                found.append(Event(_NODE, message))
                message = self._events.get_nowait()
            self._interrupted = True  # raised by the next call: what came before it counts
        except queue.Empty:
            return found
        return found

    def release(self) -> None:
        """Ends `serve`."""
        self._orders.put(None)

    # ---- for the driver ----------------------------------------------------------------------------------------------

    def serve(
        self, train_func: Callable[..., Any], config: Mapping[str, Any] | None, datasets: Mapping[str, Any]
    ) -> None:
        """Runs the function at every start that the controller orders, until it releases the group."""
        while (order := self._orders.get()) is not None:
            self._run(order.plans[0], train_func, config, datasets)

    def _run(self, plan: RankPlan, train_func: Callable[..., Any], config: Any, datasets: Mapping[str, Any]) -> None:
        """One attempt: what `rank.main` does in a process of its own."""
        current = Session(plan, _Channel(self._events, self._told), datasets)
        current.device = "cuda:0" if plan.devices else "cpu"
        joined_before = _in_process_group()
        code = 1
        try:
            install(plan, current)
            self._events.put(Ready(plan.attempt, plan.rank, os.getpid(), time.time()))
            value = _call(train_func, config)
            current.finish_upload()
            self._events.put(Finished(plan.attempt, plan.rank, dump_value(value), time.time()))
            self.error, code = None, 0
        except KeyboardInterrupt:
            self._events.put(None)
            code = _INTERRUPTED
        except BaseException as error:  # whatever ends the function is a failure of the rank
            self.error = error
            self._events.put(Failed(plan.attempt, plan.rank, error_info(error), ()))
        finally:
            session.set_current(None)
            worker.set_current(None)
            if _in_process_group() and not joined_before:
                import torch.distributed

                torch.distributed.destroy_process_group()
            self._events.put(Died(plan.attempt, plan.rank, code, (), "", time.time()))


class _Channel:
    """The rank's way to the controller and back."""

    def __init__(self, up: "queue.SimpleQueue[Up | None]", down: "queue.SimpleQueue[Down]") -> None:
        self._up = up
        self._down = down

    def send(self, message: Any) -> None:
        """Never waits."""
        self._up.put(message)

    def receive(self) -> list[Any]:
        """What the controller told the rank since the last call."""
        found: list[Any] = []
        while not self._down.empty():
            found.append(self._down.get())
        return found


def _call(train_func: Callable[..., Any], config: Any) -> Any:
    try:
        return call_with_config(train_func, config)
    except SystemExit as leave:  # sys.exit() of a script that became a function
        if leave.code not in (None, 0):
            raise
        return None


def _in_process_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
