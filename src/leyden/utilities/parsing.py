"""Hyperparameters as a dict with attributes, and what can be sent to another process."""

import pickle
from typing import Any

from leyden.core.hparams import AttributeDict

__all__ = ["AttributeDict", "is_picklable"]


def is_picklable(obj: Any) -> bool:
    """Whether ``pickle`` takes ``obj``."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True
