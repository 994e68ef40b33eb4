"""Several loaders as one."""

from leyden.loops.combined import CombinedLoader

__all__ = ["CombinedLoader"]
