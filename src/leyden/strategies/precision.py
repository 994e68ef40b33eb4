"""Number formats: which dtype weights, inputs and arithmetic have, and how gradients are scaled and clipped."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn

__all__ = [
    "DoublePrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "precision_plugin",
    "resolve_precision",
]

BeforeStep = Callable[[Optimizer], None]


def _no_closure() -> None:
    """Default of `Precision.optimizer_step`: the gradients are there already."""


_SPELLINGS = {
    "16": "16-mixed",
    "16-mixed": "16-mixed",
    "16-true": "16-true",
    "32": "32-true",
    "32-true": "32-true",
    "64": "64-true",
    "64-true": "64-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
}
_ABSENT = ("transformer-engine", "transformer-engine-float16")
_DTYPES = {
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}


class Precision:
    """32-bit training, and the base of all precision plugins.

    A subclass changes what it needs: the dtype of weights (`convert_module`) and inputs (`convert_input`), the context
    of a step (`forward_context`, or one of the four ``*_step_context``), the loss before backward (`pre_backward`), and
    what happens around the optimizer (`optimizer_step`, `clip_gradients`).
    """

    precision: str = "32-true"

    @property
    def is_plain(self) -> bool:
        """True when nothing around a step differs from plain torch, so that the loop may leave this object out."""
        cls = type(self)
        return all(getattr(cls, name) is getattr(Precision, name) for name in _TOUCHES_THE_STEP)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts the model's weights, once, before it moves to its device."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Casts the floating point tensors of a batch."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Casts what a step returns."""
        return data

    def forward_context(self) -> AbstractContextManager[Any]:
        """Entered around each step, unless the step's own context says otherwise."""
        return nullcontext()

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Entered around `training_step`."""
        return self.forward_context()

    def val_step_context(self) -> AbstractContextManager[Any]:
        """Entered around `validation_step`."""
        return self.forward_context()

    def test_step_context(self) -> AbstractContextManager[Any]:
        """Entered around `test_step`."""
        return self.forward_context()

    def predict_step_context(self) -> AbstractContextManager[Any]:
        """Entered around `predict_step`."""
        return self.forward_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Entered while modules are created, so that their weights have the right dtype at once."""
        return nullcontext()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Entered while tensors are created."""
        return nullcontext()

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Last chance to replace the model, the optimizers or the schedulers, at the end of the strategy's setup."""
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: nn.Module | None = None) -> Tensor:
        """Scales the loss; its result is what backward runs on."""
        return tensor

    def post_backward(self, tensor: Tensor, module: nn.Module | None = None) -> Tensor:
        """Called with the scaled loss after backward."""
        return tensor

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Runs the module's ``backward`` on the scaled loss; ``optimizer`` is None in manual optimisation."""
        model.backward(tensor, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        closure: Callable[[], Any] = _no_closure,
        before_step: BeforeStep | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs ``closure`` (forward and backward) and then the update.

        Args:
            optimizer: The torch optimizer itself.
            model: The user's module.
            closure: Returns the loss, or None when the step was skipped.
            before_step: Called after the closure, with unscaled gradients, before the update: hooks and clipping.
            **kwargs: Passed on to ``optimizer.step``.
        """
        if before_step is None:
            return optimizer.step(closure=closure, **kwargs)

        def closure_and_hooks() -> Any:
            result = closure()
            before_step(optimizer)
            return result

        return optimizer.step(closure=closure_and_hooks, **kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """The parameters whose gradients are clipped."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float | int | None = 0.0, gradient_clip_algorithm: str | None = "norm"
    ) -> None:
        """Clips gradients in place.

        Args:
            optimizer: Whose gradients.
            clip_val: The limit; None and numbers <= 0 mean no clipping.
            gradient_clip_algorithm: ``"norm"`` (of all gradients together) or ``"value"`` (each element).

        Raises:
            MisconfigurationException: The algorithm is unknown.
        """
        if clip_val is None or clip_val <= 0:
            return
        # An enum of strings is welcome too: compare by value.
        if gradient_clip_algorithm is None or gradient_clip_algorithm == "norm":
            self.clip_grad_by_norm(optimizer, clip_val)
        elif gradient_clip_algorithm == "value":
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            raise MisconfigurationException(
                f"gradient_clip_algorithm={gradient_clip_algorithm!r} is unknown; use 'norm' or 'value'"
            )

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float | int) -> None:
        """Scales all gradients so that their joint 2-norm is at most ``clip_val``."""
        nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamps each element of each gradient to ``[-clip_val, clip_val]``."""
        nn.utils.clip_grad_value_(self.main_params(optimizer), clip_value=clip_val)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, under the class's name; empty when there is nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""

    def teardown(self) -> None:
        """Called at the end of each run."""


_TOUCHES_THE_STEP = (
    "convert_input",
    "convert_output",
    "forward_context",
    "train_step_context",
    "val_step_context",
    "test_step_context",
    "predict_step_context",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
)


class MixedPrecision(Precision):
    """Weights in 32 bit, matrix arithmetic in 16 bit, by ``torch.autocast``.

    Args:
        precision: ``"16-mixed"`` (float16; the loss is scaled so that small gradients survive) or ``"bf16-mixed"``.
        device: Device type of the arithmetic, e.g. ``"cuda"``.
        scaler: Replaces the default ``torch.amp.GradScaler`` of ``"16-mixed"``.
        cache_enabled: Let autocast keep the 16-bit copy of a weight within a step. Saves casts where a weight is used
            several times; off by default, because a copy made under ``torch.no_grad`` would then serve the training
            forward as well, and that weight would silently get no gradient.

    Raises:
        ValueError: ``precision`` is neither of the two.
        MisconfigurationException: A scaler for ``"bf16-mixed"``, which has the range of 32 bit and needs none.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: "torch.amp.GradScaler | None" = None,
        cache_enabled: bool = False,
    ) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ValueError(f"MixedPrecision(precision={precision!r}) must be '16-mixed' or 'bf16-mixed'")
        if scaler is not None and precision == "bf16-mixed":
            raise MisconfigurationException(
                f"MixedPrecision(precision='bf16-mixed', scaler={scaler!r}): bfloat16 needs no scaler; leave it "
                "out, or use precision='16-mixed'"
            )
        self.precision = precision
        self.device = device
        self.scaler = torch.amp.GradScaler(device=device) if scaler is None and precision == "16-mixed" else scaler
        self.cache_enabled = cache_enabled

    def autocast_context_manager(self) -> torch.autocast:
        """A fresh autocast context."""
        return torch.autocast(self.device, dtype=_DTYPES[self.precision], cache_enabled=self.cache_enabled)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return self.autocast_context_manager()

    def pre_backward(self, tensor: Tensor, module: nn.Module | None = None) -> Tensor:
        """Multiplies the loss by the scale, when there is a scaler."""
        return tensor if self.scaler is None else self.scaler.scale(tensor)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        closure: Callable[[], Any] = _no_closure,
        before_step: BeforeStep | None = None,
        **kwargs: Any,
    ) -> Any:
        """Closure, unscaling, hooks, then the update, which the scaler leaves out when a gradient is not finite.

        Raises:
            MisconfigurationException: LBFGS with a scaler; it calls the closure several times per step.
        """
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, before_step, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "LBFGS evaluates the loss several times per step, which gradient scaling can't follow: use "
                "precision='bf16-mixed' or '32-true'"
            )
        result = closure()
        # In manual optimisation the closure is empty: None then does not mean that backward was skipped.
        skipped = result is None and getattr(model, "automatic_optimization", True)
        if not skipped and not _unscales_by_itself(optimizer):
            self.scaler.unscale_(optimizer)
        if before_step is not None:
            before_step(optimizer)
        if skipped:
            return None
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float | int | None = 0.0, gradient_clip_algorithm: str | None = "norm"
    ) -> None:
        """As the base; refuses optimizers that unscale inside their own step, where it would clip scaled gradients.

        Raises:
            RuntimeError: The optimizer is fused and a scaler is in use.
        """
        if clip_val is not None and clip_val > 0 and self.scaler is not None and _unscales_by_itself(optimizer):
            raise RuntimeError(
                f"gradient_clip_val={clip_val} with precision='16-mixed': {type(optimizer).__qualname__} unscales "
                "gradients inside its step, so they can't be clipped before; create it with fused=False, or use "
                "precision='bf16-mixed'"
            )
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the scaler."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


class _TruePrecision(Precision):
    """Weights, inputs and arithmetic all in one dtype."""

    dtype: torch.dtype

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts all floating point weights and buffers."""
        return module.to(dtype=self.dtype)

    def convert_input(self, data: Any) -> Any:
        """Casts the floating point tensors of a batch."""
        if type(data) is Tensor:
            return self._cast(data)
        # on use: base.tree is wanted here only
        from leyden.base.tree import apply_to_collection

        return apply_to_collection(data, dtype=Tensor, function=self._cast)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Tensors that a step creates have the dtype too."""
        return _DefaultDtype(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Modules are created in the dtype."""
        return _DefaultDtype(self.dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Tensors are created in the dtype."""
        return _DefaultDtype(self.dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if torch.is_floating_point(tensor) else tensor


class HalfPrecision(_TruePrecision):
    """Everything in 16 bit; half the memory of 32 bit, and small updates may be lost to rounding.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
    """

    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        if precision not in ("bf16-true", "16-true"):
            raise ValueError(f"HalfPrecision(precision={precision!r}) must be 'bf16-true' or '16-true'")
        self.precision = precision
        self.dtype = _DTYPES[precision]


class DoublePrecision(_TruePrecision):
    """Everything in 64 bit."""

    precision = "64-true"
    dtype = torch.float64


class _DefaultDtype:
    """Context: ``torch.set_default_dtype``, and back. Cheaper than a generator, since it is entered at every step."""

    __slots__ = ("_before", "_dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exc_info: object) -> None:
        torch.set_default_dtype(self._before)


def resolve_precision(spelling: str | int | None) -> str:
    """Reads ``Trainer(precision=...)`` into its full name.

    Args:
        spelling: ``None`` (32-bit), 16, 32, 64 as int or str, ``"bf16"``, or a full name such as ``"bf16-true"``.

    Raises:
        ValueError: Unknown, or known to be absent from this version.
    """
    if spelling is None:
        return "32-true"
    name = _SPELLINGS.get(str(spelling))
    if name is not None and not isinstance(spelling, bool):
        return name
    known = ", ".join(map(repr, sorted(set(_SPELLINGS.values()))))
    if spelling in _ABSENT:
        raise ValueError(f"precision={spelling!r} is not in this version of Leyden; use one of {known}")
    raise ValueError(f"precision={spelling!r} is unknown; use one of {known} (or 16, 32, 64, 'bf16')")


def precision_plugin(precision: str | int | None, device_type: str = "cpu") -> Precision:
    """Builds the plugin for a precision.

    Args:
        precision: Any spelling that `resolve_precision` reads.
        device_type: ``"cpu"``, ``"cuda"`` or ``"mps"``.
    """
    name = resolve_precision(precision)
    if name == "16-mixed" and device_type == "cpu":
        rank_zero_warn("precision='16-mixed' is not supported on the CPU; using 'bf16-mixed' instead")
        name = "bf16-mixed"
    if name in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(name, device_type)
    if name in ("16-true", "bf16-true"):
        return HalfPrecision(name)
    return DoublePrecision() if name == "64-true" else Precision()


def _unscales_by_itself(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)
