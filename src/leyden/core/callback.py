"""Callbacks: code that runs at the trainer's hooks and belongs to no model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["Callback", "Checkpoint"]


class Callback:
    """Base of all callbacks; override what you need.

    Every hook gets the trainer and the module. A hook that is not overridden costs nothing at run time. While the
    callback is in a trainer, it also has ``log`` and ``log_dict``, which are the module's.
    """

    @property
    def _wake_up(self) -> float | None:
        """The `time.monotonic` before which ``on_train_batch_end`` has nothing to do; None where that can't be told.

        It is still called after the last batch of an epoch, and before a validation.
        """
        return None

    @property
    def _idle_hooks(self) -> frozenset[str]:
        """Hooks that have nothing to do in this run, looked up at each epoch's start: a loop need not call them."""
        return frozenset()

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint; must differ between two callbacks that have state."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """A state key made of the class's name and the arguments that tell two instances apart."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Called at the start of fit, validate, test or predict (the ``stage``), before the module's ``setup``."""

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Called at the end of fit, validate, test or predict (the ``stage``)."""

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called when fit begins, with the model on its device."""

    def on_fit_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called when fit ends."""

    def on_sanity_check_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before the validation batches that are run ahead of training."""

    def on_sanity_check_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after the validation batches that are run ahead of training."""

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before each training epoch."""

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after each training epoch, and after the validation inside it.

        The values of the epoch are in ``trainer.callback_metrics``. Early stopping and checkpoints come after the
        module's hook, all other callbacks before it.
        """

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Called before each training batch."""

    def on_train_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Called after each training batch.

        ``outputs["loss"]`` is detached and divided by ``accumulate_grad_batches``; other keys are what
        ``training_step`` returned.
        """

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before each validation."""

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after each validation."""

    def on_validation_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before the first batch of each validation."""

    def on_validation_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after the last batch of each validation; the last place to log in it."""

    def on_validation_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each validation batch, with what ``validation_step`` returned."""

    def on_test_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before testing."""

    def on_test_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after testing."""

    def on_test_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after the last test batch; the last place to log in it."""

    def on_test_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each test batch, with what ``test_step`` returned."""

    def on_predict_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before predicting."""

    def on_predict_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after the last predicted batch."""

    def on_predict_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(
        self,
        trainer: "Trainer",
        pl_module: "LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after each predicted batch, with what ``predict_step`` returned."""

    def on_before_zero_grad(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer) -> None:
        """Called before the gradients are cleared, which is between forward and backward."""

    def on_before_backward(self, trainer: "Trainer", pl_module: "LightningModule", loss: Tensor) -> None:
        """Called before ``loss.backward()``, with the loss divided by ``accumulate_grad_batches``."""

    def on_after_backward(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Called after ``loss.backward()``, before optimizers are stepped; fp16 gradients are still scaled."""

    def on_before_optimizer_step(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer) -> None:
        """Called before each optimizer step, with unscaled gradients that are not clipped yet."""

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Called when the run is ended by ``exception``, KeyboardInterrupt included."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, under its ``state_key``; empty for nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what ``state_dict`` gave, from a deep copy of the checkpoint's value."""

    def on_save_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint about to be written; may change it."""

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint that was loaded, before ``load_state_dict``."""


class Checkpoint(Callback):
    """Base of callbacks that write checkpoints: the trainer runs them last and finds "best" and "last" by them."""
