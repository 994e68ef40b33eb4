"""`TorchTrainer`, and what any PyTorch training function can use in a worker."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from leyden.dist.worker import Worker, current
from leyden.train import session
from leyden.train.loaders import deliver, distribute
from leyden.train.trainer import TorchConfig, TorchTrainer

__all__ = [
    "TorchConfig",
    "TorchTrainer",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
]


def _worker(function: str) -> Worker:
    worker = current()
    if worker is None:
        raise RuntimeError(
            f"leyden.train.torch.{function}() is for the training function that a TorchTrainer runs in its workers; "
            "this process is no worker. ScalingConfig(num_workers=0) makes it one while TorchTrainer.fit() runs"
        )
    return worker


def get_device() -> torch.device:
    """The device of this worker; the first one, where it has several.

    Raises:
        RuntimeError: This process is no worker.
    """
    return torch.device(_worker("get_device").device)


def get_devices() -> list[torch.device]:
    """All devices of this worker: one, unless ``resources_per_worker={"GPU": n}`` asks for more.

    Raises:
        RuntimeError: This process is no worker.
    """
    worker, current_session = _worker("get_devices"), session.current()
    if current_session is None or not current_session.plan.devices:
        return [torch.device(worker.device)]
    plan = current_session.plan
    visible = plan.visible_devices or plan.devices
    return [torch.device("cuda", visible.index(number)) for number in plan.devices]


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Moves a model to the worker's device and, where there are several workers, wraps it for them.

    Args:
        model: Built in the training function.
        move_to_device: False leaves it where it is; a device takes the place of the worker's own.
        parallel_strategy: ``"ddp"``: gradients are averaged over the workers; None: no wrapper.
        parallel_strategy_kwargs: For ``DistributedDataParallel``.

    Raises:
        RuntimeError: This process is no worker.
        ValueError: The strategy is unknown, or not in this version (``"fsdp"``).
    """
    worker = _worker("prepare_model")
    if parallel_strategy not in ("ddp", None):
        advice = "sharded training is not in this version" if parallel_strategy == "fsdp" else "it is unknown"
        raise ValueError(f"prepare_model(parallel_strategy={parallel_strategy!r}): {advice}; use 'ddp' or None")
    device = torch.device(worker.device if isinstance(move_to_device, bool) else move_to_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device is not False:
        model = model.to(device)
    if parallel_strategy is None or worker.info.world_size == 1:
        return model
    options: dict[str, Any] = {} if device.type == "cpu" or move_to_device is False else {"device_ids": [device]}
    return nn.parallel.DistributedDataParallel(model, **{**options, **(parallel_strategy_kwargs or {})})


def prepare_data_loader(
    data_loader: torch.utils.data.DataLoader,
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> torch.utils.data.DataLoader:
    """Deals a loader's samples out to the workers and delivers the batches on their devices.

    The result keeps every argument that the loader was made with, and its class. Samplers and batch samplers of any
    kind are dealt out in their own order. Call ``loader.sampler.set_epoch(epoch)`` at the start of each epoch, for
    another order in each.

    Args:
        data_loader: Built in the training function, the same in all workers.
        add_dist_sampler: False: every worker gets all samples.
        move_to_device: False: the batches stay on the CPU.
        auto_transfer: On CUDA, copy the next batch while this one is computed on.

    Raises:
        RuntimeError: This process is no worker.
        TypeError: The loader's sampler has no length.
    """
    worker = _worker("prepare_data_loader")
    if add_dist_sampler and worker.info.world_size > 1:
        data_loader = distribute(data_loader, worker.info.world_size, worker.info.global_rank)
    if move_to_device:
        data_loader = deliver(data_loader, torch.device(worker.device), auto_transfer)
    return data_loader


def enable_reproducibility(seed: int = 0) -> None:
    """Makes this worker's results the same in every run: seeds, and deterministic algorithms, which may be slower.

    Args:
        seed: For Python, numpy and torch.
    """
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with a fixed workspace


_REMOVED = {
    "accelerate": "precision and devices are the Trainer's, or torch.autocast's, business",
    "prepare_optimizer": "use the optimizer as it is, with torch.amp.GradScaler for half precision",
    "backward": "call loss.backward()",
}


def __getattr__(name: str) -> Any:
    hint = f": Ray Train removed it too; {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
