"""Reduces step values over ranks, all of them in one collective, and finds out when ranks log different names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from leyden.base.errors import MisconfigurationException
from leyden.loops.reduce import Entry, missing_message, require_same

__all__ = ["StepSync"]

_NUMBERS = itertools.count()  # all ranks make the same objects, in the same order
Row = tuple[str, str, bool]  # label, reduction, whether it has a group of its own


class StepSync:
    """What the ranks have agreed to reduce after each step.

    A collective in which one rank lacks a value would hang, or mix up values. So the names are agreed on at the first
    step, and from then on every rank takes part in the reduction of the agreed names, whatever it logged. A rank whose
    names differ says so in that same reduction where values are on the host (the answer costs nothing there). On a GPU
    nobody reads the answer, because that would wait for the device at each step: there, and where names come up after
    a first step without any, ranks with new names wait for the others for a limited time.

    Args:
        comm: The ranks, `leyden.dist.comm.Comm`-like.
        device: Where values are packed.
    """

    PATIENCE = timedelta(minutes=5)

    def __init__(self, comm: Any, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._on_host = device.type == "cpu"
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._agreed: dict[Any, tuple[Row, ...]] = {}
        self._key = f"leyden/step-names/{next(_NUMBERS)}"
        self._meetings = 0

    def needed(self, *points: Any) -> bool:
        """Whether `reduce` has something to do at a step although this rank logs nothing at it."""
        return any(self._agreed.values()) or any(point not in self._agreed for point in points)

    def reduce(self, pending: Sequence[Entry], point: Any) -> None:
        """Reduces the step values in place. All ranks call it together.

        Args:
            pending: The entries whose value of this step is to be reduced.
            point: Where in the loop this is; names are agreed on for each place.

        Raises:
            MisconfigurationException: The ranks logged different names.
        """
        ordered = sorted(pending, key=lambda entry: entry.label)
        names = tuple((entry.label, entry.reduction.value, entry.group is not None) for entry in ordered)
        agreed = self._agreed.get(point)
        if agreed is None:
            self._agree(names, point)
        elif names != agreed and not (agreed and self._on_host):
            self._meet(names, agreed)
            self._agree(names, point)
        if self._agreed[point] and not self._reduce_agreed(ordered, names, self._agreed[point]):
            self._agree(names, point)
            self._reduce_agreed(ordered, names, names)

    def _agree(self, names: tuple[Row, ...], point: Any) -> None:
        require_same([[label for label, *_ in rows] for rows in self._comm.all_gather_object(names)])
        self._agreed[point] = names

    def _meet(self, names: tuple[Row, ...], agreed: tuple[Row, ...]) -> None:
        """Waits for the other ranks to come here too; those that logged the same as before do not.

        Through the store by which the ranks found each other: a collective that not all join can't be left again.
        """
        rank, size = self._comm.rank, self._comm.world_size
        store = torch.distributed.distributed_c10d._get_default_store()
        keys = [f"{self._key}/{self._meetings}/{each}" for each in range(size)]
        self._meetings += 1
        store.set(keys[rank], "here")
        try:
            store.wait(keys, self.PATIENCE)
        except RuntimeError as error:
            mine, usual = [label for label, *_ in names], [label for label, *_ in agreed]
            schemas = [mine if store.check([key]) else usual for key in keys]
            raise MisconfigurationException(
                f"{missing_message(sorted(set(mine) ^ set(usual)), schemas)}\n"
                f"(rank {rank} waited {self.PATIENCE.total_seconds():g} s for the others to log them)"
            ) from error

    def _reduce_agreed(self, pending: list[Entry], names: tuple[Row, ...], agreed: tuple[Row, ...]) -> bool:
        """The collectives of the agreed names; False where some rank has others (then nothing was changed)."""
        same = names == agreed
        values = [entry.step_value for entry in pending] if same else [None] * len(agreed)
        added = [i for i, (_, kind, grouped) in enumerate(agreed) if kind in ("mean", "sum") and not grouped]
        packed = [self._to_pack(values[i]) for i in added]
        if self._on_host:
            packed.append(torch.tensor(0.0 if same else 1.0, dtype=self._dtype))
        results: dict[int, Tensor] = {}
        if packed:
            sums = self._comm.all_reduce(torch.stack(packed), "sum")
            if self._on_host and sums[-1] > 0:
                return False
            for i, total in zip(added, sums.unbind(), strict=False):
                results[i] = total / self._comm.world_size if agreed[i][1] == "mean" else total
        for kind in ("min", "max"):
            chosen = [i for i, row in enumerate(agreed) if row[1] == kind and not row[2]]
            if chosen:
                extremes = self._comm.all_reduce(torch.stack([self._to_pack(values[i]) for i in chosen]), kind)
                results.update(zip(chosen, extremes.unbind(), strict=True))
        for i, value in results.items():
            local = pending[i].step_value
            assert local is not None
            pending[i].step_value = value.to(local.dtype)
        for entry in pending:
            if entry.group is not None:
                entry.step_value = self._comm.all_reduce(entry.step_value, entry.reduction.value, group=entry.group)
        return True

    def _to_pack(self, value: Tensor | None) -> Tensor:
        if value is None:
            return torch.zeros((), dtype=self._dtype, device=self._device)
        return value.to(self._device, self._dtype)
