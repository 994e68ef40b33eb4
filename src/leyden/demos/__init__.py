"""Small models and data to try things out on."""

from leyden.base.registry import lazy_exports

_BORING = "leyden.demos.boring_classes"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"BoringDataModule": _BORING, "BoringModel": _BORING, "DemoModel": _BORING},
    submodules=("boring_classes", "digits"),
)
