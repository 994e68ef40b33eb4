"""What goes into ``Trainer(plugins=...)``, under the path that Lightning has for it."""

from leyden.base.registry import lazy_exports

_IO = "leyden.checkpoint.io"
_PRECISION = "leyden.strategies.precision"
_LAYER_SYNC = "leyden.strategies.layer_sync"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CheckpointIO": _IO,
        "ClusterEnvironment": "leyden.dist.env",
        "DoublePrecision": _PRECISION,
        "HalfPrecision": _PRECISION,
        "LayerSync": _LAYER_SYNC,
        "MixedPrecision": _PRECISION,
        "Precision": _PRECISION,
        "TorchCheckpointIO": _IO,
        "TorchSyncBatchNorm": _LAYER_SYNC,
    },
    submodules=("environments", "io", "layer_sync", "precision"),
)
