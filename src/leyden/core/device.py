"""A module that knows its device and dtype."""

from typing import Any

import torch
from torch import nn
from typing_extensions import Self

__all__ = ["DeviceDtypeMixin"]


class DeviceDtypeMixin(nn.Module):
    """Tracks the device and dtype that the module was last moved to; all such sub-modules move along.

    A strategy may also set ``_device`` ahead of the move, so that ``setup`` sees the device of the run.
    """

    __jit_unused_properties__ = ["device", "dtype"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dtype: torch.dtype | str = torch.get_default_dtype()
        self._device = torch.get_default_device()

    @property
    def dtype(self) -> torch.dtype | str:
        """The dtype the module was last cast to; the default dtype before that."""
        return self._dtype

    @dtype.setter
    def dtype(self, new_dtype: torch.dtype | str) -> None:
        raise RuntimeError(f"dtype can't be set; cast the module instead: module.to({new_dtype})")

    @property
    def device(self) -> torch.device:
        """The device of the module; for a bare "cuda", with the index of the current device."""
        device = self._device
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """`nn.Module.to`, tracked."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        _track(self, device, dtype)
        return super().to(*args, **kwargs)

    def cuda(self, device: torch.device | int | None = None) -> Self:
        """`nn.Module.cuda`, tracked; the current device where none is given."""
        if device is None:
            device = torch.cuda.current_device()
        device = torch.device("cuda", device) if isinstance(device, int) else device
        _track(self, device, None)
        return super().cuda(device)  # pyright: ignore[reportArgumentType]

    def cpu(self) -> Self:
        """`nn.Module.cpu`, tracked."""
        _track(self, torch.device("cpu"), None)
        return super().cpu()

    def type(self, dst_type: torch.dtype | str) -> Self:
        """`nn.Module.type`, tracked."""
        _track(self, None, dst_type)
        return super().type(dst_type)

    def float(self) -> Self:
        """`nn.Module.float`, tracked."""
        _track(self, None, torch.float32)
        return super().float()

    def double(self) -> Self:
        """`nn.Module.double`, tracked."""
        _track(self, None, torch.float64)
        return super().double()

    def half(self) -> Self:
        """`nn.Module.half`, tracked."""
        _track(self, None, torch.float16)
        return super().half()

    def bfloat16(self) -> Self:
        """`nn.Module.bfloat16`, tracked."""
        _track(self, None, torch.bfloat16)
        return super().bfloat16()


def _track(root: nn.Module, device: torch.device | None, dtype: torch.dtype | str | None) -> None:
    for module in root.modules():
        if isinstance(module, DeviceDtypeMixin):
            if device is not None:
                module._device = device
            if dtype is not None:
                module._dtype = dtype
