"""Layers that work across processes, under the path that Lightning has for them."""

from leyden.strategies.layer_sync import LayerSync, TorchSyncBatchNorm

__all__ = ["LayerSync", "TorchSyncBatchNorm"]
