"""Two watchers that cost next to nothing per batch: for losses that are not finite, and for a request to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from leyden.base.log import rank_zero_warn

__all__ = ["LossWatch", "Request", "StopWatch"]


class LossWatch:
    """Warns once per run about the first training loss that is NaN or infinite, by its batch.

    Looking at a loss of an accelerator waits for it, so those are kept (a few 0-d tensors) and looked at together. On
    the CPU there is nothing to wait for, and keeping would cost more than looking.
    """

    LOOK_EVERY = 50  # batches

    __slots__ = ("_epoch", "_warned", "losses")

    def __init__(self) -> None:
        self.losses: list[tuple[Any, int]] = []  # with the batch; what is no tensor is ignored
        self._epoch = 0
        self._warned = False

    def start_epoch(self, epoch: int) -> None:
        self.losses.clear()
        self._epoch = epoch

    def add(self, loss: Any, batch: int) -> None:
        """Takes the (detached) loss of a batch."""
        self.losses.append((loss, batch))
        if len(self.losses) >= self.LOOK_EVERY:
            self.look()

    def look(self) -> None:
        """Looks at what was kept since the last time."""
        losses = [(loss, batch) for loss, batch in self.losses if isinstance(loss, Tensor)]
        self.losses.clear()
        if self._warned or not losses:
            return
        # Of each loss its sum, which keeps what is not finite; nearly all losses are 0-d and need none.
        together = torch.stack([loss if loss.dim() == 0 else loss.sum() for loss, _ in losses])
        if math.isfinite(together.sum().item()):
            return
        bad = (~torch.isfinite(together)).nonzero()
        if len(bad) == 0:
            return  # finite, but their sum is not
        self._warned = True
        loss, batch = losses[int(bad[0])]
        value = float(loss.sum())
        rank_zero_warn(
            f"the training loss of epoch {self._epoch}, batch {batch} is {value}; {len(bad)} of the last "
            f"{len(losses)} losses are not finite. Try: a lower learning rate; Trainer(gradient_clip_val=1.0); a look "
            "at that batch for NaN or infinite inputs; precision='bf16-mixed' instead of '16-mixed'; "
            "Trainer(detect_anomaly=True) to find the operation. (Said once per run.)",
            category=RuntimeWarning,
        )


class Request(IntEnum):
    """What a signal asked the training to do."""

    NONE = 0
    REQUEUE = 1  # save, and let the scheduler start the job again
    TERMINATE = 2


class StopWatch:
    """What a signal asked for, agreed by all ranks.

    One process looks at a flag. Several ranks must act at the same batch, or those that stay wait forever: they
    exchange the flag about once a second, at batches agreed on in the exchange before. A collective per batch would
    cost more than many steps do.

    Args:
        take: Returns this process's request and forgets it (unless it is to terminate).
        comm: The ranks; None for one process.
    """

    SECONDS = 1.0
    MOST_BATCHES = 1000

    __slots__ = ("_batches", "_comm", "_next", "_since", "_take")

    def __init__(self, take: Callable[[], Request], comm: Any) -> None:
        self._take = take
        self._comm = comm
        self._batches = 0
        self._next = 1
        self._since = time.monotonic()

    def requested(self) -> Request:
        """Called once per batch, by all ranks; the same on all of them."""
        if self._comm is None:
            return self._take()
        self._batches += 1
        if self._batches < self._next:
            return Request.NONE
        return self.agree()

    def agree(self) -> Request:
        """Exchanges the request now. All ranks call it together."""
        if self._comm is None:
            return self._take()
        now = time.monotonic()
        pace = self._batches / max(now - self._since, 1e-6)
        # Every rank measured its own pace; the slowest decides, so that no exchange is late. A few quick batches may
        # come before slow ones, so the distance grows by steps.
        wish = max(1, min(self.MOST_BATCHES, 4 * self._batches, int(pace * self.SECONDS)))
        flags = torch.tensor([float(self._take()), -float(wish)])
        flags = self._comm.all_reduce(flags, "max", group=self._comm.host_group)
        self._batches, self._next, self._since = 0, int(-flags[1]), now
        return Request(int(flags[0]))
