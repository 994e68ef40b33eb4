"""How checkpoints are written and read, under the path that Lightning has for it."""

from leyden.checkpoint.io import CheckpointIO, TorchCheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]
