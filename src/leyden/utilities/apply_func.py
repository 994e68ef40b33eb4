"""Nested collections of tensors."""

from leyden.base.tree import apply_to_collection
from leyden.base.tree import move_to_device as move_data_to_device

__all__ = ["apply_to_collection", "move_data_to_device"]
