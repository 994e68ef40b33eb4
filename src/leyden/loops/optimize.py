"""One batch of training: forward, zero_grad, backward, update. Automatic, or left to the user's training_step."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.base.errors import MisconfigurationException
from leyden.base.log import warn_once
from leyden.core.optim import LightningOptimizer
from leyden.loops.calls import Calls, module_overrides, profiled_step
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision

if TYPE_CHECKING:
    from leyden.loops.watch import LossWatch
    from leyden.trainer.trainer import Trainer

__all__ = ["AutomaticOptimization", "Backward", "ManualOptimization", "RunBatch", "takes_batch_idx"]

Outputs = dict[str, Any]
RunBatch = Callable[[tuple, int, bool], Outputs]  # arguments of training_step, batch_idx, whether the optimizer steps


def takes_batch_idx(step: Callable) -> bool:
    """Whether a step method wants ``batch_idx``: by that name, by *args, or as any second parameter."""
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise MisconfigurationException(
            f"`{getattr(step, '__name__', 'step')}(self, dataloader_iter)` is not supported: take (self, batch, "
            "batch_idx), and read further batches from an iterator of your own"
        )
    several = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    return several or "batch_idx" in parameters or len(parameters) >= 2


class Backward:
    """The backward pass with its hooks, for both kinds of optimisation.

    Order: the strategy's preparation, loss scaling, ``on_before_backward``, ``LightningModule.backward``,
    ``on_after_backward``. What nobody overrode is left out.
    """

    def __init__(self, trainer: Trainer, calls: Calls) -> None:
        module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
        kind, format_ = type(strategy), type(precision)
        self._calls = calls
        self._metrics = trainer.metrics
        self._module = module
        self._module_backward = module.backward if module_overrides("backward", module) else None
        if format_.backward is not Precision.backward:
            optimizer = trainer.optimizers[0] if module.automatic_optimization else None
            self._module_backward = lambda loss, *args, **kwargs: precision.backward(
                loss, module, optimizer, *args, **kwargs
            )
        plain = (
            kind.backward is Strategy.backward
            and kind.pre_backward is Strategy.pre_backward
            and kind.post_backward is Strategy.post_backward
            and format_.post_backward is Precision.post_backward
        )
        self._strategy_backward = None if plain else strategy.backward
        self._scale = None if format_.pre_backward is Precision.pre_backward else precision.pre_backward
        hooked = calls.on_before_backward or calls.on_after_backward
        self.plain = plain and not hooked and self._module_backward is None and self._scale is None

    def __call__(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._strategy_backward is not None:
            self._strategy_backward(loss, self._with_hooks, *args, **kwargs)
        else:
            self._with_hooks(loss if self._scale is None else self._scale(loss, self._module), *args, **kwargs)

    def _with_hooks(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        calls, metrics = self._calls, self._metrics
        outer_hook = metrics.current_hook  # in manual mode the training step goes on, and logs, after this
        if calls.on_before_backward:
            metrics.current_hook = "on_before_backward"
            for call in calls.on_before_backward:
                call(loss)
        if self._module_backward is not None:
            metrics.current_hook = "backward"
            self._module_backward(loss, *args, **kwargs)
        else:
            if not loss.requires_grad:
                raise RuntimeError(_no_grad_message(self._module))
            loss.backward(*args, **kwargs)
        if calls.on_after_backward:
            metrics.current_hook = "on_after_backward"
            for call in calls.on_after_backward:
                call()
        metrics.current_hook = outer_hook


def _no_grad_message(module: Any) -> str:
    trainable = sum(p.requires_grad for p in module.parameters())
    return (
        f"the loss that {type(module).__name__}.training_step returned has no gradient "
        f"({trainable} parameters of the module require one). Return the loss itself, not .detach() or .item() of it; "
        "compute it outside of torch.no_grad(); and leave requires_grad=True on what is to be trained"
    )


class AutomaticOptimization:
    """Runs batches for a module that returns its loss.

    The direct path calls the few functions that do the work. It is taken when nobody replaced a part of it (the
    module's ``optimizer_step``, the strategy's, the precision's) and when the optimizer evaluates its closure exactly
    once, which is known for torch's own, save LBFGS. Else the overridable methods are called, with a closure.

    Attributes:
        run_batch: Trains on one batch.
    """

    def __init__(self, trainer: Trainer, calls: Calls, watch: LossWatch) -> None:
        module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
        self._trainer = trainer
        self._module = module
        self._calls = calls
        self._watch = watch
        self._metrics = trainer.metrics
        self._progress = trainer.progress
        self._training_step = profiled_step(trainer, "training_step")
        self._backward = Backward(trainer, calls)
        self._optimizer = trainer.optimizers[0]
        self._wrapped = trainer._lightning_optimizers[0]
        self._accumulate = trainer.accumulate_grad_batches
        self._no_sync = strategy.no_sync if trainer.world_size > 1 else None
        self._handles_accumulation = strategy.handles_gradient_accumulation
        self._own_zero_grad = module_overrides("optimizer_zero_grad", module)
        # Hooks see gradients of the last step until after the forward. Where there is no hook to see them, they go
        # before it, and their memory is free for activations.
        self._zero_early = not (self._own_zero_grad or calls.on_before_zero_grad)
        self._own_clipping = module_overrides("configure_gradient_clipping", module)
        self._acts_before_step = bool(
            calls.on_before_optimizer_step or self._own_clipping or trainer.gradient_clip_val is not None
        )
        self._plain_backward = self._backward.plain
        self._outputs: Outputs = {}
        self._world_size = trainer.world_size
        strategy.before_step = self._before_step
        self._direct = (
            not module_overrides("optimizer_step", module)
            and type(strategy).optimizer_step is Strategy.optimizer_step
            and type(precision).optimizer_step is Precision.optimizer_step
            and _evaluates_once(self._optimizer)
        )
        self.run_batch: RunBatch = _plain_run(self) if self._is_plain() else self._run

    def _is_plain(self) -> bool:
        return (
            self._direct
            and self._zero_early
            and self._plain_backward
            and not self._acts_before_step
            and self._accumulate == 1
            and not self._handles_accumulation
        )

    def _run(self, args: tuple, batch_idx: int, update: bool) -> Outputs:
        """Trains on one batch; ``update``: the optimizer steps, else gradients only accumulate."""
        if not update and not self._handles_accumulation:
            if self._no_sync is None:
                self._forward_backward(args, batch_idx)
            else:
                with self._no_sync():
                    self._forward_backward(args, batch_idx)
        elif self._direct:
            self._forward_backward(args, batch_idx)
            if self._acts_before_step:
                self._before_step(self._optimizer)
            self._optimizer.step()
        else:
            closure = functools.partial(self._forward_backward, args, batch_idx)
            self._metrics.current_hook = "optimizer_step"
            self._module.optimizer_step(self._trainer.current_epoch, batch_idx, self._wrapped, closure)
        if update:
            self._progress.global_step += 1
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _forward_backward(self, args: tuple, batch_idx: int) -> Tensor | None:
        """The closure: training_step, zero_grad, backward."""
        zero = self._accumulate == 1 or batch_idx % self._accumulate == 0
        if zero and self._zero_early:
            self._optimizer.zero_grad()
        self._metrics.current_hook = "training_step"
        loss, extra = self._training_step(*args), _NOTHING
        if type(loss) is not Tensor:
            loss, extra = _loss_of(loss, self._module)
        if zero and not self._zero_early:
            self._zero_grad(batch_idx)
        if loss is None:
            self._no_loss()
            return None
        if self._accumulate != 1:
            loss = loss / self._accumulate
        detached = loss.detach()
        self._outputs = {"loss": detached, **extra} if extra else {"loss": detached}
        self._watch.add(detached, batch_idx)
        if self._plain_backward and loss.requires_grad:
            loss.backward()
        else:
            self._backward(loss)
        return detached

    def _zero_grad(self, batch_idx: int) -> None:
        optimizer = self._optimizer
        if self._calls.on_before_zero_grad:
            self._metrics.current_hook = "on_before_zero_grad"
            for call in self._calls.on_before_zero_grad:
                call(optimizer)
        if self._own_zero_grad:
            self._metrics.current_hook = "optimizer_zero_grad"
            self._module.optimizer_zero_grad(self._trainer.current_epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _before_step(self, optimizer: Optimizer) -> None:
        """Between backward and update, gradients unscaled: hooks, then clipping."""
        if self._calls.on_before_optimizer_step:
            self._metrics.current_hook = "on_before_optimizer_step"
            for call in self._calls.on_before_optimizer_step:
                call(optimizer)
        trainer = self._trainer
        if trainer.gradient_clip_val is not None or self._own_clipping:
            self._metrics.current_hook = "configure_gradient_clipping"
            self._module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

    def _no_loss(self) -> None:
        if self._world_size > 1:
            raise RuntimeError(
                "training_step returned None on this rank; the other ranks would wait for its gradients forever. "
                "Return a loss of zero that depends on the parameters instead, e.g. (output * 0).sum()"
            )
        warn_once(
            "training_step returned None: this batch is skipped. If that is not on purpose, return the loss",
            key="training-step-none",
        )


def _plain_run(optimization: AutomaticOptimization) -> RunBatch:
    """`AutomaticOptimization._run` for the usual case in one function: no hooks, nothing replaced, no accumulation.

    A step's cost is what it touches: each further function and object is fetched from main memory again, because the
    model's weights went through the caches since the last step.
    """
    metrics, progress, optimizer = optimization._metrics, optimization._progress, optimization._optimizer
    training_step, zero_grad = optimization._training_step, optimization._optimizer.zero_grad
    module, no_loss, backward = optimization._module, optimization._no_loss, optimization._backward
    watch, wants_outputs = optimization._watch, bool(optimization._calls.on_train_batch_end)

    def run(args: tuple, batch_idx: int, update: bool) -> Outputs:
        zero_grad()
        metrics.current_hook = "training_step"
        loss, outputs = training_step(*args), _NOTHING
        if type(loss) is not Tensor:
            loss, outputs = _loss_of(loss, module)
        if loss is None:
            no_loss()
        else:
            if loss.requires_grad:
                loss.backward()
            else:
                backward(loss)  # says what is wrong
            if wants_outputs:
                outputs = {"loss": loss.detach(), **outputs} if outputs else {"loss": loss.detach()}
            if not loss.is_cpu:
                watch.add(loss.detach(), batch_idx)
            elif not math.isfinite(loss.item()):
                watch.add(loss.detach(), batch_idx)
                watch.look()  # now: the losses that would fill it up are not kept
        optimizer.step()  # looked up each time: schedulers wrap it
        progress.global_step += 1
        return outputs

    return run


_NOTHING: Outputs = {}  # nobody asked for the outputs, nobody writes to them


def _loss_of(output: Any, module: Any) -> tuple[Tensor | None, Outputs]:
    """Splits what training_step returned into the loss and what else it holds."""
    if isinstance(output, Tensor):
        return output, _NOTHING
    if output is None:
        return None, _NOTHING
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if loss is None:
            raise MisconfigurationException(
                f"{type(module).__name__}.training_step returned a dict with the keys {sorted(map(str, output))}; "
                "with automatic optimization it needs the key 'loss'"
            )
        return loss, {key: value for key, value in output.items() if key != "loss"}
    raise MisconfigurationException(
        f"{type(module).__name__}.training_step returned {type(output).__name__}; with automatic optimization return "
        "the loss (a tensor), a dict with the key 'loss', or None to skip the batch"
    )


def _evaluates_once(optimizer: Any) -> bool:
    """Whether ``step(closure)`` equals ``closure(); step()``: so for torch's own optimizers but LBFGS."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)


class ManualOptimization:
    """Runs batches for a module with ``automatic_optimization = False``: the step does everything itself."""

    def __init__(self, trainer: Trainer, calls: Calls, watch: LossWatch) -> None:
        self._module = trainer.lightning_module
        self._calls = calls
        self._watch = watch
        self._metrics = trainer.metrics
        self._progress = trainer.progress
        strategy = trainer.strategy
        self._training_step = profiled_step(trainer, "training_step")
        trainer._manual_backward = Backward(trainer, calls)
        strategy.before_step = self._before_step
        for optimizer in trainer._lightning_optimizers:
            _count_steps(optimizer, self._progress)

    def run_batch(self, args: tuple, batch_idx: int, update: bool) -> Outputs:
        """Calls training_step; steps are counted where the user's optimizers make them."""
        self._metrics.current_hook = "training_step"
        output = self._training_step(*args)
        if output is None:
            return {}
        if isinstance(output, Tensor):
            output = {"loss": output}
        if isinstance(output, Mapping):
            loss = output.get("loss")
            if not torch.is_tensor(loss):
                return dict(output)
            loss = loss.detach()
            self._watch.add(loss, batch_idx)
            return {**output, "loss": loss}
        raise MisconfigurationException(
            f"{type(self._module).__name__}.training_step returned {type(output).__name__}; with manual optimization "
            "return a tensor, a dict or None"
        )

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._calls.on_before_optimizer_step:
            self._metrics.current_hook = "on_before_optimizer_step"
            for call in self._calls.on_before_optimizer_step:
                call(optimizer)
            self._metrics.current_hook = "training_step"


def _count_steps(optimizer: LightningOptimizer, progress: Any) -> None:
    def after() -> None:
        progress.global_step += 1

    optimizer._on_after_step = after
