"""Callbacks, modules, datamodules and loggers that write every call of a hook into a record."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from differential.record import Record

__all__ = ["sub", "tracing_callback", "tracing_datamodule", "tracing_logger", "tracing_module"]

STAGES = ("train", "validation", "test", "predict")
BATCH_HOOKS = [f"on_{stage}_{when}" for stage in STAGES for when in ("batch_start", "batch_end")]
STAGE_HOOKS = [f"on_{stage}_{when}" for stage in STAGES for when in ("start", "end", "epoch_start", "epoch_end")]
BACKWARD_HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
CHECKPOINT_HOOKS = ["on_save_checkpoint", "on_load_checkpoint"]
SHARED_HOOKS = ["setup", "teardown", "on_fit_start", "on_fit_end", *STAGE_HOOKS, *BATCH_HOOKS, *BACKWARD_HOOKS]
CALLBACK_HOOKS = [*SHARED_HOOKS, "on_sanity_check_start", "on_sanity_check_end", "on_exception", *CHECKPOINT_HOOKS]
TRANSFER_HOOKS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
# Not here: `on_{validation,test}_model_train`, whose mere presence changes what is done to the module.
MODULE_HOOKS = [
    *SHARED_HOOKS,
    *TRANSFER_HOOKS,
    *CHECKPOINT_HOOKS,
    "prepare_data",
    "configure_callbacks",
    "configure_model",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_test_model_eval",
    "on_predict_model_eval",
]
DATAMODULE_HOOKS = ["prepare_data", "setup", "teardown", "on_exception", *TRANSFER_HOOKS]
HIDDEN_ARGUMENTS = ("trainer", "pl_module", "optimizer_closure", "self")


def sub(L: ModuleType, name: str) -> Any:
    """A sub-module of a root, e.g. ``sub(L, "callbacks")``."""
    return importlib.import_module(f"{L.__name__}.{name}")


def tracing_callback(
    L: ModuleType, rec: Record, label: str = "C", *, deep: bool = False, skip: Iterable[str] = (), base: Any = None
) -> Any:
    """A callback with every hook, including state.

    Args:
        L: The root.
        rec: Where events go.
        label: Shown before each hook's name.
        deep: Also note what the trainer looks like during each hook.
        skip: Hooks to leave out.
        base: Class to subclass instead of ``Callback``.
    """
    base = L.Callback if base is None else base
    members = _hooks(base, [name for name in CALLBACK_HOOKS if name not in skip], rec, label, deep)

    def state_dict(self: Any) -> dict[str, Any]:
        rec.event(f"{label}.state_dict")
        return {"label": label}

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        rec.event(f"{label}.load_state_dict", state_dict=state_dict)

    members |= {"state_dict": state_dict, "load_state_dict": load_state_dict, "state_key": property(lambda self: label)}
    return type("TracingCallback", (base,), members)()


def tracing_module(
    L: ModuleType, rec: Record, base: type, label: str = "M", *, deep: bool = False, skip: Iterable[str] = ()
) -> Any:
    """A subclass of a LightningModule class that notes every hook; steps keep their signatures."""
    members = _hooks(base, [name for name in MODULE_HOOKS if name not in skip], rec, label, deep)

    class Traced(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            rec.event(f"{label}.forward")
            return super().forward(*args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event(f"{label}.training_step", batch=batch, batch_idx=batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            rec.event(f"{label}.validation_step", batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
            return super().validation_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            rec.event(f"{label}.test_step", batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
            return super().test_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            rec.event(f"{label}.predict_step", batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
            return super().predict_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            rec.event(f"{label}.configure_optimizers")
            return super().configure_optimizers()

        def train(self, mode: bool = True) -> Any:
            rec.event(f"{label}.train", mode=mode)
            return super().train(mode)

    return type("TracedModule", (Traced,), {name: hook for name, hook in members.items() if name not in skip})


def tracing_datamodule(
    L: ModuleType, rec: Record, label: str = "D", *, loaders: dict[str, Callable[[], Any]], skip: Iterable[str] = ()
) -> Any:
    """A datamodule with every hook, state, and the given ``{"train_dataloader": make_loader, ...}``."""
    base = L.LightningDataModule
    members = _hooks(base, [name for name in DATAMODULE_HOOKS if name not in skip], rec, label, deep=False)
    for name, make in loaders.items():
        members[name] = _loader_hook(name, make, rec, label)

    def state_dict(self: Any) -> dict[str, Any]:
        rec.event(f"{label}.state_dict")
        return {"label": label}

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        rec.event(f"{label}.load_state_dict", state_dict=state_dict)

    if "state_dict" not in skip:
        members |= {"state_dict": state_dict, "load_state_dict": load_state_dict}
    return type("TracingDataModule", (base,), members)()


def tracing_logger(L: ModuleType, rec: Record, label: str = "L", name: str = "traced", version: int = 0) -> Any:
    """A logger that keeps nothing but a trace of what it was asked to keep."""
    base = sub(L, "loggers").Logger

    class TracingLogger(base):
        @property
        def name(self) -> str:
            return name

        @property
        def version(self) -> int:
            return version

        @property
        def save_dir(self) -> str:
            return str(rec.folder)

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            rec.event(f"{label}.log_metrics", **{"metrics": sorted(metrics.items()), "step": step})

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            rec.event(f"{label}.log_hyperparams", params=params)

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            rec.event(f"{label}.after_save_checkpoint", best=checkpoint_callback.best_model_path)

        def finalize(self, status: str) -> None:
            rec.event(f"{label}.finalize", status=status)

    return TracingLogger()


def _loader_hook(name: str, make: Callable[[], Any], rec: Record, label: str) -> Callable[..., Any]:
    def hook(self: Any) -> Any:
        rec.event(f"{label}.{name}")
        return make()

    return hook


def _hooks(base: type, names: Iterable[str], rec: Record, label: str, deep: bool) -> dict[str, Callable[..., Any]]:
    return {name: _hook(base, name, rec, label, deep) for name in names}


def _hook(base: type, name: str, rec: Record, label: str, deep: bool) -> Callable[..., Any]:
    parent = getattr(base, name)
    signature = inspect.signature(parent)

    # No `functools.wraps`: a root would look through it and take the hook for an untouched one.
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        details = {key: value for key, value in bound.arguments.items() if key not in HIDDEN_ARGUMENTS}
        where = _situation(self, bound.arguments) if deep else ""
        rec.event(f"{label}.{name}{where}", **details)
        return parent(self, *args, **kwargs)

    return hook


def _situation(owner: Any, arguments: dict[str, Any]) -> str:
    """What a user could see of the trainer, the module and torch during a hook."""
    trainer = arguments.get("trainer") or getattr(owner, "_trainer", None)
    if trainer is None:
        return "[]"
    module = arguments.get("pl_module") or trainer.lightning_module
    stage = getattr(trainer.state.stage, "value", trainer.state.stage)
    flags = "".join(
        letter
        for letter, on in (
            ("T", module is not None and module.training),
            ("g", torch.is_grad_enabled()),
            ("i", torch.is_inference_mode_enabled()),
            ("l", trainer.is_last_batch),
            ("s", trainer.should_stop),
        )
        if on
    )
    return f"[{stage} epoch={trainer.current_epoch} step={trainer.global_step} {flags}]"
