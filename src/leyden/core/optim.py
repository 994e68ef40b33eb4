"""Optimizers and schedulers: from what ``configure_optimizers`` returns to checked lists; the optimizer users step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from leyden.base.errors import MisconfigurationException, raise_all
from leyden.base.log import rank_zero_warn
from leyden.core.hooks import is_overridden

__all__ = ["LRSchedulerConfig", "LightningOptimizer", "NoOptimizer", "configure_optimizers", "grad_clipping"]


@dataclass
class LRSchedulerConfig:
    """A scheduler and when to step it.

    Attributes:
        scheduler: The scheduler.
        name: The name under which `LearningRateMonitor` logs it.
        interval: "epoch" or "step".
        frequency: Step it every so many intervals.
        reduce_on_plateau: It is stepped with the value of ``monitor``.
        monitor: The metric to step it with.
        strict: A missing ``monitor`` is an error; else a warning.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def no_closure() -> None:
    """What an optimizer gets as its closure where the user gave none."""


class LightningOptimizer:
    """The optimizer that users step: as the one inside, but ``step`` goes through precision, hooks and counting.

    It counts as an instance of the class of the optimizer inside, and has its attributes.
    """

    def __init__(self, optimizer: Optimizer, strategy: Any = None) -> None:
        own = self.__dict__  # past __setattr__, which is for the optimizer inside
        own["_optimizer"] = optimizer
        own["_strategy"] = strategy
        own["_on_before_step"] = no_closure
        own["_on_after_step"] = no_closure

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps the optimizer.

        Args:
            closure: Recomputes the loss, with its backward pass; called by the optimizer, perhaps several times.
            **kwargs: Passed on to the optimizer's ``step``.

        Returns:
            What the optimizer's ``step`` returns: usually the result of ``closure``.
        """
        if closure is None:
            closure = no_closure
        elif not callable(closure):
            raise MisconfigurationException(
                f"optimizer.step(closure={closure!r}): the closure must be callable, without arguments"
            )
        self._on_before_step()
        result = self._strategy.optimizer_step(self._optimizer, closure, **kwargs)
        self._on_after_step()
        return result

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """In the ``with`` block only this optimizer's parameters require gradients.

        Args:
            sync_grad: False skips the reduction of gradients over ranks, for all but the last part of an accumulation.
        """
        module = self._strategy.lightning_module
        sync: AbstractContextManager = nullcontext() if sync_grad else self._strategy.no_sync()
        with sync, module.toggled_optimizer(self):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # `step` stays here: a scheduler that wraps it must not make the optimizer inside call back to this one.
        if name in ("_strategy", "_on_before_step", "_on_after_step", "step"):
            self.__dict__[name] = value
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"Lightning{self._optimizer!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a wrapper that is in no run."""
        return LightningOptimizer, (self._optimizer,)

    # isinstance(wrapper, Adam) asks for this when the real type doesn't match.
    __class__ = property(lambda self: type(self._optimizer))  # pyright: ignore


class NoOptimizer(Optimizer):
    """Takes the place of an optimizer where ``configure_optimizers`` returned None: steps nothing, has no state."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Takes nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


_FORMS = """one of
  * optimizer
  * [optimizer, ...]
  * ([optimizer, ...], [scheduler or scheduler dict, ...])
  * {"optimizer": optimizer, "lr_scheduler": scheduler or scheduler dict, "monitor": "metric name"}
    ("lr_scheduler" and "monitor" may be left out)
  * [such a dict, ...]
  * None, to train without an optimizer"""
_SCHEDULER_KEYS = frozenset(field.name for field in fields(LRSchedulerConfig))
_AUTOMATIC_ONLY = ("reduce_on_plateau", "monitor", "strict")

_Problems = list[tuple[type[Exception], str]]


def configure_optimizers(module: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Calls ``module.configure_optimizers()`` and checks what it returns.

    Raises:
        MisconfigurationException: It is not of a known form, or schedulers don't fit. RuntimeError for several
            optimizers in automatic optimisation, TypeError for a scheduler without state; all problems in one
            MisconfigurationException where there are several.
    """
    result = module.configure_optimizers()
    if result is None:
        rank_zero_warn(f"{type(module).__name__}.configure_optimizers() returned None: this run optimizes nothing")
        return [NoOptimizer()], []
    optimizers: list[Any]
    optimizers, schedulers = _split(result)
    problems: _Problems = []
    automatic = module.automatic_optimization
    if automatic and not optimizers:
        rank_zero_warn(
            f"{type(module).__name__}.configure_optimizers() returned {result!r}: this run optimizes nothing"
        )
        optimizers = [NoOptimizer()]
    configs = [
        config for scheduler in schedulers if (config := _scheduler_config(scheduler, automatic, problems)) is not None
    ]
    _check_number(module, optimizers, problems)
    for config in configs:
        _check_scheduler(config, optimizers, module, problems)
    _raise(problems, f"{type(module).__name__}.configure_optimizers()")
    return optimizers, configs


def _is_optimizer(value: Any) -> bool:
    """An `Optimizer`, or something with its interface."""
    return isinstance(value, Optimizer) or all(
        hasattr(value, name) for name in ("step", "param_groups", "defaults", "state", "state_dict", "load_state_dict")
    )


def _split(result: Any) -> tuple[list[Any], list[Any]]:
    """``(optimizers, schedulers)`` from any of the forms."""
    if _is_optimizer(result):
        return [result], []
    if isinstance(result, dict):
        return _from_dicts([result])
    if isinstance(result, (list, tuple)):
        items = list(result)
        if len(items) == 2 and isinstance(items[0], list) and all(map(_is_optimizer, items[0])):
            schedulers = items[1] if isinstance(items[1], list) else [items[1]]
            return items[0], [scheduler for scheduler in schedulers if scheduler is not None]
        if all(isinstance(item, dict) for item in items):
            return _from_dicts(items)
        if all(map(_is_optimizer, items)):
            return items, []
    raise MisconfigurationException(
        f"`configure_optimizers()` returned {_describe(result)}, which is no known form; it should return {_FORMS}"
    )


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_describe, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return type(value).__name__


def _from_dicts(items: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """From dicts with "optimizer", "lr_scheduler", "monitor"; a monitor goes into the scheduler's own dict."""
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    for item in items:
        extra = sorted(map(str, item.keys() - {"optimizer", "lr_scheduler", "monitor"}))
        if extra:
            rank_zero_warn(
                f"`configure_optimizers` returned a dict with the keys {extra}, which mean nothing and are ignored; "
                'known are "optimizer", "lr_scheduler" and "monitor"',
                category=RuntimeWarning,
            )
        if not _is_optimizer(item.get("optimizer")):
            raise MisconfigurationException(
                f'`configure_optimizers()` returned a dict whose "optimizer" is {_describe(item.get("optimizer"))}; '
                f"it should return {_FORMS}"
            )
        optimizers.append(item["optimizer"])
        scheduler = item.get("lr_scheduler")
        if scheduler is not None:
            scheduler = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
            plateau = isinstance(scheduler.get("scheduler"), ReduceLROnPlateau)
            monitor = {"monitor": item["monitor"]} if plateau and "monitor" in item else {}
            schedulers.append({**monitor, **scheduler})
    return optimizers, schedulers


def _scheduler_config(scheduler: Any, automatic: bool, problems: _Problems) -> LRSchedulerConfig | None:
    if not isinstance(scheduler, dict):
        scheduler = {"scheduler": scheduler}
    extra = sorted(map(str, scheduler.keys() - _SCHEDULER_KEYS))
    if extra:
        rank_zero_warn(
            f"`configure_optimizers` returned a scheduler dict with the keys {extra}, which mean nothing and are "
            f"ignored; known are {sorted(_SCHEDULER_KEYS)}",
            category=RuntimeWarning,
        )
    options = {key: value for key, value in scheduler.items() if key in _SCHEDULER_KEYS}
    if "scheduler" not in options:
        problems.append((MisconfigurationException, 'a scheduler dict lacks its key "scheduler"'))
        return None
    if not automatic:
        ignored = [key for key in options if key in _AUTOMATIC_ONLY]
        if ignored:
            rank_zero_warn(
                f"{ignored} of a scheduler dict are ignored: in manual optimization the module steps its schedulers",
                category=RuntimeWarning,
            )
        return LRSchedulerConfig(**{key: value for key, value in options.items() if key not in _AUTOMATIC_ONLY})
    options.setdefault("reduce_on_plateau", isinstance(options["scheduler"], ReduceLROnPlateau))
    config = LRSchedulerConfig(**options)
    _check_options(config, problems)
    return config


def _check_options(config: LRSchedulerConfig, problems: _Problems) -> None:
    if config.interval not in ("step", "epoch"):
        problems.append(
            (
                MisconfigurationException,
                f'a scheduler dict has "interval": {config.interval!r}; it must be "step" or "epoch"',
            )
        )
    if not isinstance(config.frequency, Real) or config.frequency < 1:
        problems.append(
            (
                MisconfigurationException,
                f'a scheduler dict has "frequency": {config.frequency!r}; it must be a number of at least 1',
            )
        )
    if config.reduce_on_plateau and config.monitor is None:
        problems.append(
            (
                MisconfigurationException,
                "ReduceLROnPlateau needs a metric to look at: return "
                '{"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}',
            )
        )
    if isinstance(config.scheduler, OneCycleLR) and config.interval == "epoch":
        rank_zero_warn(
            "OneCycleLR is stepped once per epoch; it is usually meant to be stepped after each batch: pass "
            '{"scheduler": scheduler, "interval": "step"}',
            category=RuntimeWarning,
        )


def _check_number(module: Any, optimizers: list[Any], problems: _Problems) -> None:
    how = (
        "Several optimizers need manual optimization: set `self.automatic_optimization = False` in __init__, and step "
        "them in `training_step`, `first, second = self.optimizers()`."
    )
    code = getattr(module.training_step, "__code__", None)
    if code is not None and "optimizer_idx" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        problems.append((RuntimeError, f"`training_step` takes `optimizer_idx`, which nothing passes any more. {how}"))
    elif module.automatic_optimization and len(optimizers) > 1:
        problems.append((RuntimeError, f"{len(optimizers)} optimizers in automatic optimization. {how}"))


def _check_scheduler(config: LRSchedulerConfig, optimizers: list[Any], module: Any, problems: _Problems) -> None:
    scheduler = config.scheduler
    name = type(scheduler).__name__
    attached = getattr(scheduler, "optimizer", None)
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        problems.append(
            (
                TypeError,
                f"the scheduler {name} can't be saved: give it the methods state_dict and load_state_dict",
            )
        )
        return
    if attached is not None and not any(attached is optimizer for optimizer in optimizers):
        problems.append(
            (
                MisconfigurationException,
                f"the scheduler {name} belongs to a {type(attached).__name__} that `configure_optimizers` did not "
                f"return with it; it returned {_describe(optimizers)}",
            )
        )
    if (
        module.automatic_optimization
        and not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau))
        and not is_overridden("lr_scheduler_step", module)
    ):
        problems.append(
            (
                MisconfigurationException,
                f"the scheduler {name} is no LRScheduler of PyTorch, so how to step it is not known: override "
                "`lr_scheduler_step(self, scheduler, metric)` in the module and step it there",
            )
        )


def _raise(problems: _Problems, what: str) -> None:
    if len(problems) == 1:
        kind, message = problems[0]
        raise kind(message)
    raise_all([message for _, message in problems], what)


def grad_clipping(
    value: Any, algorithm: Any, trainer_value: int | float | None, trainer_algorithm: str | None
) -> tuple[int | float, str]:
    """What to clip to and how, from the arguments of ``clip_gradients`` and the trainer's settings.

    Raises:
        MisconfigurationException: The two differ, or the algorithm is unknown.
        TypeError: The value is not a number.
    """
    if value is None:
        value = trainer_value or 0.0
    elif trainer_value is not None and trainer_value != value:
        raise MisconfigurationException(
            f"clip_gradients(gradient_clip_val={value!r}) contradicts Trainer(gradient_clip_val={trainer_value!r}): "
            "leave one of them out"
        )
    if algorithm is None:
        algorithm = trainer_algorithm or "norm"
    else:
        algorithm = algorithm.lower()
        if trainer_algorithm is not None and trainer_algorithm != algorithm:
            raise MisconfigurationException(
                f"clip_gradients(gradient_clip_algorithm={algorithm!r}) contradicts "
                f"Trainer(gradient_clip_algorithm={str(trainer_algorithm)!r}): leave one of them out"
            )
    if not isinstance(value, (int, float)):
        raise TypeError(f"gradient_clip_val={value!r} must be a number")
    if algorithm not in ("norm", "value"):
        raise MisconfigurationException(f"gradient_clip_algorithm={algorithm!r} must be 'norm' or 'value'")
    return value, algorithm
