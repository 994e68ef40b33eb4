"""Names that are imported on use: for package ``__init__`` files and for tables of plug-ins."""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["did_you_mean", "import_from", "lazy_exports"]


def import_from(target: str) -> Any:
    """Imports ``"package.module:attribute"`` and returns the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for an error: the close matches of ``name``, or all the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known: {', '.join(map(repr, names)) or 'none'}"


def lazy_exports(
    package: str, exports: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes ``__getattr__``, ``__dir__`` and ``__all__`` for a package that imports its parts on first use (PEP 562).

    Args:
        package: The package's ``__name__``.
        exports: Public name -> module that defines it.
        submodules: Sub-packages that ``package.name`` should reach without an import of their own.

    Example:
        ``__getattr__, __dir__, __all__ = lazy_exports(__name__, {"Trainer": "leyden.trainer.trainer"})``
    """
    submodules = frozenset(submodules)
    names = sorted(exports)

    def __getattr__(name: str) -> Any:
        if name in exports:
            value = getattr(importlib.import_module(exports[name]), name)
            setattr(sys.modules[package], name, value)  # the next access is a plain attribute
            return value
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        hint = "" if name.startswith("_") else f"; {did_you_mean(name, [*exports, *submodules])}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names, *submodules})

    return __getattr__, __dir__, names
