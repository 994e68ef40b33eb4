"""DistributedDataParallel: a copy of the model per process, gradients averaged during backward."""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_only
from leyden.dist.comm import Comm, NoComm, default_backend, init_process_group
from leyden.dist.env import DistInfo, LightningEnvironment, dist_info
from leyden.dist.launch import MultiProcessingLauncher, SubprocessScriptLauncher
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.tools import unwrap_optimizer

if TYPE_CHECKING:
    from leyden.checkpoint.io import CheckpointIO
    from leyden.dist.devices import Accelerator
    from leyden.dist.env import ClusterEnvironment

__all__ = ["DDPStrategy"]

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class DDPStrategy(Strategy):
    """One process per device; each trains on its share of the data and they agree on every gradient.

    Only fit wraps the model, and only `training_step` goes through the wrapper. Validation, test and prediction run the
    user's module itself.

    Args:
        accelerator: See `Strategy`.
        parallel_devices: One device per process of this node.
        cluster_environment: Knows the ranks; default: Leyden starts the processes.
        checkpoint_io: See `Strategy`.
        precision_plugin: See `Strategy`.
        ddp_comm_state: State of ``ddp_comm_hook``.
        ddp_comm_hook: Replaces the averaging of gradients, see ``torch.distributed.algorithms.ddp_comm_hooks``.
        ddp_comm_wrapper: Applied to the hook, e.g. ``fp16_compress_wrapper``.
        model_averaging_period: Optimizer steps between averages of the weights; needs a ``PostLocalSGDState``.
        process_group_backend: Default: ``"nccl"`` on CUDA, ``"gloo"`` otherwise.
        timeout: How long a collective may take.
        start_method: ``"popen"`` starts the script once per process, ``"spawn"``, ``"fork"`` and ``"forkserver"`` run
            the Trainer's function in worker processes and bring the results back.
        **ddp_kwargs: For ``DistributedDataParallel``, e.g. ``find_unused_parameters=True``. In manual optimisation
            ``find_unused_parameters`` is True unless given, since one backward seldom reaches all networks.
    """

    def __init__(
        self,
        accelerator: "Accelerator | None" = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: "ClusterEnvironment | None" = None,
        checkpoint_io: "CheckpointIO | None" = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, parallel_devices, cluster_environment)
        self.start_method = start_method
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._ddp_kwargs = ddp_kwargs
        self._comm_hook = (ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self._averaging_period = model_averaging_period
        self._info: DistInfo | None = None
        self._manual = False
        self._delayed_first_reduce = False

    # ---- place in the group ------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Processes on this node, one per device."""
        return len(self.parallel_devices)

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return self.num_processes * self.num_nodes if self._info is None else self._info.world_size

    @property
    def global_rank(self) -> int:
        """Rank among all processes; before the environment is set up, what it is going to be."""
        if self._info is not None:
            return self._info.global_rank
        environment = self._environment()
        if isinstance(environment, LightningEnvironment):
            return environment.node_rank() * self.num_processes + environment.local_rank()
        return environment.global_rank()

    @property
    def local_rank(self) -> int:
        """Rank on this node."""
        return self._environment().local_rank() if self._info is None else self._info.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this node."""
        return self._environment().node_rank() if self._info is None else self._info.node_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` of this process."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str:
        """The backend that was asked for, or the one that fits the device."""
        return self._process_group_backend or default_backend(self.root_device)

    # ---- life of a run -----------------------------------------------------------------------------------------------

    def configure_launcher(self) -> None:
        """Creates the launcher of ``start_method``, once."""
        if self._launcher is not None:
            return
        environment = self._environment()
        if self.start_method == "popen":
            self._launcher = SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = MultiProcessingLauncher(
                environment, self.num_processes, self.num_nodes, start_method=self.start_method
            )

    def setup_environment(self) -> None:
        """Fixes the ranks, makes the device current and joins the process group."""
        self._info = dist_info(self._environment(), self.num_processes, self.num_nodes)
        rank_zero_only.rank = self._info.global_rank  # pyright: ignore[reportFunctionMemberAccess]
        super().setup_environment()
        # on use: a script that never runs distributed needs neither
        from leyden.base.seed import reset_seed

        reset_seed()
        init_process_group(self._info, self.process_group_backend, self._timeout, self.root_device)
        if isinstance(self.comm, NoComm):
            self.comm = Comm(self.root_device)

    def setup(self, trainer: Any) -> None:
        """As the base; refuses synchronised batch norm where torch has none, before it fails in the first forward."""
        if self.sync_batchnorm and self.root_device.type == "cpu" and self.is_distributed:
            model = self._connected_model()
            if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
                raise MisconfigurationException(
                    "sync_batchnorm=True, but torch's SyncBatchNorm runs on GPUs only: pass accelerator='gpu' or "
                    "sync_batchnorm=False"
                )
        super().setup(trainer)

    def setup_model(self, model: nn.Module, fitting: bool) -> nn.Module:
        """Wraps the model for training; in other stages gives all ranks the weights of rank 0."""
        if not fitting or not any(parameter.requires_grad for parameter in model.parameters()):
            self.comm.broadcast_module_state(model)
            return model
        self._manual = not getattr(model, "automatic_optimization", True)
        self._delayed_first_reduce = False
        self.model = model
        self.configure_ddp()
        return self.model

    def configure_ddp(self) -> None:
        """Wraps `model`, which is on its device. Override it to do more, or to wrap in your own way."""
        model = self._connected_model()
        options = dict(self._ddp_kwargs)
        if self._manual and not options.get("static_graph"):
            options.setdefault("find_unused_parameters", True)
        # torch's advice: a side stream at construction keeps the model capturable in CUDA graphs
        on_stream = torch.cuda.stream(torch.cuda.Stream()) if self.root_device.type == "cuda" else nullcontext()
        with on_stream:
            # No device_ids: the batch is on the device already, DDP must not walk through it again at each step.
            wrapped = DistributedDataParallel(_StepModule(model), **options)
        self._register_comm_hook(wrapped)
        self.model = wrapped

    def setup_optimizers(self, trainer: Any) -> None:
        """As the base, and averages weights after optimizer steps when that was asked for."""
        super().setup_optimizers(trainer)
        self._average_weights()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def wrap_step(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Sends `training_step` through DistributedDataParallel; the other steps are the module's own."""
        ddp = self.model
        if name != "training_step" or not isinstance(ddp, DistributedDataParallel):
            return step
        if not isinstance(ddp.module, _StepModule):  # a subclass's `configure_ddp` wrapped the user's module itself
            ddp.module = _StepModule(ddp.module)
        holder: _StepModule = ddp.module
        if self._manual:
            return self._manual_step(ddp, holder, step)
        holder.step = step

        def distributed_step(*args: Any, **kwargs: Any) -> Any:
            try:
                return ddp(*args, **kwargs)
            except RuntimeError as error:
                if _UNFINISHED in str(error):
                    raise _with_names(error, ddp, self.lightning_module) from error
                raise

        return distributed_step

    def _manual_step(
        self, ddp: DistributedDataParallel, holder: "_StepModule", step: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The user calls backward inside the step: DDP must be made ready before each backward, not after forward."""

        def step_and_hold(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            ddp.require_backward_grad_sync = False  # all backwards are done: nothing to prepare after forward
            return output

        holder.step = step_and_hold

        def distributed_step(*args: Any, **kwargs: Any) -> Any:
            try:
                return ddp(*args, **kwargs)
            except RuntimeError as error:
                if _UNFINISHED in str(error):
                    raise _with_names(error, ddp, self.lightning_module) from error
                raise
            finally:
                ddp.require_backward_grad_sync = True
                ddp.require_forward_param_sync = True  # or buffers would drift apart

        return distributed_step

    def pre_backward(self, closure_loss: Tensor) -> None:
        """In manual optimisation, makes DDP expect one more backward; call it before each."""
        if not self._manual or not isinstance(self.model, DistributedDataParallel):
            return
        ddp = self.model
        if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        outputs = [closure_loss] if ddp.find_unused_parameters and not ddp.static_graph else []
        ddp.reducer._rebuild_buckets()
        with warnings.catch_warnings():
            if "find_unused_parameters" not in self._ddp_kwargs:
                # torch's hint to switch it off again is for those who switched it on
                warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            ddp.reducer.prepare_for_backward(outputs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """With a static graph and manual optimisation, starts the first reduction, which DDP itself would delay."""
        if self._manual and not self._delayed_first_reduce and isinstance(self.model, DistributedDataParallel):
            self._delayed_first_reduce = True
            if self.model.static_graph:
                self.model.reducer._delay_all_reduce()  # pyright: ignore[reportAttributeAccessIssue]

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context in which backward leaves gradients local, for the steps between two updates."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def teardown(self) -> None:
        """As the base; the process group stays, since the script's other processes go on with it too."""
        super().teardown()
        self._environment().teardown()

    # ---- parts of setup ----------------------------------------------------------------------------------------------

    def _environment(self) -> "ClusterEnvironment":
        if self.cluster_environment is None:
            self.cluster_environment = LightningEnvironment()
        return self.cluster_environment

    def _register_comm_hook(self, ddp: DistributedDataParallel) -> None:
        state, hook, wrapper = self._comm_hook
        if hook is not None:
            ddp.register_comm_hook(state=state, hook=hook if wrapper is None else wrapper(hook))

    def _average_weights(self) -> None:
        """Post-local SGD: gradients stay local after a warm-up, and weights are averaged every so many steps."""
        state = self._comm_hook[0]
        if state is None:
            return
        # on use: few need these, and they are slow to import
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

        if not isinstance(state, PostLocalSGDState):
            return
        if self._averaging_period is None:
            raise ValueError("ddp_comm_state is a PostLocalSGDState: also pass model_averaging_period, in steps")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "model averaging can't work with precision='16-mixed', since ranks with local gradients skip different "
                "steps: use precision='bf16-mixed'"
            )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

        for optimizer in map(unwrap_optimizer, self.optimizers):
            if isinstance(optimizer, (ZeroRedundancyOptimizer, PostLocalSGDOptimizer)):
                raise ValueError(
                    f"model averaging can't work with {type(optimizer).__name__}, which averages or splits by itself; "
                    "use a plain optimizer"
                )
            averager = PeriodicModelAverager(self._averaging_period, warmup_steps=state.start_localSGD_iter)
            optimizer.register_step_post_hook(_Average(averager))


class _Average:
    """Optimizer hook: averages the weights that were just updated, when that is due."""

    def __init__(self, averager: Any) -> None:
        self._averager = averager

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._averager.average_parameters(parameter for parameter in parameters if parameter.grad is not None)


class _StepModule(nn.Module):
    """What DDP wraps: its forward is the user's `training_step`, so nothing is patched when a step runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.step: Callable[..., Any] = module.forward
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # `trainer.model.module.anything` reaches the user's module
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _with_names(error: RuntimeError, ddp: DistributedDataParallel, module: nn.Module) -> RuntimeError:
    """Adds the names of the parameters that got no gradient to DDP's error, which has numbers only."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    numbers = [int(number) for number in found[1].split()] if found else []
    if numbers and max(numbers) < len(trained) and not ddp.parameters_to_ignore:
        unused = [trained[number] for number in numbers]
    else:
        unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    return RuntimeError(
        f"these parameters took no part in the loss of the last training_step: {', '.join(unused) or 'unknown'}; DDP "
        "waits for a gradient of each. Use them, set requires_grad=False, or pass "
        "strategy='ddp_find_unused_parameters_true'"
    )
