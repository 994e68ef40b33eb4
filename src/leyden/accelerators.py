"""The kinds of device that Leyden trains on, under the path that Lightning has for them."""

from leyden.base.registry import lazy_exports

_DEVICES = "leyden.dist.devices"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Accelerator": _DEVICES,
        "AcceleratorRegistry": _DEVICES,
        "CPUAccelerator": _DEVICES,
        "CUDAAccelerator": _DEVICES,
        "MPSAccelerator": _DEVICES,
        "find_usable_cuda_devices": _DEVICES,
    },
)
