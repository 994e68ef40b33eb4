"""Small helpers of the strategies: optimizers on devices, and weights left uninitialised."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

__all__ = ["optimizer_to_device", "skip_initialisation", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside the object that ``LightningModule.optimizers()`` returns; others as they are."""
    inner = getattr(optimizer, "_optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def optimizer_to_device(optimizer: Any, device: torch.device) -> None:
    """Moves an optimizer's state in place.

    The step counter stays where the optimizer keeps it: on the CPU, except in fused and capturable optimizers.
    """
    optimizer = unwrap_optimizer(optimizer)
    on_device: set[Tensor] = set()
    for group in getattr(optimizer, "param_groups", ()):
        if group.get("fused") or group.get("capturable"):
            on_device.update(group["params"])
    for param, state in getattr(optimizer, "state", {}).items():
        if not isinstance(state, dict):  # LBFGS and others keep one dict per parameter; nothing else is ours to move
            continue
        for key, value in state.items():
            if key != "step" or param in on_device:
                state[key] = _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value


class skip_initialisation(TorchFunctionMode):
    """Context: functions of ``torch.nn.init`` return their tensor untouched.

    This holds for those that torch lets a mode answer: uniform_, normal_, constant_ and kaiming_*, by which torch's own
    layers initialise themselves.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers in place of ``func``."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
