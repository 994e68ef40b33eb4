"""Norms of gradients."""

from leyden.base.modules import grad_norm

__all__ = ["grad_norm"]
