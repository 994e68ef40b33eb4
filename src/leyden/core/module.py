"""LightningModule: a model, what happens to it in a step, and how it is optimised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_warn
from leyden.core.device import DeviceDtypeMixin
from leyden.core.export import ExportMixin
from leyden.core.hook_methods import CheckpointHooks, DataHooks, ModelHooks
from leyden.core.hparams import HyperparametersMixin
from leyden.core.log_methods import LogMethods
from leyden.core.optim import LightningOptimizer, grad_clipping

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from leyden.core.callback import Callback
    from leyden.loggers.base import Logger
    from leyden.trainer.trainer import Trainer

__all__ = ["LightningModule"]

_StepOutput = Tensor | Mapping[str, Any] | None


class LightningModule(
    LogMethods,
    ExportMixin,
    DeviceDtypeMixin,
    HyperparametersMixin,
    ModelHooks,
    DataHooks,
    CheckpointHooks,
    torch.nn.Module,
):
    """A model with its training, validation, test and predict steps and its optimizers; a plain ``nn.Module`` else.

    Example:
        class Classifier(LightningModule):
            def __init__(self, lr: float = 1e-3):
                super().__init__()
                self.save_hyperparameters()
                self.net = nn.Linear(28 * 28, 10)

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.cross_entropy(self.net(x), y)
                self.log("train_loss", loss, prog_bar=True)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
    """

    # TorchScript must not look at these: they mean nothing in an exported model, and `trainer` raises.
    __jit_unused_properties__ = [
        "automatic_optimization",
        "current_epoch",
        "device_mesh",
        "example_input_array",
        "fabric",
        "global_rank",
        "global_step",
        "local_rank",
        "logger",
        "loggers",
        "on_gpu",
        "strict_loading",
        "trainer",
        *DeviceDtypeMixin.__jit_unused_properties__,
        *HyperparametersMixin.__jit_unused_properties__,
    ]

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._example_input_array: Tensor | tuple | dict | None = None
        self._automatic_optimization = True
        self._strict_loading: bool | None = None
        self._param_requires_grad_state: dict[Tensor, bool] = {}
        self._device_mesh: DeviceMesh | None = None
        self._compiler_ctx: dict[str, Any] | None = None

    # ---------------------------------------------------------------- the run that this module is in

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module.

        Raises:
            RuntimeError: There is none: the module hasn't been passed to a trainer.
        """
        trainer = self._trainer
        if trainer is None and not self._jit_is_scripting:
            raise RuntimeError(
                f"{type(self).__qualname__} has no trainer: "
                "`self.trainer` exists once the module was passed to trainer.fit, validate, test or predict"
            )
        return trainer  # pyright: ignore[reportReturnType]

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, LightningModule):
                module._trainer = trainer

    @property
    def fabric(self) -> None:
        """Always None: Leyden has one engine, the trainer."""

    @property
    def current_epoch(self) -> int:
        """The trainer's ``current_epoch``; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The trainer's ``global_step``, optimizer steps summed over optimizers; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """The index of this process among all processes of the run."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """The index of this process on its node."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Logger | None:
        """The trainer's first logger."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Logger]:
        """The trainer's loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def on_gpu(self) -> bool:
        """Whether the module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of devices that a model-parallel strategy made; read it in `configure_model`."""
        return self._device_mesh

    # ---------------------------------------------------------------- settings

    @property
    def automatic_optimization(self) -> bool:
        """False: ``training_step`` itself calls `manual_backward`, ``optimizer.step()`` and ``zero_grad()``."""
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic_optimization: bool) -> None:
        self._automatic_optimization = automatic_optimization

    @property
    def example_input_array(self) -> Tensor | tuple | dict | None:
        """An input for `forward`: a tensor is its argument, a tuple its arguments, a dict its keyword arguments."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Tensor | tuple | dict | None) -> None:
        self._example_input_array = example

    @property
    def strict_loading(self) -> bool:
        """Whether loading a checkpoint wants exactly the keys of this module's ``state_dict()``."""
        return self._strict_loading is not False

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        self._strict_loading = strict_loading

    # ---------------------------------------------------------------- what a subclass defines

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``nn.Module``; ``predict_step`` calls it by default."""
        return super().forward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> _StepOutput:
        """Computes the loss of one batch: ``training_step(self, batch, batch_idx)``.

        Returns:
            The loss (a scalar tensor), a mapping with the key "loss", or None to skip the batch.
        """
        rank_zero_warn(f"{type(self).__qualname__} has no `training_step`: define it to train this module")

    def validation_step(self, *args: Any, **kwargs: Any) -> _StepOutput:
        """Evaluates one validation batch: ``validation_step(self, batch, batch_idx, dataloader_idx=0)``."""

    def test_step(self, *args: Any, **kwargs: Any) -> _StepOutput:
        """Evaluates one test batch: ``test_step(self, batch, batch_idx, dataloader_idx=0)``."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The predictions for one batch: ``predict_step(self, batch, batch_idx, dataloader_idx=0)``."""
        return self(kwargs["batch"] if "batch" in kwargs else args[0])

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Callbacks that this module brings; each replaces the trainer's callbacks of its type or a base of it."""
        return []

    def configure_optimizers(self) -> Any:
        """The optimizers and schedulers to train with.

        Returns:
            An optimizer; a list of optimizers; ``([optimizers], [schedulers])``; a dict with "optimizer" and maybe
            "lr_scheduler" and "monitor"; several such dicts; or None to train without. A scheduler may be a dict
            with "scheduler" and any of "interval" ("epoch" or "step"), "frequency", "monitor", "strict", "name".
        """
        rank_zero_warn(f"{type(self).__qualname__} has no `configure_optimizers`: define it to train this module")

    # ---------------------------------------------------------------- optimisation

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizers of the run, for manual optimisation.

        Args:
            use_pl_optimizer: Give them as `LightningOptimizer`, whose ``step`` cares for precision and counting.

        Returns:
            The optimizer if there is one, else a list.
        """
        trainer = self.trainer
        optimizers = trainer._lightning_optimizers if use_pl_optimizer else trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The schedulers of the run, for manual optimisation: None, one, or a list."""
        configs = self.trainer.lr_scheduler_configs
        if not configs:
            return None
        return configs[0].scheduler if len(configs) == 1 else [config.scheduler for config in configs]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Use it in place of ``loss.backward(*args, **kwargs)`` in manual optimisation: it scales fp16 and runs hooks.

        Raises:
            MisconfigurationException: Optimisation is automatic.
        """
        if self.automatic_optimization:  # the property: a subclass may have set a class attribute in its place
            raise MisconfigurationException(
                "manual_backward is for manual optimization: set `self.automatic_optimization = False` in __init__, or "
                "return the loss from training_step and leave the backward pass to the trainer"
            )
        self.trainer._manual_backward(loss, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of both kinds of optimisation; the loss is scaled already. Override to change it."""
        loss.backward(*args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Lets only the parameters of ``optimizer`` require gradients, so that no others are computed."""
        states: dict[Tensor, bool] = {}
        for other in self.trainer.optimizers:
            for parameter in _parameters(other):
                if parameter not in states:
                    states[parameter] = parameter.requires_grad
                    parameter.requires_grad = False
        for parameter in _parameters(optimizer):
            parameter.requires_grad = states[parameter]
        self._param_requires_grad_state = states

    def untoggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Gives the parameters of all other optimizers their state from before `toggle_optimizer`."""
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        for other in self.trainer.optimizers:
            if other is not own:
                for parameter in _parameters(other):
                    if parameter in self._param_requires_grad_state:
                        parameter.requires_grad = self._param_requires_grad_state[parameter]
        self._param_requires_grad_state = {}

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> Iterator[None]:
        """`toggle_optimizer` for the length of a ``with`` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """One optimizer step. ``optimizer_closure`` runs the step, zero_grad and backward, and has to be called."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clears the gradients of ``optimizer``; override to change how."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """One step of a scheduler, with the monitored value where there is one; needed for schedulers not of torch."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients of ``optimizer``, with the trainer's settings where an argument is None.

        Raises:
            MisconfigurationException: An argument and the trainer's setting differ, or the algorithm is unknown.
        """
        trainer = self.trainer
        value, algorithm = grad_clipping(
            gradient_clip_val, gradient_clip_algorithm, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        )
        trainer.precision_plugin.clip_gradients(optimizer, value, algorithm)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips before each optimizer step, with the trainer's settings. Override it and call `clip_gradients`."""
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def freeze(self) -> Self:
        """Stops all parameters from requiring gradients, and sets eval mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Makes all parameters require gradients, and sets train mode."""
        return self.requires_grad_(True).train()

    def __getstate__(self) -> dict[str, Any]:
        """The module without its trainer, which belongs to the process."""
        return {**self.__dict__, "_trainer": None}


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
