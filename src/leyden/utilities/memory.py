"""Memory: which errors mean that it ran out, and what gives some of it back."""

from leyden.base.memory import (
    garbage_collection_cuda,
    is_cuda_out_of_memory,
    is_cudnn_snafu,
    is_oom_error,
    is_out_of_cpu_memory,
    recursive_detach,
)

__all__ = [
    "garbage_collection_cuda",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_oom_error",
    "is_out_of_cpu_memory",
    "recursive_detach",
]
