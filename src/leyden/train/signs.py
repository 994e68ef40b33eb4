"""Signs of life that a rank gives its agent, and nobody else."""

from dataclasses import dataclass

__all__ = ["Beat", "Busy"]


@dataclass(frozen=True)
class Beat:
    """The rank got somewhere since the last one."""


@dataclass(frozen=True)
class Busy:
    """The rank stores a checkpoint, or no longer does; that is no hang, however long it takes."""

    busy: bool
