"""Layer 4: the Trainer, and how a run is put together."""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"Trainer": "leyden.trainer.trainer", "seed_everything": "leyden.base.seed"},
    submodules=("states",),
)
