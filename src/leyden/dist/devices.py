"""What a process computes on: CPU, CUDA and MPS, and the rules of the ``devices`` argument."""

import platform
from abc import ABC, abstractmethod
from typing import Any

import torch

from leyden.base.errors import MisconfigurationException
from leyden.base.log import rank_zero_info
from leyden.dist.plugins import PluginRegistry

__all__ = [
    "Accelerator",
    "AcceleratorRegistry",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "find_usable_cuda_devices",
    "parse_cpu_devices",
    "parse_gpu_devices",
    "resolve_accelerator",
]

_AUTO = "auto"


class Accelerator(ABC):
    """One kind of hardware. Subclass it, register it in `AcceleratorRegistry`, and pass its name or an instance."""

    def setup_device(self, device: torch.device) -> None:  # noqa: B027 - optional by design
        """Makes ``device`` current in this process, before any model is there."""

    def setup(self, trainer: Any) -> None:  # noqa: B027 - optional by design
        """Called once per run, before the model moves to the device."""

    def teardown(self) -> None:  # noqa: B027 - optional by design
        """Called once per run, after the model has left the device."""

    def get_device_stats(self, device: str | torch.device) -> dict[str, Any]:
        """Figures of the device for monitors: name -> number."""
        raise NotImplementedError(f"{type(self).__name__} has no device statistics")

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Reads the ``devices`` argument (never ``"auto"``) into what `get_parallel_devices` takes."""

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """One ``torch.device`` per process of this node."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """How many devices ``devices="auto"`` means."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """True when this host has the hardware."""

    @staticmethod
    def name() -> str:
        """The name in ``accelerator=...``."""
        return ""

    @classmethod
    def register_accelerators(cls, registry: PluginRegistry) -> None:
        """Adds the class to a registry under its name."""
        registry.register(cls.name(), cls, description=cls.__name__, override=True)


class CPUAccelerator(Accelerator):
    """The CPU; ``devices=n`` means n processes."""

    def setup_device(self, device: torch.device) -> None:
        """Raises MisconfigurationException when the device is not a CPU."""
        _check_type(device, "cpu")

    def get_device_stats(self, device: str | torch.device) -> dict[str, float]:
        """Host memory, CPU and swap use, in percent."""
        import psutil

        return {
            "cpu_vm_percent": psutil.virtual_memory().percent,
            "cpu_percent": psutil.cpu_percent(),
            "cpu_swap_percent": psutil.swap_memory().percent,
        }

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """A count: an int above zero, or a str of one."""
        return parse_cpu_devices(devices)

    @staticmethod
    def get_parallel_devices(devices: int | str) -> list[torch.device]:
        """``devices`` times the CPU."""
        return [torch.device("cpu")] * parse_cpu_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """1: more processes than one rarely pay on a CPU."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True

    @staticmethod
    def name() -> str:
        """``"cpu"``."""
        return "cpu"


class CUDAAccelerator(Accelerator):
    """NVIDIA GPUs, and AMD GPUs under ROCm."""

    def setup_device(self, device: torch.device) -> None:
        """Makes the GPU current. Raises MisconfigurationException when the device is no GPU."""
        _check_type(device, "cuda")
        torch.cuda.set_device(device)
        _mention_tensor_cores(device)

    def teardown(self) -> None:
        """Gives cached memory back, so that the next user of the GPU finds it."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def get_device_stats(self, device: str | torch.device) -> dict[str, Any]:
        """``torch.cuda.memory_stats``: bytes and counts."""
        return torch.cuda.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """A count, -1 for all, or indices."""
        return parse_gpu_devices(devices, torch.cuda.device_count(), "cuda")

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """``cuda:i`` for each index."""
        return [torch.device("cuda", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """All that are visible."""
        return torch.cuda.device_count()

    @staticmethod
    def is_available() -> bool:
        """True when a GPU is visible."""
        # device_count asks NVML first, so a process that forks later keeps an untouched CUDA; is_available does not
        return torch.cuda.device_count() > 0

    @staticmethod
    def name() -> str:
        """``"cuda"``."""
        return "cuda"


class MPSAccelerator(Accelerator):
    """The GPU of Apple silicon; there is one."""

    def setup_device(self, device: torch.device) -> None:
        """Raises MisconfigurationException when the device is not MPS."""
        _check_type(device, "mps")

    def get_device_stats(self, device: str | torch.device) -> dict[str, float]:
        """Bytes in use by torch and by the driver, and host use in percent."""
        return {
            "mps_allocated_bytes": float(torch.mps.current_allocated_memory()),
            "mps_driver_bytes": float(torch.mps.driver_allocated_memory()),
            **CPUAccelerator().get_device_stats(device),
        }

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """1, -1, ``"0,"`` or ``[0]``."""
        return parse_gpu_devices(devices, int(MPSAccelerator.is_available()), "mps")

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """``mps:i`` for each index."""
        return [torch.device("mps", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """1."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """True on Apple silicon with a torch that supports it."""
        return torch.backends.mps.is_available() and platform.processor() in ("arm", "arm64")

    @staticmethod
    def name() -> str:
        """``"mps"``."""
        return "mps"


AcceleratorRegistry = PluginRegistry("accelerator")
for _cls in (CPUAccelerator, CUDAAccelerator, MPSAccelerator):
    _cls.register_accelerators(AcceleratorRegistry)
AcceleratorRegistry.mark_absent(
    "tpu", "needs torch_xla, which this version of Leyden does not support yet; use 'cpu', 'cuda', 'mps' or 'auto'"
)


def resolve_accelerator(accelerator: str | Accelerator) -> Accelerator:
    """Reads ``Trainer(accelerator=...)``.

    Args:
        accelerator: ``"auto"`` (the best this host has), ``"gpu"`` (CUDA or MPS), a registered name, or an instance.

    Raises:
        ValueError: The name is unknown.
        MisconfigurationException: The host lacks the hardware.
    """
    if isinstance(accelerator, Accelerator):
        found, asked = accelerator, type(accelerator).__name__
    else:
        asked = accelerator
        if not isinstance(accelerator, str):
            raise ValueError(f"accelerator={accelerator!r} must be a name (str) or an Accelerator instance")
        if accelerator == _AUTO:
            accelerator = _best_available()
        elif accelerator == "gpu":
            accelerator = "mps" if MPSAccelerator.is_available() else "cuda"
        found = AcceleratorRegistry.get(accelerator)
    if not found.is_available():
        here = [name for name in AcceleratorRegistry.names() if AcceleratorRegistry.get_class(name).is_available()]
        raise MisconfigurationException(
            f"accelerator={asked!r} was asked for, but this host has none that works with the installed torch "
            f"{torch.__version__}; available here: {', '.join(map(repr, here))}"
        )
    return found


def parse_cpu_devices(devices: Any) -> int:
    """Reads ``devices`` for CPU processes: an int above zero or a str of one.

    Raises:
        TypeError: Anything else; indices make no sense on a CPU.
    """
    if isinstance(devices, str) and devices.strip().isdigit():
        devices = int(devices)
    if type(devices) is not int or devices <= 0:
        raise TypeError(
            f"devices={devices!r} on the CPU must be a number of processes, an int above 0; indices are for GPUs: "
            "pass devices=1, or accelerator='gpu'"
        )
    return devices


def parse_gpu_devices(devices: Any, available: int, kind: str) -> list[int]:
    """Reads ``devices`` for GPUs into indices.

    Args:
        devices: n > 0 or ``"n"`` (the first n), -1 or ``"-1"`` (all), ``"0,2"`` or ``"1,"`` or ``[0, 2]`` (these).
        available: Number of GPUs on this host.
        kind: ``"cuda"`` or ``"mps"``, for messages.

    Raises:
        TypeError: Not an int, str or list/tuple of ints.
        MisconfigurationException: Zero devices, repeated indices, or more than the host has.
    """
    indices = _listed(devices, available)
    if not indices:
        if devices in (-1, "-1"):
            raise MisconfigurationException(f"devices={devices!r} asks for all {kind} GPUs, but this host has none")
        raise MisconfigurationException(
            f"devices={devices!r} asks for no GPU at all; pass devices>=1, or accelerator='cpu' to run without one"
        )
    if len(set(indices)) != len(indices):
        raise MisconfigurationException(f"devices={devices!r} names a GPU twice; each process needs its own")
    beyond = [index for index in indices if index < 0 or index >= available]
    # Under torchrun each process may see its own GPU only; the count then speaks of the node, not of what is visible.
    if beyond and not (available == 1 and len(indices) > 1 and torch.distributed.is_torchelastic_launched()):
        if not available:
            raise MisconfigurationException(
                f"devices={devices!r}, but this host has no {kind} GPU that the installed torch {torch.__version__} "
                "can use: pass accelerator='cpu'"
            )
        has = f"{available} {kind} GPU{'s' if available != 1 else ''}"
        if isinstance(devices, (list, tuple)) or "," in str(devices):
            raise MisconfigurationException(
                f"devices={devices!r} names GPU {beyond[0]}, but this host has {has}: use indices 0 to {available - 1}"
            )
        raise MisconfigurationException(
            f"devices={devices!r}, but this host has {has}: pass devices<={available} or more num_nodes"
        )
    return indices


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Indices of GPUs that this process can put a tensor on; useful where GPUs are in exclusive mode.

    Args:
        num_devices: How many to find; -1 means all that are usable.

    Raises:
        ValueError: More are asked for than the host has.
        RuntimeError: Fewer are usable than asked for.
    """
    count = torch.cuda.device_count()
    if num_devices == 0:
        return []
    if num_devices > count:
        raise ValueError(f"num_devices={num_devices}, but this host has {count} GPUs: ask for at most {count}")
    usable: list[int] = []
    for index in range(count):
        try:
            torch.tensor(0, device=torch.device("cuda", index))
        except RuntimeError:  # taken by another process, or broken: not usable, which is what was asked
            continue
        usable.append(index)
        if len(usable) == num_devices:
            return usable
    if num_devices != -1:
        raise RuntimeError(
            f"num_devices={num_devices}, but only GPUs {usable} of {count} could be used; others are taken or broken"
        )
    return usable


def _listed(devices: Any, available: int) -> list[int]:
    message = f"devices={devices!r} must be an int, a str or a list of ints"
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.strip().strip("[]").split(",") if part.strip()]
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            raise TypeError(
                f"{message}; the str forms are '3' (a count), '0,2' or '1,' (indices), '-1' (all)"
            ) from None
        if "," in devices or devices.strip().startswith("["):
            return numbers
        devices = numbers[0] if numbers else 0
    if isinstance(devices, (list, tuple)):
        if any(type(index) is not int for index in devices):
            raise TypeError(message)
        return list(devices)
    if type(devices) is not int:
        raise TypeError(message)
    if devices < -1:
        raise MisconfigurationException(f"devices={devices} must be -1 (all) or a count above 0")
    return list(range(available if devices == -1 else devices))


def _best_available() -> str:
    if MPSAccelerator.is_available():
        return "mps"
    return "cuda" if CUDAAccelerator.is_available() else "cpu"


def _check_type(device: torch.device, expected: str) -> None:
    if device.type != expected:
        raise MisconfigurationException(
            f"the strategy's device is {device}, but the accelerator is {expected!r}: pass "
            f"accelerator={device.type!r}, or a strategy whose devices match"
        )


def _mention_tensor_cores(device: torch.device) -> None:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return
    if torch.get_float32_matmul_precision() == "highest":
        rank_zero_info(
            f"{torch.cuda.get_device_name(device)} has Tensor Cores, which float32 matrix products leave unused by "
            "default; torch.set_float32_matmul_precision('high') trades a little precision for speed"
        )
