"""torch.compile: a compiled LightningModule is trained as itself, with its steps compiled."""

import sys
from typing import Any

import torch

from leyden.core.hooks import is_overridden, refuse_foreign
from leyden.core.module import LightningModule

__all__ = ["from_compiled", "to_uncompiled", "unwrap_module"]

_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def _is_compiled(model: Any) -> bool:
    # Nobody can have such an object unless this is loaded; loading it to ask would take a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def from_compiled(model: Any) -> LightningModule:
    """The LightningModule inside ``torch.compile(module)``, with its steps compiled in the same way.

    ``log`` and ``log_dict`` stay outside of the compiled graphs.

    Raises:
        ValueError: ``model`` is not the result of ``torch.compile``, or there is no LightningModule inside.
    """
    if not _is_compiled(model):
        raise ValueError(f"`model` is a {type(model).__name__}, not what `torch.compile(module)` returns")
    module = model._orig_mod
    if not isinstance(module, LightningModule):
        refuse_foreign(module)
        raise ValueError(f"`model` is a compiled {type(module).__name__}, but only a LightningModule can be trained")
    if module._compiler_ctx is not None:
        return module
    replacements = {
        name: model.dynamo_ctx(getattr(module, name))
        for name in _METHODS
        if name == "forward" or is_overridden(name, module)
    }
    # They keep books in Python; tracing them would recompile at each new value.
    replacements |= {name: torch.compiler.disable(getattr(module, name)) for name in ("log", "log_dict")}
    # None: the attribute is the class's, and taking the replacement away brings it back.
    replaced = {name: module.__dict__.get(name) for name in replacements}
    module.__dict__.update(replacements)
    module._compiler_ctx = {"compiler": "dynamo", "dynamo_ctx": model.dynamo_ctx, "replaced": replaced}
    return module


def to_uncompiled(model: Any) -> LightningModule:
    """Undoes `from_compiled` and ``torch.compile(module)``: the module with its own steps.

    Raises:
        ValueError: ``model`` is not compiled.
        TypeError: There is no LightningModule inside.
    """
    compiled = _is_compiled(model)
    module = model._orig_mod if compiled else model
    if not isinstance(module, LightningModule):
        if compiled:
            raise TypeError(f"`model` is a compiled {type(module).__name__}, not a compiled LightningModule")
        raise ValueError(f"`model` must be a LightningModule or the result of torch.compile on one, got {model!r}")
    if module._compiler_ctx is None:
        if compiled:
            return module
        raise ValueError(f"this {type(module).__name__} is not compiled, so there is nothing to undo")
    for name, previous in module._compiler_ctx["replaced"].items():
        if previous is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = previous
    module._compiler_ctx = None
    return module


def unwrap_module(model: Any) -> LightningModule:
    """What a trainer runs for ``model``: a LightningModule as it is, a compiled one by `from_compiled`.

    Raises:
        TypeError: ``model`` is neither.
    """
    if isinstance(model, LightningModule):
        if "_trainer" not in model.__dict__:
            name = type(model).__qualname__
            raise TypeError(f"{name}.__init__ does not call super().__init__(): call it there, before anything else")
        return model
    if isinstance(model, type) and issubclass(model, LightningModule):
        raise TypeError(f"`model` is the class {model.__qualname__}: pass an instance, {model.__qualname__}(...)")
    if _is_compiled(model):
        return from_compiled(model)
    refuse_foreign(model)
    raise TypeError(
        f"`model` must be a `LightningModule` or `torch.compile(LightningModule)`, got `{type(model).__qualname__}`: "
        "wrap an nn.Module in a LightningModule with a training_step"
    )
