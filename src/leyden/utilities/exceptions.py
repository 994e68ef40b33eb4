"""The errors that user code may want to catch."""

from leyden.base.errors import MisconfigurationException, SIGTERMException

__all__ = ["MisconfigurationException", "SIGTERMException"]
