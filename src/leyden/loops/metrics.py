"""What `self.log` does: keep values, reduce them once per step or epoch, show them as plain dictionaries.

`MetricLog.log` only detaches and stores. It never waits for a device and never communicates. The loop closes a step
(at most one packed all-reduce per kind of reduction, and only if a metric asked for ``sync_dist`` on the step) and
closes an epoch (the same for everything that was accumulated). The views that users read never communicate.
"""

import sys
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from leyden.base.errors import MisconfigurationException
from leyden.base.log import warn_once
from leyden.base.tree import extract_batch_size, to_scalars
from leyden.core.hooks import log_levels
from leyden.loops.reduce import Entry, Reduction, reduce_epoch
from leyden.loops.step_sync import StepSync

__all__ = ["BarebonesLog", "MetricLog", "MetricViews"]

_FLOATS = (torch.float32, torch.float64)


class MetricViews:
    """The three dictionaries that users read. They outlive epochs; all logs of a trainer write into one."""

    __slots__ = ("callback", "logged", "progress_bar")

    def __init__(self) -> None:
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress_bar: dict[str, Tensor] = {}

    def clear(self) -> None:
        self.callback, self.logged, self.progress_bar = {}, {}, {}

    def progress_bar_scalars(self) -> dict[str, float]:
        return to_scalars(self.progress_bar)

    def to_cpu(self) -> None:
        """Frees device memory after a run."""
        for view in (self.callback, self.logged, self.progress_bar):
            for name, value in view.items():
                view[name] = value.cpu()


class MetricLog:
    """The metrics of one loop (training, or one kind of evaluation).

    Args:
        module: Where torchmetrics attributes are looked up.
        views: The dictionaries to publish into.
        training: Whether step values may appear in ``callback_metrics``.
        comm: The ranks to reduce over, `leyden.dist.comm.Comm`-like; None for one process.
        device: Where packed reductions happen.
    """

    __slots__ = (
        "_comm",
        "_device",
        "_elsewhere",
        "_entries",
        "_metric_names",
        "_module",
        "_seen_before",
        "_step_sync",
        "_training",
        "_views",
        "batch",
        "batch_size",
        "batches_seen",
        "current_hook",
        "dataloader",
        "in_step",
        "must_sync",
        "pending",
        "step_sync",
    )

    def __init__(self, module: Any, views: MetricViews, training: bool, comm: Any, device: torch.device) -> None:
        self._module = module
        self._views = views
        self._training = training
        self._comm = comm
        self._device = device
        self._entries: dict[tuple[str, str, int | None], Entry] = {}
        self._metric_names: dict[int, str] | None = None
        self._step_sync = None if comm is None else StepSync(comm, device)
        self._elsewhere: dict[str, Entry] = {}  # epoch values that only other ranks logged, by label
        self.current_hook: str | None = None
        self.dataloader: int | None = None  # index of the evaluation loader, when there are several
        self.in_step = False  # between a batch's start and the end of the batches: views show step values
        self.batch: Any = None
        self.batch_size: int | None = None
        self.batches_seen = 0
        self._seen_before = 0  # the running loader
        self.step_sync = True  # False: ranks run different numbers of batches, so steps can't be reduced over them
        self.pending: list[Entry] = []  # step values that wait for their all-reduce
        self.must_sync = comm is not None  # the loop has to call `close_step`

    # ---- writing -----------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Stores one value; the arguments are those of `LightningModule.log`."""
        key = (self.current_hook, name, self.dataloader if add_dataloader_idx else None)
        flags = (
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            sync_dist,
            sync_dist_group,
            metric_attribute,
            rank_zero_only,
            self.dataloader,
        )
        entry = self._entries.get(key)  # pyright: ignore[reportArgumentType]
        if entry is None:
            entry = self._register(key, flags, value)
        elif entry.flags != flags:
            raise MisconfigurationException(
                f"self.log({name!r}, ...) was called twice in `{self.current_hook}` with different arguments; "
                "log under two names, or pass the same arguments each time"
            )
        if entry.metric is not None:
            entry.metric = value
            entry.active, entry.computed = True, None
            return
        if type(value) is not Tensor or value.dim() != 0 or value.dtype not in _FLOATS:
            value = self._as_scalar(name, value)
        weight = 1
        if entry.on_epoch and entry.weighted:
            weight = batch_size if batch_size is not None else self._current_batch_size()
        # A copy, because the user may go on to change the tensor in place (`loss += penalty`, counters).
        value = value.clone() if enable_graph else value.detach().clone()
        entry.active = True
        if entry.on_step:
            entry.step_value = value
            if entry.sync_step and self.step_sync and not entry.pending:
                entry.pending = self.must_sync = True
                self.pending.append(entry)
        if entry.on_epoch:
            entry.accumulate(value, weight)

    def _as_scalar(self, name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"self.log({name!r}, ...) got a tensor with {value.numel()} elements (shape "
                    f"{tuple(value.shape)}); log one number: reduce it first, e.g. with .mean()"
                )
            value = value.reshape(())
            if not value.is_floating_point():
                warn_once(
                    f"self.log({name!r}, ...) got a {value.dtype} tensor; it is averaged as float32. "
                    "Call .float() on it yourself to silence this",
                    key=f"log-dtype:{self.current_hook}:{name}",
                )
            return value if value.dtype in _FLOATS else value.to(torch.float32)
        dtype = torch.get_default_dtype()
        return torch.tensor(float(value), dtype=dtype if dtype in _FLOATS else torch.float32)

    def _current_batch_size(self) -> int:
        if self.batch_size is None:
            self.batch_size = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.batch_size

    # ---- registration: everything that is checked once per name -------------------------------------------------

    def _register(self, key: Any, flags: tuple, value: Any) -> Entry:
        hook, name, _ = key
        prog_bar, logger, on_step, on_epoch, reduce_fx, _, sync_dist, group, attribute, zero_only, _ = flags
        if not isinstance(name, str):
            raise TypeError(f"self.log({name!r}, ...): the name must be a str, got {type(name).__name__}")
        on_step, on_epoch = _resolve_step_and_epoch(hook, name, on_step, on_epoch)
        if "/dataloader_idx_" in name:
            raise MisconfigurationException(
                f"self.log({name!r}, ...): names may not hold '/dataloader_idx_', it is added where there are several "
                "loaders; to choose the whole name, pass add_dataloader_idx=False"
            )
        metric = value if _is_torchmetric(value) else None
        if metric is None and not isinstance(value, (Tensor, Number)):
            inner = " (log_dict takes one level of names)" if isinstance(value, dict) else ""
            raise ValueError(
                f"self.log({name!r}, {value!r}): expected a number, a tensor with one element or a "
                f"torchmetrics.Metric, got {type(value).__name__}{inner}"
            )
        entry = Entry(
            name=name,
            suffix="" if self.dataloader is None or key[2] is None else f"/dataloader_idx_{self.dataloader}",
            hook=hook,
            dataloader=self.dataloader,
            on_step=on_step,
            on_epoch=on_epoch,
            prog_bar=prog_bar,
            logger=True if logger is None else logger,
            reduction=Reduction.parse(name, reduce_fx),
            sync_dist=sync_dist and not zero_only,
            local=zero_only,
            group=group,
            flags=flags,
        )
        if metric is not None:
            entry.metric = metric
            entry.attribute = attribute or self._attribute_of(name, metric)
        entry.sync_step = entry.sync_dist and on_step and metric is None and self._comm is not None
        self._entries[key] = entry
        return entry

    def _attribute_of(self, name: str, metric: Any) -> str:
        if self._metric_names is None or id(metric) not in self._metric_names:
            self._metric_names = {id(m): path for path, m in self._module.named_modules() if _is_torchmetric(m)}
        attribute = self._metric_names.get(id(metric))
        if attribute is None:
            raise MisconfigurationException(
                f"self.log({name!r}, ...) got a {type(metric).__name__} that is not an attribute of "
                f"{type(self._module).__name__}; set it in __init__ (self.acc = ...), or pass "
                f"metric_attribute with one of {sorted(self._metric_names.values())}"
            )
        return attribute

    # ---- the loop's side -----------------------------------------------------------------------------------------

    def start_batch(self, batch: Any, dataloader: int | None = None) -> None:
        """A batch begins: batch sizes are read from it until the next call."""
        self.batch = batch
        self.batch_size = None
        if dataloader != self.dataloader:
            self.dataloader = dataloader
            self.must_sync = self._step_sync is not None and self.step_sync
        self.in_step = True
        self.batches_seen += 1

    def sync_steps(self, even: bool) -> None:
        """Whether step values can be reduced over ranks: only where all have the same number of batches."""
        self.step_sync = even
        self.must_sync = self._step_sync is not None and even

    def close_step(self, hooks: bool = False) -> None:
        """Reduces the step values that asked for it, all in one collective per kind.

        All ranks call it together, where ``must_sync`` is true: after the step, and with ``hooks=True`` once more
        after the hooks of the batch's end, which may read the former and log more.
        """
        if self._step_sync is not None and self.step_sync:
            self._step_sync.reduce(self.pending, (hooks, self.dataloader))
            self.must_sync = self._step_sync.needed((False, self.dataloader), (True, self.dataloader))
        else:
            self.must_sync = False
        for entry in self.pending:
            entry.pending = False
        self.pending.clear()

    def close_epoch(self) -> None:
        """Computes the epoch values of all that was logged since the last call. All ranks call it together."""
        self.in_step = False
        self.batch = None
        self.batch_size = None
        entries = [e for e in self._entries.values() if e.active and e.on_epoch and e.dataloader == self.dataloader]
        seen = self.batches_seen
        if self.dataloader is not None:  # of this loader
            seen, self._seen_before = seen - self._seen_before, seen
        for row, value in reduce_epoch(entries, self._module, self._comm, self._device, seen):
            self._elsewhere[row.label] = Entry.of_other_rank(row, value, self.dataloader, self._module)

    def reset(self) -> None:
        """Forgets all values; names and their settings stay."""
        for entry in (*self._entries.values(), *self._elsewhere.values()):
            if entry.active:
                entry.reset()
        self.in_step = False
        self.batches_seen = self._seen_before = 0
        self.dataloader = None
        self.pending.clear()
        self._elsewhere.clear()

    def publish(self) -> dict[str, Tensor]:
        """Writes the current values into the views and returns those meant for loggers."""
        views, in_step = self._views, self.in_step
        logged = {}
        for entry in (*self._entries.values(), *self._elsewhere.values()):
            if not entry.active or entry.dataloader != self.dataloader:
                continue
            value = entry.current(in_step, distributed=self._comm is not None)
            if value is None:
                continue
            name, forked = entry.names(in_step)
            if entry.logger:
                logged[forked] = value
            if self._training or (entry.on_epoch and not in_step):
                views.callback[name] = value
                views.callback[forked] = value
            if entry.prog_bar:
                views.progress_bar[forked] = value
        views.logged.update(logged)
        return logged


class BarebonesLog:
    """Stands in for `MetricLog` under ``Trainer(barebones=True)``: says once that nothing is kept."""

    in_step = False
    pending: tuple = ()
    must_sync = False
    batch: Any = None
    current_hook: str | None = None
    dataloader: int | None = None

    def log(self, name: str, *args: Any) -> None:
        warn_once(
            f"self.log({name!r}, ...) does nothing under Trainer(barebones=True); drop barebones=True to keep metrics",
            key="barebones-log",
        )

    batch_size: int | None = None
    batches_seen = 0

    def start_batch(self, batch: Any, dataloader: int | None = None) -> None: ...

    def sync_steps(self, even: bool) -> None: ...

    def close_step(self, hooks: bool = False) -> None: ...

    def close_epoch(self) -> None: ...

    def reset(self) -> None: ...

    def publish(self) -> dict[str, Tensor]:
        return {}


def _is_torchmetric(value: Any) -> bool:
    # Whoever holds a Metric has imported torchmetrics; Leyden never does.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _resolve_step_and_epoch(hook: str | None, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple:
    """Fills the defaults of ``on_step`` and ``on_epoch`` for a hook and refuses what the hook can't do."""
    if hook is None:
        raise MisconfigurationException(
            f"You can't self.log({name!r}, ...) here: no loop is running, so nothing would be reduced or written. "
            "Use self.logger.log_metrics(...), or log inside a step or hook."
        )
    on_step, on_epoch = log_levels(hook, on_step, on_epoch)
    if not on_step and not on_epoch:
        raise MisconfigurationException(
            f"self.log({name!r}, on_step=False, on_epoch=False) keeps nothing; set one of them to True"
        )
    return on_step, on_epoch
