"""What each operator costs on the CPU and the GPU, by torch.profiler."""

import contextlib
import inspect
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn
from leyden.base.registry import did_you_mean
from leyden.base.states import TrainerFn
from leyden.profilers.profiler import Profiler

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["PyTorchProfiler", "RegisterRecordFunction"]

# The default schedule: skip a step, warm up for one, record three.
_WAIT, _WARMUP, _ACTIVE = 1, 1, 3
_BATCHES = {"training_step": "training", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


class RegisterRecordFunction:
    """Context in which the forward pass of each submodule has a label in the trace.

    Args:
        model: The module.

    Example:
        ``with RegisterRecordFunction(model), torch.profiler.profile(): model(batch)``
    """

    def __init__(self, model: "Module") -> None:
        self._model = model
        self._open: dict[str, list[Any]] = {}
        self._handles: list[Any] = []

    def _begin(self, label: str, *_: Any) -> None:
        record = record_function(label)
        record.__enter__()
        self._open.setdefault(label, []).append(record)

    def _end(self, label: str, *_: Any) -> None:
        if self._open.get(label):
            self._open[label].pop().__exit__(None, None, None)

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if not name:
                continue
            # The form that the TensorBoard plug-in of torch.profiler knows.
            label = f"[pl][module]{type(module).__module__}.{type(module).__name__}: {name}"
            self._handles.append(module.register_forward_pre_hook(partial(self._begin, label)))
            self._handles.append(module.register_forward_hook(partial(self._end, label)))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Schedule:
    """Counts the steps of each kind apart, so that every kind is recorded once.

    Args:
        schedule: Number of the step -> action.
        too_short: Whether a kind has too few steps for the schedule: then all of it is recorded.

    Attributes:
        kind: The kind of the step that has just ended.
        owner: The kind that is being recorded.
        complete: The kind whose recording is complete and not taken yet.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction], too_short: Callable[[str], bool]) -> None:
        self._schedule = schedule
        self._too_short = too_short
        self._counts: Counter[str] = Counter()
        self._finished: set[str] = set()
        self._all = False
        self._last = ProfilerAction.NONE
        self.kind: str | None = None
        self.owner: str | None = None
        self.complete: str | None = None

    def __call__(self, step: int) -> ProfilerAction:
        kind = self.kind
        if kind is None:  # before the first step
            return ProfilerAction.NONE
        if self._last is ProfilerAction.WARMUP and kind != self.owner:
            return self._last  # costs nothing until the owner's steps go on
        if self._last is ProfilerAction.RECORD and kind != self.owner and not self._all:
            # Training goes on in the middle of a recorded validation, or the other way round: it may be long.
            self._last = ProfilerAction.RECORD_AND_SAVE
        else:
            self._last = self._next(kind)
            if self._last is not ProfilerAction.NONE:
                self.owner = kind
        if self._last is ProfilerAction.RECORD_AND_SAVE and self.owner is not None:
            self._finished.add(self.owner)
            self.complete = self.owner
        return self._last

    def _next(self, kind: str) -> ProfilerAction:
        self._counts[kind] += 1
        if not self._all and self._counts[kind] == 1 and self._too_short(kind):
            self._all = True
        if self._all:
            return ProfilerAction.RECORD
        return ProfilerAction.NONE if kind in self._finished else self._schedule(self._counts[kind])

    def taken(self) -> str:
        """The kind of the recording that is handed out now."""
        kind, self.complete = self.complete or self.owner, None
        return "run" if kind is None or self._all else kind


class PyTorchProfiler(Profiler):
    """Cost of each operator, as a table and as traces for Chrome or Perfetto.

    By default, of each kind of step (training, validation, test, prediction) one is skipped, one warms up and three
    are recorded; of a run with fewer, all after the first. The rest of the run is not slowed down.

    Args:
        dirpath: Folder for report and traces; None: the logger's folder.
        filename: Name of the report without ``.txt``; None: it is logged instead.
        group_by_input_shapes: Whether calls with other shapes are counted apart; needs ``record_shapes=True``.
        emit_nvtx: Whether to mark operators for nvprof or nsys instead of recording them.
        export_to_chrome: Whether to write a trace per recording.
        row_limit: Rows of the table; -1 for all.
        sort_by_key: Column to sort by; default: total time on the GPU if there is one, else on the CPU.
        record_module_names: Whether submodules are labelled in the trace.
        table_kwargs: More arguments of the table.
        **profiler_kwargs: For `torch.profiler.profile`; also ``export_to_flame_graph`` and its ``metric``.

    Raises:
        MisconfigurationException: For another ``sort_by_key``, or a ``schedule`` that is none.
        KeyError: For other ``table_kwargs``.

    Example:
        ``Trainer(profiler=PyTorchProfiler(filename="ops", profile_memory=True))``
    """

    STEP_FUNCTIONS = frozenset(_BATCHES)
    AVAILABLE_SORT_KEYS = frozenset(
        {
            "cpu_time",
            "cuda_time",
            "cpu_time_total",
            "cuda_time_total",
            "cpu_memory_usage",
            "cuda_memory_usage",
            "self_cpu_memory_usage",
            "self_cuda_memory_usage",
            "count",
        }
    )

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self._group_by_input_shapes = group_by_input_shapes and profiler_kwargs.get("record_shapes", False)
        self._emit_nvtx = emit_nvtx
        self._export_to_chrome = export_to_chrome
        self._export_to_flame_graph = profiler_kwargs.pop("export_to_flame_graph", False)
        self._metric = profiler_kwargs.pop("metric", "self_cpu_time_total")
        self._row_limit = row_limit
        self._record_module_names = record_module_names
        self._table_kwargs = table_kwargs or {}
        self._user_schedule = profiler_kwargs.pop("schedule", None)
        self._user_trace_ready = profiler_kwargs.pop("on_trace_ready", None)
        self._profiler_kwargs = profiler_kwargs
        activities = list(profiler_kwargs.get("activities") or self._default_activities())
        profiler_kwargs["activities"] = activities
        if self._export_to_flame_graph:
            profiler_kwargs["with_stack"] = True
        on_gpu = ProfilerActivity.CUDA in activities
        self._sort_by_key = sort_by_key or ("cuda_time_total" if on_gpu else "cpu_time_total")
        self._check_arguments()
        # The Trainer sets it: names of submodules and numbers of batches come from it.
        self._lightning_module: Any = None
        self.profiler: Any = None
        self._schedule: _Schedule | None = None
        self._contexts = contextlib.ExitStack()
        self._recording: dict[str, Any] = {}
        self._tables: list[tuple[str, str]] = []

    def _check_arguments(self) -> None:
        if self._sort_by_key not in self.AVAILABLE_SORT_KEYS:
            raise MisconfigurationException(
                f"PyTorchProfiler(sort_by_key={self._sort_by_key!r}):"
                f" {did_you_mean(self._sort_by_key, self.AVAILABLE_SORT_KEYS)}"
            )
        if self._user_schedule is not None:
            if not callable(self._user_schedule):
                raise MisconfigurationException(
                    f"PyTorchProfiler(schedule={self._user_schedule!r}) must be a function,"
                    " such as torch.profiler.schedule(wait=1, warmup=1, active=3) returns"
                )
            action = self._user_schedule(0)
            if not isinstance(action, ProfilerAction):
                raise MisconfigurationException(
                    f"PyTorchProfiler(schedule=...) must return a torch.profiler.ProfilerAction, not {action!r}"
                )
        from torch.autograd.profiler_util import EventList

        known = set(inspect.signature(EventList.table).parameters) - {"self", "sort_by", "row_limit"}
        for key in self._table_kwargs:
            if key not in known:
                raise KeyError(
                    f"PyTorchProfiler(table_kwargs={{{key!r}: ...}}): {did_you_mean(key, known)}"
                    " (sort_by and row_limit have arguments of their own)"
                )

    @staticmethod
    def _default_activities() -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]

    def _too_short(self, kind: str) -> bool:
        """Whether this run has too few steps of a kind for the default schedule."""
        trainer = getattr(self._lightning_module, "_trainer", None)
        if self._user_schedule is not None or trainer is None:
            return False
        batches = getattr(trainer, f"num_{_BATCHES[kind]}_batches")
        total = sum(batches) if isinstance(batches, list) else batches
        if trainer.state.fn == TrainerFn.FITTING:
            epochs = trainer.max_epochs
            total *= epochs if epochs is not None and epochs > 0 else math.inf
        return total < _WAIT + _WARMUP + _ACTIVE

    def start(self, action_name: str) -> None:
        """An action begins; the first one starts the profiler."""
        if self.profiler is None:
            self._begin()
        if action_name not in self._recording:
            # The form that the TensorBoard plug-in of torch.profiler knows.
            record = record_function("[pl][profile]" + action_name)
            record.__enter__()
            self._recording[action_name] = record

    def _begin(self) -> None:
        self._contexts = contextlib.ExitStack()
        if self._emit_nvtx:
            self._contexts.enter_context(torch.cuda.profiler.profile())
            self.profiler = self._contexts.enter_context(
                torch.autograd.profiler.emit_nvtx(record_shapes=self._profiler_kwargs.get("record_shapes", False))
            )
        else:
            default = torch.profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE)
            self._schedule = _Schedule(self._user_schedule or default, self._too_short)
            self.profiler = self._contexts.enter_context(
                torch.profiler.profile(
                    schedule=self._schedule, on_trace_ready=self._trace_ready, **self._profiler_kwargs
                )
            )
        if self._lightning_module is not None and self._record_module_names:
            self._contexts.enter_context(RegisterRecordFunction(self._lightning_module))

    def stop(self, action_name: str) -> None:
        """An action ends; one that is a step advances the schedule."""
        record = self._recording.pop(action_name, None)
        if record is not None:
            record.__exit__(None, None, None)
        kind = action_name.rpartition(".")[2]
        if self._schedule is None or kind not in self.STEP_FUNCTIONS or self._in_sanity_check():
            return
        self._schedule.kind = kind
        with warnings.catch_warnings():
            # Each recording is taken when it is complete, so that none is lost to the next one.
            warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
            self.profiler.step()

    def _in_sanity_check(self) -> bool:
        trainer = getattr(self._lightning_module, "_trainer", None)
        return trainer is not None and trainer.sanity_checking

    def _trace_ready(self, profiler: Any) -> None:
        """A recording is complete: its table is kept, its traces are written."""
        kind = "run" if self._schedule is None else self._schedule.taken()
        averages = profiler.key_averages(group_by_input_shape=self._group_by_input_shapes)
        table = averages.table(sort_by=self._sort_by_key, row_limit=self._row_limit, **self._table_kwargs)
        self._tables.append((kind, table))
        if self._user_trace_ready is not None:
            self._user_trace_ready(profiler)
            return
        if not (self._export_to_chrome or self._export_to_flame_graph):
            return
        if self.dirpath is None:
            rank_zero_warn("PyTorchProfiler wrote no trace: pass dirpath, or use a logger that has a folder")
            return
        folder = os.fspath(self.dirpath)
        if self._export_to_chrome:
            name = self._prepare_filename(action_name=kind, extension="")
            torch.profiler.tensorboard_trace_handler(folder, name)(profiler)
        if self._export_to_flame_graph:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, self._prepare_filename(action_name=kind, extension=".stack"))
            profiler.export_stacks(path, metric=self._metric)

    def summary(self) -> str:
        """A table per recording; ends the profiler."""
        self._end()
        if not self._tables:
            return ""
        parts = [self._title()]
        for kind, table in self._tables:
            rank = "" if self._local_rank is None else f" rank: {self._local_rank}"
            parts += [f"Profile stats for: {kind}{rank}", table]
        return "\n".join(parts)

    def _end(self) -> None:
        for record in reversed(list(self._recording.values())):
            record.__exit__(None, None, None)
        self._recording.clear()
        self._contexts.close()
        self._contexts = contextlib.ExitStack()
        self.profiler = self._schedule = None

    def teardown(self, stage: str | None) -> None:
        """Ends the profiler and forgets what it recorded."""
        self._end()
        self._tables.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "profiler": None,
            "_schedule": None,
            "_contexts": contextlib.ExitStack(),
            "_recording": {},
            "_lightning_module": None,
        }
