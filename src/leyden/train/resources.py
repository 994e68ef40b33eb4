"""Names and amounts in ``resources_per_worker``: a wrong spelling must not become a resource that no node has."""

import math
from typing import Any

__all__ = ["resource_problems"]

# Lower-cased spellings people use -> the resource they mean.
_MEANT = {
    **dict.fromkeys(("cpu", "cpus", "num_cpu", "num_cpus", "core", "cores", "num_cores"), "CPU"),
    **dict.fromkeys(("gpu", "gpus", "num_gpu", "num_gpus", "cuda"), "GPU"),
    **dict.fromkeys(("tpu", "tpus", "num_tpu", "num_tpus"), "TPU"),
    **dict.fromkeys(("memory", "mem", "ram", "memory_bytes"), "memory"),
    "object_store_memory": "object_store_memory",
}
_MIN_MEMORY_BYTES = 1 << 20


def resource_problems(resources: Any, use_gpu: bool) -> list[str]:
    """What is wrong with ``resources_per_worker``, one sentence each.

    Args:
        resources: What the user passed; None is right.
        use_gpu: `ScalingConfig.use_gpu`.
    """
    if resources is None:
        return []
    if not isinstance(resources, dict):
        return [f"resources_per_worker={resources!r}: pass a dict such as {{'CPU': 4, 'GPU': 1}}"]
    problems = []
    for name, amount in resources.items():
        meant = _MEANT.get(name.lower()) if isinstance(name, str) else None
        if not isinstance(name, str) or not name:
            problems.append(f"resources_per_worker has the key {name!r}: names are text")
        elif meant == "TPU":
            problems.append(f"resources_per_worker[{name!r}]: TPUs are not supported")
        elif meant is not None and meant != name:
            problems.append(f"resources_per_worker[{name!r}]: did you mean {meant!r}? Ray's names have this spelling")
        problems += _amount_problems(name, amount)
    problems += _gpu_problems(resources.get("GPU"), use_gpu)
    return problems


def _amount_problems(name: Any, amount: Any) -> list[str]:
    where = f"resources_per_worker[{name!r}]={amount!r}"
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not math.isfinite(amount) or amount < 0:
        return [f"{where}: pass a number, 0 or more"]
    if name == "memory" and 0 < amount < _MIN_MEMORY_BYTES:
        return [f"{where}: memory is in bytes; for 8 GiB pass {8 * 1024**3}"]
    if name == "GPU" and amount > 1 and amount != int(amount):
        return [f"{where}: more than one GPU can't be shared; pass a whole number, or a part of 1"]
    return []


def _gpu_problems(gpus: Any, use_gpu: bool) -> list[str]:
    if not isinstance(gpus, (int, float)):
        return []
    if gpus and not use_gpu:
        return [f"resources_per_worker['GPU']={gpus!r} with use_gpu=False: pass use_gpu=True, or remove 'GPU'"]
    if not gpus and use_gpu:
        return ["resources_per_worker['GPU']=0 with use_gpu=True: remove 'GPU', or pass use_gpu=False"]
    return []
