"""Batches and loaders."""

from leyden.base.tree import extract_batch_size
from leyden.loops.data import suggested_max_num_workers

__all__ = ["extract_batch_size", "suggested_max_num_workers"]
