"""The strategy: where a model lives, how its steps are called, and how processes share what they know.

A strategy sees ``nn.Module`` only. The training loop asks it once per run for the callable of each step
(`Strategy.step_callable`), so a strategy that changes nothing costs nothing per step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.base.log import rank_zero_only
from leyden.base.states import TrainerFn
from leyden.dist.comm import Comm, NoComm
from leyden.strategies.layer_sync import LayerSync, TorchSyncBatchNorm
from leyden.strategies.parts import CheckpointMethods, CommMethods, StageHooks
from leyden.strategies.precision import Precision
from leyden.strategies.tools import optimizer_to_device, skip_initialisation

if TYPE_CHECKING:
    from leyden.checkpoint.io import CheckpointIO
    from leyden.dist.devices import Accelerator
    from leyden.dist.env import ClusterEnvironment
    from leyden.dist.launch import Launcher

__all__ = ["SingleDeviceStrategy", "Strategy"]

_CONTEXT_OF_STEP = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


def _nothing_before_step(optimizer: Optimizer) -> None:
    """Default of `Strategy.before_step`; a module-level function, so that a strategy can be sent to a process."""


class Strategy(CommMethods, CheckpointMethods, StageHooks):
    """One process on one device, and the base of all strategies.

    Args:
        accelerator: The kind of hardware; the Trainer sets it.
        checkpoint_io: Reads and writes checkpoint files; default: `TorchCheckpointIO`.
        precision_plugin: Number formats; default: 32-bit.
        parallel_devices: One device per process of this node.
        cluster_environment: Knows the ranks; None for one process.

    Attributes:
        model: What training runs: the user's module, or a wrapper around it.
        lightning_module: The user's module, never wrapped.
        optimizers: Torch optimizers, set by `setup_optimizers`.
        lr_scheduler_configs: Likewise.
        comm: How this process talks to the others.
        before_step: Called by `optimizer_step` with true gradients before the update; the loop sets it.
        num_nodes: Number of nodes.
        layer_sync: Replaces layers by synchronising ones during fit, when there is more than one process.
    """

    handles_gradient_accumulation = False
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def __init__(
        self,
        accelerator: "Accelerator | None" = None,
        checkpoint_io: "CheckpointIO | None" = None,
        precision_plugin: Precision | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: "ClusterEnvironment | None" = None,
    ) -> None:
        self.accelerator = accelerator
        self.precision_plugin = precision_plugin
        self.parallel_devices = [torch.device("cpu")] if parallel_devices is None else parallel_devices
        self.cluster_environment = cluster_environment
        self.num_nodes = 1
        self.layer_sync: LayerSync | None = None
        self.comm: Comm | NoComm = NoComm()
        self.model: nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.before_step: Callable[[Optimizer], None] = _nothing_before_step
        self._checkpoint_io = checkpoint_io
        self._lightning_module: nn.Module | None = None
        self._launcher: Launcher | None = None
        self._steps: dict[str, Callable[..., Any]] = {}

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Number formats of this run."""
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = Precision() if plugin is None else plugin

    @property
    def sync_batchnorm(self) -> bool:
        """True when batch norm layers share statistics among processes during fit."""
        return isinstance(self.layer_sync, TorchSyncBatchNorm)

    @sync_batchnorm.setter
    def sync_batchnorm(self, value: bool) -> None:
        self.layer_sync = TorchSyncBatchNorm() if value else None

    @property
    def launcher(self) -> "Launcher | None":
        """Starts the other processes; None when there are none to start."""
        return self._launcher

    @property
    def lightning_module(self) -> Any:
        """The user's module; None before `connect`."""
        return self._lightning_module

    # ---- place in the group ------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.parallel_devices[self.local_rank]

    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return 0

    @property
    def local_rank(self) -> int:
        """Rank on this node."""
        return 0

    @property
    def node_rank(self) -> int:
        """Rank of this node."""
        return 0

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return 1

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return 1

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes files and logs."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """True when there is more than one process."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """``num_replicas`` and ``rank`` for samplers; None when data is not to be split."""
        return None

    # ---- life of a run -----------------------------------------------------------------------------------------------

    def connect(self, model: nn.Module) -> None:
        """Takes the user's module; its ``setup`` and ``configure_model`` hooks have not run yet."""
        self._lightning_module = model
        self.model = model
        self._steps = {}

    def configure_launcher(self) -> None:
        """Creates the launcher when other processes have to be started."""

    def setup_environment(self) -> None:
        """Makes the device current and joins the process group; runs in every process before any user hook."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)
        rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]

    def setup(self, trainer: Any) -> None:
        """Prepares model and optimizers for a run.

        Order: accelerator, synchronising layers, precision, move to the device, wrap or broadcast (`setup_model`), then
        when fitting the optimizers, and last the precision plugin's `connect`.

        Args:
            trainer: Gives ``state.fn``; `init_optimizers` is called on it when fitting.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        model = self._connected_model()
        if fitting and self.layer_sync is not None and self.is_distributed:
            model = self.layer_sync.apply(model)
        self.model = self.precision_plugin.convert_module(model)
        self.model_to_device()
        self.model = self.setup_model(self.model, fitting)
        if fitting:
            self.setup_optimizers(trainer)
        self.model, self.optimizers, self.lr_scheduler_configs = self.precision_plugin.connect(
            self.model, self.optimizers, self.lr_scheduler_configs
        )
        if fitting:
            self._optimizers_to(self.root_device)
        self._steps = {}

    def model_to_device(self) -> None:
        """Moves the model to this process's device, in place."""
        self._connected_model().to(self.root_device)

    def setup_model(self, model: nn.Module, fitting: bool) -> nn.Module:
        """Wraps the model, which is on its device.

        Args:
            model: The user's module.
            fitting: False in validate, test and predict.

        Returns:
            What becomes `model`.
        """
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Creates optimizers and schedulers through ``trainer.init_optimizers()``."""
        self.optimizers, self.lr_scheduler_configs = trainer.init_optimizers()

    def teardown(self) -> None:
        """Ends a run: unwraps the model, and moves it and the optimizers' state to the CPU. The group stays."""
        if self._lightning_module is not None:
            self.model = self._lightning_module
            if self.layer_sync is not None:
                self.model = self._lightning_module = self.layer_sync.revert(self.model)
        self._optimizers_to(torch.device("cpu"))
        if self._lightning_module is not None:
            self._lightning_module.cpu()
        self._steps = {}
        self.before_step = _nothing_before_step
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        if self._checkpoint_io is not None:
            self._checkpoint_io.teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run fails."""

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step_callable(self, name: str) -> Callable[..., Any]:
        """What the loop calls for a step, decided once per run.

        Args:
            name: ``"training_step"``, ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.

        Returns:
            The module's bound method itself when nothing wraps it, the leanest wrapper otherwise; a strategy subclass's
            own method of that name when it has one.
        """
        if getattr(type(self), name) is not getattr(Strategy, name):
            return getattr(self, name)
        return self._resolved_step(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``training_step``; override to do something around it."""
        return self._resolved_step("training_step")(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``validation_step``."""
        return self._resolved_step("validation_step")(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``test_step``."""
        return self._resolved_step("test_step")(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's ``predict_step``."""
        return self._resolved_step("predict_step")(*args, **kwargs)

    def wrap_step(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Puts a wrapped model around a step; the precision context goes around the result.

        Args:
            name: As in `step_callable`.
            step: The method of the user's module.
        """
        return step

    def _resolved_step(self, name: str) -> Callable[..., Any]:
        step = self._steps.get(name)
        if step is None:
            step = self.wrap_step(name, getattr(self.lightning_module, name))
            step = self._in_precision_context(name, step)
            self._steps[name] = step
        return step

    def _in_precision_context(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        plugin, context_name = self.precision_plugin, _CONTEXT_OF_STEP[name]
        untouched = (
            getattr(type(plugin), context_name) is getattr(Precision, context_name)
            and type(plugin).forward_context is Precision.forward_context
        )
        convert = None if type(plugin).convert_output is Precision.convert_output else plugin.convert_output
        if untouched and convert is None:
            return step
        if getattr(type(plugin), context_name) is getattr(Precision, context_name):
            context_name = "forward_context"  # one call fewer at each step
        context = getattr(plugin, context_name)

        def step_in_context(*args: Any, **kwargs: Any) -> Any:
            with context():
                output = step(*args, **kwargs)
            return output if convert is None else convert(output)

        return step_in_context

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called with the unscaled loss before each backward."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called with the loss after each backward."""

    def backward(self, closure_loss: Tensor, run_backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Backward with all that the strategy and the precision do around it.

        Args:
            closure_loss: The loss, unscaled.
            run_backward: Called with the scaled loss and the rest of the arguments; runs the user's hooks and
                ``backward``.
            *args: For ``run_backward``.
            **kwargs: For ``run_backward``.

        Returns:
            The scaled loss.
        """
        plugin = self.precision_plugin
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, self._lightning_module)
        run_backward(closure_loss, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, self._lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Runs the closure and the update.

        Args:
            optimizer: A torch optimizer.
            closure: Forward and backward; returns the loss.
            model: The user's module; default: the connected one.
            **kwargs: For ``optimizer.step``.
        """
        return self.precision_plugin.optimizer_step(
            optimizer,
            closure=closure,
            before_step=self.before_step,
            model=self._lightning_module if model is None else model,
            **kwargs,
        )

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context in which backward does not average gradients over processes."""
        return nullcontext()

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """The same as `no_sync`, under the name that ``toggle_model(sync_grad=False)`` of Lightning knows."""
        return self.no_sync()

    # ---- data and contexts -------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch to ``device`` (default: `root_device`)."""
        # on use: the loop takes the function itself and does not come here per step
        from leyden.base.tree import move_to_device

        return move_to_device(batch, self.root_device if device is None else device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wraps a loader; called once per loader and run."""
        return dataloader

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Context in which new tensors have this strategy's device and dtype.

        Args:
            empty_init: Leave out the initialisation of weights that are going to be loaded anyway.
        """
        with ExitStack() as stack:
            if empty_init:
                stack.enter_context(skip_initialisation())
            stack.enter_context(self.root_device)
            stack.enter_context(self.precision_plugin.tensor_init_context())
            yield

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Context around ``configure_model``, for strategies that split layers as they are made."""
        return nullcontext()

    def _connected_model(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError(f"{type(self).__name__} has no model yet: call connect(module) before setup")
        return self.model

    def _optimizers_to(self, device: torch.device) -> None:
        for optimizer in self.optimizers:
            optimizer_to_device(optimizer, device)


class SingleDeviceStrategy(Strategy):
    """One process on one device.

    Args:
        device: Where to run, e.g. ``"cpu"`` or ``"cuda:1"``.
        accelerator: See `Strategy`.
        checkpoint_io: See `Strategy`.
        precision_plugin: See `Strategy`.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        accelerator: "Accelerator | None" = None,
        checkpoint_io: "CheckpointIO | None" = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, [torch.device(device)])
