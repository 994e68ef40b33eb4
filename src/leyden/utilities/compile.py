"""Modules that went through ``torch.compile``."""

from leyden.core.compile import from_compiled, to_uncompiled

__all__ = ["from_compiled", "to_uncompiled"]
