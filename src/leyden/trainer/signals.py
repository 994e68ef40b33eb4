"""SIGTERM and the scheduler's warning signal: noted in a handler, obeyed by the training loop between batches."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from leyden.base.log import log
from leyden.dist.schedulers import SLURMEnvironment
from leyden.loops.watch import Request

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["Signals", "requeue_job"]


class Signals:
    """The signals of a run. A handler only sets a flag: nothing can be saved safely inside one."""

    def __init__(self) -> None:
        self.noted = False  # some signal arrived: worth asking `take`
        self.received_sigterm = False
        self._requeue = False
        self._before: dict[int, Any] = {}

    def register(self, trainer: Trainer) -> None:
        """Installs the handlers; handlers of others are called after ours. Only the main thread may do it."""
        self.noted = self.received_sigterm = self._requeue = False
        if threading.current_thread() is not threading.main_thread():
            return
        self._install(signal.SIGTERM, self._sigterm_handler(trainer))
        environment = trainer.strategy.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            warning = environment.requeue_signal
            if warning is not None and signal.getsignal(warning) in (None, signal.SIG_DFL):
                self._install(warning, lambda number, frame: self._note_requeue())

    def restore(self) -> None:
        """Puts back the handlers that were there before."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def take(self) -> Request:
        """The request that waits; asking takes a requeue away, termination stays."""
        if self.received_sigterm:
            return Request.TERMINATE
        if self._requeue:
            self._requeue = False
            return Request.REQUEUE
        return Request.NONE

    def _install(self, number: int, handler: Callable) -> None:
        before = signal.getsignal(number)
        self._before[number] = before

        def call_both(received: int, frame: Any) -> None:
            handler(received, frame)
            if callable(before):
                before(received, frame)

        signal.signal(number, call_both)

    def _sigterm_handler(self, trainer: Trainer) -> Callable:
        def note(number: int, frame: Any) -> None:
            log.info("[rank %d] received SIGTERM: training ends after this batch", trainer.global_rank)
            if not self.received_sigterm:
                launcher = trainer.strategy.launcher
                if launcher is not None:
                    launcher.kill(number)  # our children train along with us
            self.noted = self.received_sigterm = True

        return note

    def _note_requeue(self) -> None:
        self.noted = self._requeue = True

    def __getstate__(self) -> dict[str, Any]:
        return {"noted": False, "received_sigterm": False, "_requeue": False, "_before": {}}


def requeue_job() -> None:
    """Asks SLURM to queue this job again. Called on rank zero after the state was saved."""
    job = os.environ["SLURM_JOB_ID"]
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        log.info("requeued SLURM job %s", job)
    else:
        log.warning("scontrol requeue %s failed with exit code %d: %s", job, result.returncode, result.stderr.strip())
