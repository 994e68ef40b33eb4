"""What this machine has to offer, asked without starting the CUDA driver."""

import os
import re
from pathlib import Path

__all__ = ["cpu_count", "device_ids", "oom_kills"]


def cpu_count() -> int:
    """CPUs that this process may use: those of its affinity, or of its container's quota where that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _read("/sys/fs/cgroup/cpu.max", "max 1").split()[:2]
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def device_ids() -> tuple[int, ...]:
    """NVIDIA devices that are visible here: their numbers, or positions where ``CUDA_VISIBLE_DEVICES`` has names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            names = os.listdir("/dev")
        except OSError:
            names = []
        return tuple(sorted(int(name[6:]) for name in names if re.fullmatch(r"nvidia\d+", name)))
    names = [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return tuple(map(int, names)) if all(map(str.isdigit, names)) else tuple(range(len(names)))


def oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory, in this container or on this machine; 0: unknown."""
    group = re.search(r"^0::(/.*)$", _read("/proc/self/cgroup", ""), re.MULTILINE)
    texts = [_read("/proc/vmstat", "")]
    if group is not None:
        texts.append(_read(f"/sys/fs/cgroup{group[1]}/memory.events", ""))
    return sum(int(count) for text in texts for count in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE))


def _read(path: str, default: str) -> str:
    try:
        return Path(path).read_text() or default
    except OSError:  # another system, or not ours to read
        return default
