"""What a run computes on: accelerator, devices, who started the processes, strategy and precision, fitted together."""

import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_info, warn_once
from leyden.dist.devices import Accelerator, CUDAAccelerator, resolve_accelerator
from leyden.dist.env import ClusterEnvironment, TorchElasticEnvironment, detect_environment
from leyden.dist.worker import TrainWorkerEnvironment, current
from leyden.strategies.base import SingleDeviceStrategy, Strategy
from leyden.strategies.layer_sync import LayerSync, TorchSyncBatchNorm
from leyden.strategies.precision import Precision, precision_plugin, resolve_precision
from leyden.strategies.registry import StrategyRegistry
from leyden.trainer.parse import Problems, is_interactive

if TYPE_CHECKING:
    from leyden.checkpoint.io import CheckpointIO

__all__ = ["Hardware", "Plugins", "resolve_hardware", "split_plugins"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugins:
    """``Trainer(plugins=...)`` by type."""

    precision: Precision | None = None
    checkpoint_io: "CheckpointIO | None" = None
    cluster_environment: ClusterEnvironment | None = None
    layer_sync: LayerSync | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What `resolve_hardware` found; the strategy holds all the other parts."""

    accelerator: Accelerator
    strategy: Strategy
    precision_plugin: Precision
    cluster_environment: ClusterEnvironment
    devices: list[torch.device]
    num_nodes: int


def split_plugins(plugins: Any, sync_batchnorm: bool) -> Plugins:
    """Sorts plugins by type.

    Raises:
        MisconfigurationException: One is of no known type, or there are two of a type.
    """
    from leyden.checkpoint.io import CheckpointIO

    kinds = {
        "precision": Precision,
        "checkpoint_io": CheckpointIO,
        "cluster_environment": ClusterEnvironment,
        "layer_sync": LayerSync,
    }
    found: dict[str, Any] = {}
    several = isinstance(plugins, Iterable) and not isinstance(plugins, str)
    given = [] if plugins is None else list(plugins) if several else [plugins]
    for plugin in given:
        name = next((name for name, kind in kinds.items() if isinstance(plugin, kind)), None)
        if name is None:
            raise MisconfigurationException(
                f"plugins holds {plugin!r}, which is none of {', '.join(kind.__name__ for kind in kinds.values())}."
            )
        if name in found:
            raise MisconfigurationException(
                f"plugins holds two of the type {kinds[name].__name__} ({type(found[name]).__name__} and"
                f" {type(plugin).__name__}); pass at most one of each type."
            )
        found[name] = plugin
    if sync_batchnorm and not isinstance(found.setdefault("layer_sync", TorchSyncBatchNorm()), TorchSyncBatchNorm):
        raise MisconfigurationException(
            f"sync_batchnorm=True conflicts with the plugin {type(found['layer_sync']).__name__}; pass one of the two."
        )
    return Plugins(**found)


def resolve_hardware(
    *,
    accelerator: Any,
    strategy: Any,
    devices: Any,
    num_nodes: Any,
    precision: Any,
    plugins: Any,
    sync_batchnorm: bool,
    problems: Problems,
) -> Hardware | None:
    """Reads the arguments of these names, which depend on each other, and connects what they stand for.

    A strategy instance wins over ``"auto"``; where it disagrees with another argument, that is a problem.

    Args:
        problems: Takes all that is wrong.

    Returns:
        The parts, connected; None when there are problems.
    """
    before = Problems()
    with before.caught():
        _check_strategy_argument(strategy)
    with before.caught():
        if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 1:
            raise ValueError(f"num_nodes={num_nodes!r} must be an int >= 1.")
    with before.caught():
        resolve_precision(precision)
    sorted_plugins = None
    with before.caught():
        sorted_plugins = split_plugins(plugins, sync_batchnorm)
    found_accelerator = None
    with before.caught():
        found_accelerator = _accelerator(accelerator, strategy)
    if found_accelerator is not None and devices in ([], 0, "0"):
        before.add(
            MisconfigurationException,
            f"devices={devices!r} leaves nothing to run on with accelerator={found_accelerator.name()!r}; pass"
            " devices>=1, or 'auto'.",
        )
    if before or sorted_plugins is None or found_accelerator is None:
        problems.extend(before)
        return None
    with problems.caught():
        return _connect(found_accelerator, strategy, devices, num_nodes, precision, sorted_plugins)
    return None


def _check_strategy_argument(strategy: Any) -> None:
    if isinstance(strategy, Strategy) or strategy == "auto":
        return
    if not isinstance(strategy, str):
        raise ValueError(f"strategy={strategy!r} must be a name (str) or a Strategy instance.")
    name = strategy.lower()
    if name == "auto":
        return
    StrategyRegistry.get_description(name)  # unknown names, and those of later versions, raise
    if ("fork" in name or "notebook" in name) and "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError(f"strategy={strategy!r} forks processes, which this platform can't; pass 'ddp_spawn'.")


def _accelerator(argument: Any, strategy: Any) -> Accelerator:
    """The accelerator that was asked for, or else the one of the strategy's devices, or the best there is."""
    held = strategy.accelerator if isinstance(strategy, Strategy) else None
    if argument != "auto":
        accelerator = resolve_accelerator(argument)
        if held is not None and type(held) is not type(accelerator):
            raise MisconfigurationException(
                f"accelerator={argument!r} conflicts with the {type(held).__name__} of the strategy; pass one of them."
            )
        devices = _own_devices(strategy)
        if devices and devices[0].type != accelerator.name() and accelerator.name() in ("cpu", "cuda", "mps"):
            raise MisconfigurationException(
                f"accelerator={argument!r} conflicts with the devices of the strategy, {devices}; pass one of them."
            )
        return accelerator
    if held is not None:
        return resolve_accelerator(held)
    devices, worker = _own_devices(strategy), current()
    if not devices and worker is not None:
        return resolve_accelerator(torch.device(worker.device).type)  # a CPU worker leaves the GPUs to others
    return resolve_accelerator(devices[0].type if devices else "auto")


def _own_devices(strategy: Any) -> list[torch.device]:
    """The devices that the user gave to a strategy instance; none when it has only its default."""
    if not isinstance(strategy, Strategy):
        return []
    if isinstance(strategy, SingleDeviceStrategy):
        return strategy.parallel_devices
    default = [torch.device("cpu")]
    return [] if strategy.parallel_devices == default else list(strategy.parallel_devices)


def _connect(
    accelerator: Accelerator, strategy: Any, devices: Any, num_nodes: int, precision: Any, plugins: Plugins
) -> Hardware:
    held: Strategy | None = strategy if isinstance(strategy, Strategy) else None
    environment = _environment(held, plugins)
    parallel_devices = _own_devices(strategy)
    if not parallel_devices and isinstance(environment, TrainWorkerEnvironment):
        parallel_devices, num_nodes = _worker_devices(accelerator, environment, devices)
    elif not parallel_devices:
        if devices == "auto":
            devices, num_nodes = _auto_devices(accelerator, environment, num_nodes)
        parallel_devices = list(accelerator.get_parallel_devices(accelerator.parse_devices(devices)))
    precision_part = _precision(held, plugins, precision, parallel_devices[0].type)
    built = held or _strategy(strategy, parallel_devices, num_nodes, environment)

    built.accelerator = accelerator
    built.precision_plugin = precision_part
    built.parallel_devices = parallel_devices
    built.num_nodes = num_nodes
    if plugins.checkpoint_io is not None:
        built.checkpoint_io = plugins.checkpoint_io
    if plugins.layer_sync is not None:
        built.layer_sync = plugins.layer_sync
    if not isinstance(built, SingleDeviceStrategy):
        built.cluster_environment = environment
    if parallel_devices[0].type == "mps" and built.distributed_sampler_kwargs is not None:
        raise ValueError(
            f"strategy={strategy!r} connects several processes, which MPS can't; pass strategy='auto', or"
            " accelerator='cpu'."
        )
    if not isinstance(environment, TrainWorkerEnvironment):  # the workers are all there
        built.configure_launcher()
    if is_interactive() and built.launcher is not None and not built.launcher.is_interactive_compatible:
        raise MisconfigurationException(
            f"strategy={strategy!r} starts the script again, which a notebook has not; pass strategy='ddp_notebook', or"
            " run your code as a script."
        )
    return Hardware(
        accelerator=accelerator,
        strategy=built,
        precision_plugin=precision_part,
        cluster_environment=environment,
        devices=parallel_devices,
        num_nodes=num_nodes,
    )


def _environment(held: Strategy | None, plugins: Plugins) -> ClusterEnvironment:
    given = plugins.cluster_environment
    own = None if held is None else held.cluster_environment
    if given is not None and own is not None and given is not own:
        raise MisconfigurationException(
            f"The plugin {type(given).__name__} conflicts with the {type(own).__name__} of the strategy; pass one of"
            " them."
        )
    return given or own or detect_environment()


def _auto_devices(accelerator: Accelerator, environment: ClusterEnvironment, num_nodes: int) -> tuple[Any, int]:
    """What ``devices="auto"`` means here: the number of devices, and of nodes."""
    if isinstance(environment, TorchElasticEnvironment) and "LOCAL_WORLD_SIZE" in os.environ:
        # torchrun decided it already; any other number would leave its processes without a device, or be one too many
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, max(num_nodes, environment.world_size() // local)
    count = accelerator.auto_device_count()
    if is_interactive() and isinstance(accelerator, CUDAAccelerator) and count > 1:
        rank_zero_info(
            "Using 1 of %d GPUs, because this is an interactive session; devices=%d uses them all.", count, count
        )
        count = 1
    return count, num_nodes


def _worker_devices(
    accelerator: Accelerator, environment: TrainWorkerEnvironment, devices: Any
) -> tuple[list[torch.device], int]:
    """The devices of this node's workers, and the number of nodes: both were decided when the workers were started."""
    found = environment.devices()
    own, info = torch.device(environment.worker.device), environment.worker.info
    if accelerator.name() != own.type and accelerator.name() in ("cpu", "cuda", "mps"):
        raise MisconfigurationException(
            f"accelerator={accelerator.name()!r}, but the device of this worker is {str(own)!r}: pass"
            " accelerator='auto', and decide on GPUs by ScalingConfig(use_gpu=...)."
        )
    if devices != "auto" and len(accelerator.get_parallel_devices(accelerator.parse_devices(devices))) != len(found):
        warn_once(
            f"devices={devices!r} is ignored: ScalingConfig(num_workers=...) decided on {info.world_size} workers,"
            f" {len(found)} of them on this node. Pass devices='auto'."
        )
    return found, -(-info.world_size // info.local_world_size)


def _precision(held: Strategy | None, plugins: Plugins, argument: Any, device_type: str) -> Precision:
    own = None if held is None else held.precision_plugin
    if type(own) is Precision:  # every strategy has this one, so nobody asked for it
        own = None
    if own is not None and plugins.precision is not None and own is not plugins.precision:
        raise MisconfigurationException(
            f"The plugin {type(plugins.precision).__name__} conflicts with the {type(own).__name__} of the strategy;"
            " pass one of them."
        )
    given = plugins.precision or own
    if given is None:
        return precision_plugin(argument, device_type)
    if argument is not None and (plugins.precision is not None or resolve_precision(argument) != given.precision):
        raise ValueError(
            f"precision={argument!r} conflicts with the {type(given).__name__} in plugins; pass one of them."
        )
    return given


class _LoneWorkerStrategy(SingleDeviceStrategy):
    """One worker of an orchestrated run; a restart may have more of them, or fewer."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """As for many, so that the order of the samples does not depend on their number."""
        return {"num_replicas": 1, "rank": 0}


def _strategy(argument: Any, devices: list[torch.device], num_nodes: int, environment: ClusterEnvironment) -> Strategy:
    name = argument.lower()
    if name == "auto":
        if num_nodes == 1 and len(devices) == 1:
            lone = isinstance(environment, TrainWorkerEnvironment)
            return (_LoneWorkerStrategy if lone else SingleDeviceStrategy)(device=devices[0])
        name = "ddp_fork" if num_nodes == 1 and is_interactive() else "ddp"
    if name != "single_device":
        return StrategyRegistry.get(name)
    if num_nodes > 1 or len(devices) > 1:
        raise MisconfigurationException(
            f"strategy='single_device' runs one process, but devices={len(devices)} times num_nodes={num_nodes} are"
            " asked for; pass devices=1, or strategy='ddp'."
        )
    return StrategyRegistry.get(name, device=devices[0])
