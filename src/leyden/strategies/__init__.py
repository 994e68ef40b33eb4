"""Layer 2: how a model runs on its devices. `base` on one, `ddp` on many; `precision` in which number format."""

from leyden.base.registry import lazy_exports

_PRECISION = "leyden.strategies.precision"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "DDPStrategy": "leyden.strategies.ddp",
        "DoublePrecision": _PRECISION,
        "HalfPrecision": _PRECISION,
        "LayerSync": "leyden.strategies.layer_sync",
        "MixedPrecision": _PRECISION,
        "Precision": _PRECISION,
        "SingleDeviceStrategy": "leyden.strategies.base",
        "Strategy": "leyden.strategies.base",
        "StrategyRegistry": "leyden.strategies.registry",
        "TorchSyncBatchNorm": "leyden.strategies.layer_sync",
        "precision_plugin": _PRECISION,
        "resolve_precision": _PRECISION,
    },
    submodules=("base", "ddp", "layer_sync", "precision", "registry"),
)
