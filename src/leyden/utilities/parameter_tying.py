"""Parameters that a model reaches by several names."""

from leyden.base.modules import find_shared_parameters, set_shared_parameters

__all__ = ["find_shared_parameters", "set_shared_parameters"]
