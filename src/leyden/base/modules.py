"""Questions about an ``nn.Module``: how large its gradients are, what it shares, how much it computes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["find_shared_parameters", "grad_norm", "measure_flops", "set_shared_parameters"]


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of each parameter's gradient, and that of all of them as one vector.

    Args:
        module: Its parameters are looked at; those without a gradient are left out.
        norm_type: Which p-norm, greater than 0; ``"inf"`` for the largest absolute value.
        group_separator: Between the prefix and a parameter's name: loggers make groups of it.

    Returns:
        ``grad_{p}_norm/{name}`` for each parameter and ``grad_{p}_norm_total``, scalar tensors; empty when there is
        no gradient at all.

    Raises:
        ValueError: ``norm_type`` is not greater than 0.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(
            f"norm_type={norm_type!r}, but it must be greater than 0: pass e.g. 2, or 'inf' for the maximum"
        )
    norms = {
        f"grad_{p}_norm{group_separator}{name}": parameter.grad.detach().norm(p)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        values = list(norms.values())
        norms[f"grad_{p}_norm_total"] = torch.stack([value.to(values[0].device) for value in values]).norm(p)
    return norms


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """The parameters that ``module`` reaches by several names.

    Returns:
        For each such parameter its names, in the order in which the module has them.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    return [shared for shared in names.values() if len(shared) > 1]


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Makes ``module`` share again what `find_shared_parameters` found, e.g. after a move made copies.

    The first name of each group gives the parameter, the others are set to it. Works in place, returns ``module``.
    """
    for first, *others in shared_params:
        path, _, name = first.rpartition(".")
        shared = getattr(module.get_submodule(path), name)
        for other in others:
            path, _, name = other.rpartition(".")
            setattr(module.get_submodule(path), name, shared)
    return module


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None
) -> int:
    """Counts the floating-point operations of one forward pass, or of forward and backward.

    Args:
        model: The module that ``forward_fn`` runs; on the ``meta`` device nothing is computed.
        forward_fn: Runs the forward pass and returns its output.
        loss_fn: Makes a loss of that output; when given, the backward pass counts too.
    """
    from torch.utils.flop_counter import FlopCounterMode  # half a second of imports

    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()
