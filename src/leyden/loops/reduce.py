"""One logged metric, and how many of them are reduced over ranks in one go."""

import builtins
import warnings
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leyden.base.errors import MisconfigurationException

__all__ = ["Entry", "Reduction", "missing_message", "reduce_epoch", "require_same"]


class Reduction(Enum):
    """How the values of an epoch become one."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"

    @classmethod
    def parse(cls, name: str, reduce_fx: Any) -> "Reduction":
        """Reads ``reduce_fx`` of `self.log`: a name, or the torch or builtin function of that name."""
        found = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        if found is None:
            raise MisconfigurationException(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): only 'mean', 'sum', 'min' and 'max' can be reduced; "
                "for anything else log a torchmetrics.Metric"
            )
        return found

    @property
    def neutral(self) -> float:
        return {"min": float("inf"), "max": float("-inf")}.get(self.value, 0.0)


_REDUCTIONS: dict[Any, Reduction] = {
    "mean": Reduction.MEAN,
    "avg": Reduction.MEAN,
    torch.mean: Reduction.MEAN,
    "sum": Reduction.SUM,
    torch.sum: Reduction.SUM,
    builtins.sum: Reduction.SUM,
    "min": Reduction.MIN,
    torch.min: Reduction.MIN,
    builtins.min: Reduction.MIN,
    "max": Reduction.MAX,
    torch.max: Reduction.MAX,
    builtins.max: Reduction.MAX,
}


class Entry:
    """The values under one (hook, name, loader), and the settings they were logged with."""

    __slots__ = (
        "active",
        "attribute",
        "computed",
        "dataloader",
        "epoch_name",
        "flags",
        "group",
        "hook",
        "label",
        "local",
        "logger",
        "metric",
        "on_epoch",
        "on_step",
        "pending",
        "plain_name",
        "prog_bar",
        "reduction",
        "step_name",
        "step_value",
        "sync_dist",
        "sync_step",
        "total",
        "weight",
        "weighted",
    )

    def __init__(
        self,
        *,
        name: str,
        suffix: str,
        hook: str,
        dataloader: int | None,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        reduction: Reduction,
        sync_dist: bool,
        local: bool,
        group: Any,
        flags: tuple,
    ) -> None:
        forked = on_step and on_epoch
        self.plain_name = name + suffix
        self.step_name = f"{name}_step{suffix}" if forked else self.plain_name
        self.epoch_name = f"{name}_epoch{suffix}" if forked else self.plain_name
        self.hook = hook
        self.label = f"{hook}.{self.plain_name}"
        self.dataloader = dataloader
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.prog_bar = prog_bar
        self.logger = logger
        self.reduction = reduction
        self.weighted = reduction is Reduction.MEAN
        self.sync_dist = sync_dist
        self.local = local  # rank_zero_only: never reduced
        self.group = group
        self.flags = flags
        self.sync_step = False
        self.pending = False
        self.active = False
        self.metric: Any = None  # a torchmetrics object, kept by reference
        self.attribute = ""
        self.step_value: Tensor | None = None
        self.total: Tensor | None = None
        self.weight: float = 0
        self.computed: Tensor | None = None

    @classmethod
    def of_other_rank(cls, row: "Row", value: Tensor, dataloader: int | None, module: Any) -> "Entry":
        """The epoch value of something that this rank did not log: every rank shows the same names."""
        hook, _, name = row.label.partition(".")
        entry = cls(
            name=name,
            suffix="",
            hook=hook,
            dataloader=dataloader,
            on_step=False,
            on_epoch=True,
            prog_bar=row.prog_bar,
            logger=row.logger,
            reduction=Reduction(row.kind),
            sync_dist=row.required,
            local=False,
            group=None,
            flags=(),
        )
        entry.epoch_name = row.epoch_name
        entry.active = True
        entry.computed = value
        if row.attribute:
            entry.metric = module.get_submodule(row.attribute)  # to be reset with the rest
        return entry

    def accumulate(self, value: Tensor, weight: float) -> None:
        """Adds one value (a 0-d float tensor that nobody else holds or changes) to the epoch."""
        self.computed = None
        total = self.total
        if self.weighted:
            self.weight += weight
            if total is None:
                self.total = value * weight
            elif total.dtype != value.dtype or total.device != value.device:
                self.total = total.to(torch.promote_types(total.dtype, value.dtype)).to(value.device) + value * weight
            else:
                total.add_(value, alpha=weight)
        elif total is None:
            self.total = value.clone()
        elif self.reduction is Reduction.SUM:
            self.total = total + value
        else:
            self.total = torch.minimum(total, value) if self.reduction is Reduction.MIN else torch.maximum(total, value)

    def current(self, in_step: bool, distributed: bool) -> Tensor | None:
        """The value to show now: the step's, or the epoch's. Never communicates."""
        if in_step:
            if not self.on_step:
                return None
            return self.step_value if self.metric is None else _step_value_of(self.metric)
        if not self.on_epoch:
            return None
        if self.computed is None and not (distributed and self.metric is not None):
            self.compute()
        return self.computed

    def compute(self) -> None:
        """Sets ``computed`` from this rank's values (torchmetrics objects reduce over ranks by themselves)."""
        if self.metric is not None:
            self.computed = _checked(self.metric.compute(), self)
        elif self.total is not None:
            self.computed = self.total / self.weight if self.weighted else self.total.clone()

    def names(self, in_step: bool) -> tuple[str, str]:
        return self.plain_name, self.step_name if in_step else self.epoch_name

    def reset(self) -> None:
        self.active = False
        self.pending = False
        self.step_value = self.total = self.computed = None
        self.weight = 0
        if self.metric is not None:
            self.metric.reset()


def _step_value_of(metric: Any) -> Tensor | None:
    value = metric._forward_cache  # what the last forward() returned; None after a bare update()
    return value.detach() if isinstance(value, Tensor) else None


def _checked(value: Any, entry: Entry) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"self.log({entry.plain_name!r}, metric): {type(entry.metric).__name__}.compute() must return one tensor, "
            f"got {type(value).__name__}; log the parts of it by self.log_dict(metric.compute()) at the epoch's end"
        )
    return value.detach()


def require_same(schemas: Sequence[Sequence[str]]) -> None:
    """Raises a MisconfigurationException that names what only some ranks logged; ``schemas``: labels, by rank."""
    everywhere = set(schemas[0]).intersection(*schemas[1:])
    partial = sorted(set().union(*schemas) - everywhere)
    if partial:
        raise MisconfigurationException(missing_message(partial, schemas))


def missing_message(partial: Sequence[str], schemas: Sequence[Sequence[str]]) -> str:
    """Says which ranks logged, and which did not log, the labels in ``partial``."""
    lines = []
    for label in partial:
        having = [rank for rank, schema in enumerate(schemas) if label in schema]
        lacking = [rank for rank, schema in enumerate(schemas) if label not in schema]
        hook, _, name = label.partition(".")
        lines.append(f"  {name!r} in `{hook}`: logged on ranks {having}, not on ranks {lacking}")
    return (
        "ranks logged different names with sync_dist=True, so they can't be reduced:\n"
        + "\n".join(lines)
        + "\nlog the same names on every rank, or pass rank_zero_only=True for what only rank 0 knows"
    )


class Row(NamedTuple):
    """What a rank tells the others about an entry before they reduce it."""

    label: str
    kind: str
    required: bool  # sync_dist=True
    attribute: str  # of a torchmetrics object, else ""
    grouped: bool
    epoch_name: str
    prog_bar: bool
    logger: bool

    @classmethod
    def of(cls, entry: Entry) -> "Row":
        kind, grouped = entry.reduction.value, entry.group is not None
        shown = (entry.epoch_name, entry.prog_bar, entry.logger)
        return cls(entry.label, kind, entry.sync_dist, entry.attribute, grouped, *shown)


def reduce_epoch(
    entries: Sequence[Entry], module: Any, comm: Any, device: torch.device, batches_seen: int
) -> list[tuple[Row, Tensor]]:
    """Sets ``computed`` of each entry, over all ranks where there are several.

    A rank may lack a name: because it had no batches, or because only some ranks logged it. Values are then reduced
    over the ranks that have it, weighted by their batches; with ``sync_dist=True`` that is an error, unless the rank
    ran no batch at all.

    Returns:
        What only other ranks logged, with its value.
    """
    fresh = [entry for entry in entries if entry.computed is None]
    if comm is None:
        for entry in fresh:
            entry.compute()
        return []
    for entry in [e for e in fresh if e.local]:
        entry.compute()
    shared = {entry.label: entry for entry in fresh if not entry.local}
    everyone = comm.all_gather_object(([Row.of(entry) for entry in shared.values()], batches_seen))
    _check_required(everyone)
    union = sorted({row for rows, _ in everyone for row in rows})
    for row in [row for row in union if row.grouped and not row.attribute]:
        if row.label in shared:
            _reduce_in_group(shared[row.label], comm)
    elsewhere = []
    for row in [row for row in union if row.attribute]:
        entry = shared.get(row.label)
        # The metric's own reduction needs every rank to take part: one that saw no batch, and one whose metric still
        # holds the result for another loader.
        metric = module.get_submodule(row.attribute) if entry is None else entry.metric
        metric._computed = None
        if entry is not None:
            entry.compute()
        else:
            elsewhere.append((row, _compute_without_data(metric)))
    plain = [row for row in union if not row.attribute and not row.grouped]
    for row, value in zip(plain, _reduce_packed(plain, shared, comm, device), strict=True):
        entry = shared.get(row.label)
        if entry is not None and entry.total is not None:
            entry.computed = value.to(entry.total.dtype)
        else:
            elsewhere.append((row, value.to(torch.float32)))
    return elsewhere


def _compute_without_data(metric: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
        return metric.compute().detach()


def _check_required(everyone: Sequence[tuple[list[Row], int]]) -> None:
    ran = [[row.label for row in rows] for rows, batches in everyone if batches]
    required = {row.label for rows, _ in everyone for row in rows if row.required}
    partial = sorted(label for label in required if any(label not in labels for labels in ran))
    if partial:
        raise MisconfigurationException(missing_message(partial, [[row.label for row in rows] for rows, _ in everyone]))


def _reduce_in_group(entry: Entry, comm: Any) -> None:
    assert entry.total is not None
    if entry.weighted:
        pair = torch.stack([entry.total, torch.as_tensor(entry.weight).to(entry.total)])
        pair = comm.all_reduce(pair, "sum", group=entry.group)
        entry.computed = pair[0] / pair[1]
    else:
        entry.computed = comm.all_reduce(entry.total.clone(), entry.reduction.value, group=entry.group)


def _reduce_packed(rows: Sequence[Row], shared: dict[str, Entry], comm: Any, device: torch.device) -> list[Tensor]:
    """The value of each row: one all-reduce for sums and means together, one for minima, one for maxima."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    totals = [None if (entry := shared.get(row.label)) is None else entry.total for row in rows]
    values: dict[int, Tensor] = {}
    added = [i for i, row in enumerate(rows) if row.kind in ("mean", "sum")]
    if added:
        pairs = torch.zeros(len(added), 2, dtype=dtype, device=device)
        for place, i in enumerate(added):
            total = totals[i]
            if total is not None:
                pairs[place, 0] = total
                pairs[place, 1] = shared[rows[i].label].weight
        for i, (total, weight) in zip(added, comm.all_reduce(pairs, "sum").unbind(), strict=True):
            values[i] = total / weight if rows[i].kind == "mean" else total
    for kind in ("min", "max"):
        chosen = [i for i, row in enumerate(rows) if row.kind == kind]
        if chosen:
            extremes = torch.full((len(chosen),), Reduction(kind).neutral, dtype=dtype, device=device)
            for place, i in enumerate(chosen):
                total = totals[i]
                if total is not None:
                    extremes[place] = total
            values.update(zip(chosen, comm.all_reduce(extremes, kind).unbind(), strict=True))
    return [values[i] for i in range(len(rows))]
