"""Another name of `leyden.base.states`, for code that imports Lightning's module path."""

from leyden.base.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]
