"""Checkpoints: the file (`io`), the dictionary in it (`schema`), and which files to keep (`retain`)."""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CheckpointIO": "leyden.checkpoint.io",
        "TorchCheckpointIO": "leyden.checkpoint.io",
        "load": "leyden.checkpoint.io",
        "save": "leyden.checkpoint.io",
        "Position": "leyden.checkpoint.schema",
        "check": "leyden.checkpoint.schema",
        "loops_from_position": "leyden.checkpoint.schema",
        "migrate": "leyden.checkpoint.schema",
        "position_from_loops": "leyden.checkpoint.schema",
        "Entry": "leyden.checkpoint.retain",
        "retain": "leyden.checkpoint.retain",
    },
)
