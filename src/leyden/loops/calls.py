"""Hooks compiled to flat tuples: only what somebody overrode, bound once, called without a look-up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from leyden.core.callback import Callback, Checkpoint
from leyden.core.hooks import HOOKS, is_overridden, is_untouched
from leyden.core.module import LightningModule
from leyden.strategies.base import Strategy

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = [
    "Calls",
    "call_clocked",
    "compile_calls",
    "module_overrides",
    "profiled_reads",
    "profiled_step",
    "profiler_spans",
]

# Compiled hooks: those that the loops only notify. The rest (setup, saving, exceptions, replacing hooks) are rare or
# have rules of their own, and are called by name where they belong.
_COMPILED = tuple(
    hook.name
    for hook in HOOKS.values()
    if hook.kind == "notify"
    and (hook.callback or hook.strategy)
    and hook.name not in ("setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint")
)


class Calls:
    """One tuple of bound callables per hook, in the order callbacks, module, strategy.

    Three hooks are kept in parts. Callbacks that go by the clock are apart in ``clocked_batch_end``, with their
    ``on_train_batch_end``. Two have an order of their own: the module's ``on_train_batch_start`` may end the
    epoch by returning -1, and at an epoch's end callbacks that monitor a metric run after the module.
    """

    __slots__ = (
        *_COMPILED,
        "clocked_batch_end",
        "module_train_batch_start",
        "monitors_train_epoch_end",
        "strategy_train_batch_start",
    )

    if TYPE_CHECKING:  # the slots of compiled hooks

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def has_batch_start(self) -> bool:
        return bool(
            self.on_train_batch_start or self.module_train_batch_start is not None or self.strategy_train_batch_start
        )

    def run(self, name: str, metrics: Any, *args: Any) -> None:
        """Calls a hook that is not on the per-batch path; ``metrics`` learns its name for `self.log`."""
        calls = getattr(self, name)
        if calls:
            if metrics is not None:
                metrics.current_hook = name
            for call in calls:
                call(*args)


def module_overrides(name: str, module: Any) -> bool:
    """Whether the user's module defines this hook or step itself."""
    return is_overridden(name, module, LightningModule)


def compile_calls(trainer: Trainer) -> Calls:
    """Looks up all hooks of the trainer's callbacks, module and strategy as they are now.

    Done at the start of a run and of each epoch, because callbacks may come and go in between.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    profiled = profiler_spans(trainer)
    calls = Calls()
    monitors: list[Any] = []
    clocked: list[tuple[Callback, Any]] = []
    for name in _COMPILED:
        found: list[Any] = []
        for callback in trainer.callbacks:
            idle = name in callback._idle_hooks
            if HOOKS[name].callback and not idle and not is_untouched(name, callback, Callback):
                bound = functools.partial(getattr(callback, name), trainer, module)
                bound = profiled(f"[Callback]{callback.state_key}.{name}", bound)
                if name == "on_train_epoch_end" and _monitors(callback):
                    monitors.append(bound)
                elif name == "on_train_batch_end" and callback._wake_up is not None:
                    clocked.append((callback, bound))
                else:
                    found.append(bound)
        own = ()
        if HOOKS[name].module and not is_untouched(name, module, LightningModule):
            own = (profiled(f"[LightningModule]{type(module).__name__}.{name}", getattr(module, name)),)
        theirs = ()
        if HOOKS[name].strategy and not is_untouched(name, strategy, Strategy):
            theirs = (profiled(f"[Strategy]{type(strategy).__name__}.{name}", getattr(strategy, name)),)
        if name == "on_train_batch_start":
            calls.on_train_batch_start = tuple(found)
            calls.module_train_batch_start = own[0] if own else None
            calls.strategy_train_batch_start = theirs
        else:
            setattr(calls, name, (*found, *own, *theirs))
    calls.monitors_train_epoch_end = tuple(monitors)
    calls.clocked_batch_end = tuple(clocked)
    return calls


def _monitors(callback: Callback) -> bool:
    # EarlyStopping is known by what it has, so that this layer needs no callback of its own layer.
    return isinstance(callback, Checkpoint) or getattr(callback, "monitors_metric", False)


def profiler_spans(trainer: Trainer) -> Callable[[str, Callable], Callable]:
    """Returns a function that wraps a callable in a profiler span; without a profiler it wraps nothing."""
    profiler = trainer.active_profiler
    if profiler is None:
        return lambda name, call: call

    def wrap(name: str, call: Callable) -> Callable:
        @functools.wraps(call)
        def span(*args: Any, **kwargs: Any) -> Any:
            with profiler.profile(name):
                return call(*args, **kwargs)

        return span

    return wrap


def profiled_step(trainer: Trainer, name: str) -> Callable:
    """The strategy's callable for ``training_step`` and its like, in a profiler span where a profiler is on."""
    strategy = trainer.strategy
    return profiler_spans(trainer)(f"[Strategy]{type(strategy).__name__}.{name}", strategy.step_callable(name))


def profiled_reads(trainer: Trainer, name: str, batches: Iterable) -> Iterable:
    """The same batches, the wait for each in a profiler span where a profiler is on."""
    profiler = trainer.active_profiler
    if profiler is None:
        return batches

    def timed() -> Iterator:
        iterator = iter(batches)
        end = object()
        while True:
            with profiler.profile(name):
                item = next(iterator, end)
            if item is end:
                return
            yield item

    return timed()


def call_clocked(clocked: tuple[tuple[Any, Any], ...], *args: Any) -> float:
    """Calls the callbacks that go by the clock; returns when the next of them wants to be called."""
    for _, call in clocked:
        call(*args)
    return min(callback._wake_up for callback, _ in clocked)
