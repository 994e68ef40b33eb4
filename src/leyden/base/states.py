"""What a trainer is doing: the function that was called, the stage inside it, and how it stands."""

from dataclasses import dataclass
from enum import Enum

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]


class _Name(str, Enum):
    """An enum whose members are, print as, and compare with their strings."""

    __str__ = str.__str__
    __hash__ = str.__hash__


class TrainerStatus(_Name):
    """How the last or current run stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        return self in (self.FINISHED, self.INTERRUPTED)


class TrainerFn(_Name):
    """The public method that was called; its value is the ``stage`` that ``setup`` and ``teardown`` get."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Name):
    """What runs right now; inside ``fit`` it changes between train, sanity_check and validate."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (self.VALIDATING, self.TESTING, self.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The word in ``{prefix}_dataloader`` and ``limit_{prefix}_batches``."""
        return "val" if self in (self.VALIDATING, self.SANITY_CHECKING) else self.value


@dataclass
class TrainerState:
    """The trainer's state as users read it: ``trainer.state.fn``, ``.stage``, ``.status``."""

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        return self.status.stopped
