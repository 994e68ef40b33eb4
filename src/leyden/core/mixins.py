"""Alias: Lightning has this name here. It lives in `leyden.core.hparams`."""

from leyden.core.hparams import HyperparametersMixin

__all__ = ["HyperparametersMixin"]
