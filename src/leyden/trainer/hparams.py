"""Hyper-parameters on their way to the loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["log_hyperparams"]


def log_hyperparams(trainer: Trainer) -> None:
    """Sends what module and datamodule saved by ``save_hyperparameters(logger=True)``, and the graph, to all loggers.

    Raises:
        RuntimeError: Module and datamodule give one name different values.
    """
    if not trainer.loggers:
        return
    module, datamodule = trainer.lightning_module, trainer.datamodule
    owners = [o for o in (module, datamodule) if o is not None and o._log_hyperparams]
    merged: dict[str, Any] | None = None
    for owner in owners:
        values = dict(owner.hparams_initial)
        if merged is not None:
            _refuse_conflicts(merged, values)
        merged = {**(merged or {}), **values}
    for logger in trainer.loggers:
        if merged is not None:
            logger.log_hyperparams({k: v for k, v in merged.items() if k != "_class_path"})
        logger.log_graph(module)
        logger.save()


def _refuse_conflicts(of_module: dict[str, Any], of_datamodule: dict[str, Any]) -> None:
    conflicts = [
        name
        for name in of_module.keys() & of_datamodule.keys()
        if name != "_class_path" and _differ(of_module[name], of_datamodule[name])
    ]
    if conflicts:
        raise RuntimeError(
            f"the hyper-parameters {sorted(conflicts)} of the LightningModule and of the LightningDataModule have "
            "different values; give them the same value, rename one, or save one side with "
            "save_hyperparameters(logger=False)"
        )


def _differ(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return True
    return one is not other if isinstance(one, Tensor) else bool(one != other)
