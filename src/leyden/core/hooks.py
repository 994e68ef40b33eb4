"""The table of hooks: who can have each one, whether it replaces a default, and what may be logged in it."""

import functools
import sys
from dataclasses import dataclass
from typing import Any, Literal

from leyden.base.errors import MisconfigurationException
from leyden.base.registry import did_you_mean
from leyden.core.hook_methods import CheckpointHooks, DataHooks, ModelHooks

__all__ = [
    "CheckpointHooks",
    "DataHooks",
    "HOOKS",
    "Hook",
    "LogRule",
    "ModelHooks",
    "check_removed_hooks",
    "hook_function",
    "is_overridden",
    "is_untouched",
    "log_levels",
    "refuse_foreign",
]


@dataclass(frozen=True)
class LogRule:
    """What ``log(on_step=, on_epoch=)`` may be inside a hook, and what it is when it isn't given."""

    allowed_on_step: tuple[bool, ...]
    allowed_on_epoch: tuple[bool, ...]
    default_on_step: bool
    default_on_epoch: bool


@dataclass(frozen=True)
class Hook:
    """One row of the table.

    Attributes:
        name: The method's name.
        callback: Callbacks have it; they get ``(trainer, module, ...)``.
        module: The LightningModule has it.
        datamodule: The LightningDataModule has it.
        strategy: Strategies have it.
        kind: "notify": everyone who has it is called, the results don't matter. "replace": one implementation does
            the work, and overriding it replaces the default.
        log: The rule for ``log`` inside it; None where logging is an error.
    """

    name: str
    callback: bool = False
    module: bool = False
    datamodule: bool = False
    strategy: bool = False
    kind: Literal["notify", "replace"] = "notify"
    log: LogRule | None = None


_BOTH = (False, True)
_STEP = LogRule(_BOTH, _BOTH, default_on_step=True, default_on_epoch=False)
_EVAL = LogRule(_BOTH, _BOTH, default_on_step=False, default_on_epoch=True)
_EPOCH = LogRule((False,), (True,), default_on_step=False, default_on_epoch=True)


def _row(name: str, who: str, log: LogRule | None = None, replace: bool = False) -> Hook:
    """``who``: C callback, M module, D datamodule, S strategy."""
    return Hook(name, "C" in who, "M" in who, "D" in who, "S" in who, "replace" if replace else "notify", log)


def _evaluation_rows(stage: str, step: str, batch: LogRule | None, epoch: LogRule | None) -> list[Hook]:
    return [
        _row(f"on_{stage}_start", "CMS", epoch),
        _row(f"on_{stage}_epoch_start", "CM", epoch),
        _row(f"on_{stage}_batch_start", "CM", batch),
        _row(step, "M", batch, replace=True),
        _row(f"on_{stage}_batch_end", "CM", batch),
        _row(f"on_{stage}_epoch_end", "CM", epoch),
        _row(f"on_{stage}_end", "CMS"),
    ]


_ROWS = [
    # Before the run
    _row("configure_callbacks", "M", replace=True),
    _row("prepare_data", "MD"),
    _row("setup", "CMD"),
    _row("configure_sharded_model", "M"),
    _row("configure_model", "M"),
    _row("configure_optimizers", "M", replace=True),
    _row("on_load_checkpoint", "CM"),
    _row("load_state_dict", "CD", replace=True),
    _row("on_fit_start", "CM"),
    _row("on_sanity_check_start", "C"),
    _row("on_sanity_check_end", "C"),
    _row("train_dataloader", "MD", replace=True),
    _row("val_dataloader", "MD", replace=True),
    _row("test_dataloader", "MD", replace=True),
    _row("predict_dataloader", "MD", replace=True),
    # Training
    _row("on_train_start", "CMS", _EPOCH),
    _row("on_train_epoch_start", "CM", _EPOCH),
    _row("on_before_batch_transfer", "MD", replace=True),
    _row("transfer_batch_to_device", "MD", replace=True),
    _row("on_after_batch_transfer", "MD", replace=True),
    _row("on_train_batch_start", "CMS", _STEP),
    _row("optimizer_step", "M", _STEP, replace=True),
    _row("training_step", "M", _STEP, replace=True),
    _row("on_before_zero_grad", "CM", _STEP),
    _row("optimizer_zero_grad", "M", _STEP, replace=True),
    _row("on_before_backward", "CM", _STEP),
    _row("backward", "M", _STEP, replace=True),
    _row("on_after_backward", "CM", _STEP),
    _row("on_before_optimizer_step", "CM", _STEP),
    _row("configure_gradient_clipping", "M", _STEP, replace=True),
    _row("clip_gradients", "M", _STEP, replace=True),
    _row("lr_scheduler_step", "M", replace=True),
    _row("on_train_batch_end", "CM", _STEP),
    # Evaluation; inside training its place is here
    _row("on_validation_model_zero_grad", "M", replace=True),
    _row("on_validation_model_eval", "M", replace=True),
    *_evaluation_rows("validation", "validation_step", _EVAL, _EPOCH),
    _row("on_validation_model_train", "M", replace=True),
    _row("on_test_model_eval", "M", replace=True),
    *_evaluation_rows("test", "test_step", _EVAL, _EPOCH),
    _row("on_test_model_train", "M", replace=True),
    _row("on_predict_model_eval", "M", replace=True),
    *_evaluation_rows("predict", "predict_step", None, None),
    # The end
    _row("on_train_epoch_end", "CM", _EPOCH),
    _row("state_dict", "CD", replace=True),
    _row("on_save_checkpoint", "CM"),
    _row("on_train_end", "CMS"),
    _row("on_fit_end", "CM"),
    _row("on_exception", "CDS"),
    _row("teardown", "CMD"),
]

HOOKS: dict[str, Hook] = {row.name: row for row in _ROWS}
"""Every hook by name, in the order of a run."""

_REMOVED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}


def log_levels(hook: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """The ``(on_step, on_epoch)`` that ``log`` uses inside ``hook``.

    Raises:
        MisconfigurationException: Nothing may be logged in this hook, or not with these arguments.
    """
    row = HOOKS.get(hook)
    if row is None:
        raise MisconfigurationException(f"self.log() inside `{hook}`: not a hook; {did_you_mean(hook, HOOKS)}")
    rule = row.log
    if rule is None:
        raise MisconfigurationException(
            f"`self.log` does not work inside `{hook}`: its values would belong to no step and no epoch. "
            "Write to the logger itself: `self.logger.log_metrics({...}, step)`, or `self.logger.experiment`."
        )
    on_step = rule.default_on_step if on_step is None else on_step
    on_epoch = rule.default_on_epoch if on_epoch is None else on_epoch
    for argument, value, allowed in (
        ("on_step", on_step, rule.allowed_on_step),
        ("on_epoch", on_epoch, rule.allowed_on_epoch),
    ):
        if value not in allowed:
            raise MisconfigurationException(
                f"`self.log({argument}={value})` does not work inside `{hook}`, only {argument}={allowed[0]} does"
            )
    return on_step, on_epoch


def check_removed_hooks(module: Any) -> None:
    """Refuses a module that still has one of the epoch hooks of version 1.

    Raises:
        NotImplementedError: With the new form of the hook.
    """
    for old, new in _REMOVED.items():
        if callable(getattr(module, old, None)):
            step = old.replace("epoch_end", "step")
            raise NotImplementedError(
                f"{type(module).__name__}.{old}(outputs) is not called any more: rename it to `{new}(self)` and keep "
                f"what it needs yourself, e.g. `self.outputs.append(loss)` in {step}, `self.outputs.clear()` in {new}."
            )


def hook_function(method: Any) -> Any:
    """The plain function behind ``method``: through bound methods, partial, functools.wraps and Mock(wraps=)."""
    mock = sys.modules.get("unittest.mock")  # nobody can hold a Mock unless this is loaded
    while True:
        if isinstance(method, functools.partial):
            method = method.func
        elif mock is not None and isinstance(method, mock.NonCallableMock):
            wraps = method._mock_wraps
            if wraps is None:
                return method
            method = wraps
        elif hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        elif hasattr(method, "__func__"):
            method = method.__func__
        else:
            return method


def is_overridden(name: str, instance: Any, base: type | None = None) -> bool:
    """Whether ``instance`` has its own ``name``: by its class, a mix-in, or an attribute set on the instance.

    A wrapper around the inherited method (``functools.wraps``, ``functools.partial``, ``Mock(wraps=...)``) is not one;
    where such a wrapper must still be called, use `is_untouched`.

    Args:
        name: The method.
        instance: A LightningModule, LightningDataModule, Callback, or with ``base`` anything. None gives False.
        base: The class that has the default. Default: which of the three ``instance`` is.
    """
    method = getattr(instance, name, None)
    if instance is None or method is None:
        return False
    default = getattr(_base_of(instance) if base is None else base, name, None)
    return default is None or hook_function(method) is not hook_function(default)


def is_untouched(name: str, instance: Any, base: type | None = None) -> bool:
    """Whether calling ``instance.name`` is calling the default of ``base`` and nothing else.

    Stricter than ``not is_overridden``: a wrapper around the default is something else.
    """
    method = getattr(instance, name, None)
    default = getattr(_base_of(instance) if base is None else base, name, None)
    return method is None or getattr(method, "__func__", method) is default


def _base_of(instance: Any) -> type:
    from leyden.core.callback import Callback
    from leyden.core.datamodule import LightningDataModule
    from leyden.core.module import LightningModule

    for base in (LightningModule, LightningDataModule, Callback):
        if isinstance(instance, base):
            return base
    refuse_foreign(instance)
    raise ValueError(
        f"{type(instance).__qualname__} is neither a LightningModule, a LightningDataModule nor a Callback; pass base="
    )


def refuse_foreign(instance: Any) -> None:
    """Raises a TypeError for an object of Lightning, where one of Leyden is needed."""
    for cls in type(instance).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in ("lightning", "pytorch_lightning"):
            raise TypeError(
                f"{type(instance).__qualname__} is based on `{cls.__module__}.{cls.__qualname__}`, not on a class of "
                "'leyden'. Import everything from one of them, e.g. `import leyden as L`."
            )
