"""Memory: which errors mean that it ran out, and what gives some of it back."""

import gc
from typing import Any

import torch
from torch import Tensor

from leyden.base.tree import apply_to_collection

__all__ = [
    "garbage_collection_cuda",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_oom_error",
    "is_out_of_cpu_memory",
    "recursive_detach",
]


def _says(exception: BaseException, *parts: str) -> bool:
    text = str(exception)
    return isinstance(exception, RuntimeError) and all(part in text for part in parts)


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Whether a CUDA allocation failed."""
    return isinstance(exception, torch.cuda.OutOfMemoryError) or _says(exception, "CUDA", "out of memory")


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Whether cuDNN failed in the way in which it does when it finds no room for its workspace."""
    return _says(exception, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether an allocation in host memory failed."""
    return _says(exception, "DefaultCPUAllocator: can't allocate memory")


def is_oom_error(exception: BaseException) -> bool:
    """Whether ``exception`` means that memory ran out, on whichever device."""
    return is_cuda_out_of_memory(exception) or is_cudnn_snafu(exception) or is_out_of_cpu_memory(exception)


def garbage_collection_cuda() -> None:
    """Collects garbage and gives the CUDA memory that PyTorch caches back to the device."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        # Emptying the cache itself can fail for want of memory; this is called to recover from just that.
        if not is_oom_error(error):
            raise


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Detaches every tensor in a nested collection; with ``to_cpu`` also moves it to the CPU."""

    def detach(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu() if to_cpu else tensor.detach()

    return apply_to_collection(in_dict, Tensor, detach)
