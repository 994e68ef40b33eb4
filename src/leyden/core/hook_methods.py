"""The hooks of modules and datamodules, as mix-ins: their defaults and what they are for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.base.errors import MisconfigurationException
from leyden.base.tree import move_to_device

__all__ = ["CheckpointHooks", "DataHooks", "ModelHooks"]

_StepOutput = Tensor | Mapping[str, Any] | None


class ModelHooks:
    """What a module is told during a run. All are optional."""

    if TYPE_CHECKING:  # only then: TorchScript evaluates the annotations of a class
        trainer: Any

    def on_fit_start(self) -> None:
        """Called when fit begins, with the model on its device."""

    def on_fit_end(self) -> None:
        """Called when fit ends."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_validation_start(self) -> None:
        """Called before each validation."""

    def on_validation_end(self) -> None:
        """Called after each validation."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_predict_start(self) -> None:
        """Called before predicting."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before each training batch. Return -1 to skip the rest of the epoch's batches."""

    def on_train_batch_end(self, outputs: _StepOutput, batch: Any, batch_idx: int) -> None:
        """Called after each training batch.

        ``outputs["loss"]`` is detached and divided by ``accumulate_grad_batches``; other keys are what
        ``training_step`` returned.
        """

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self, outputs: _StepOutput, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch, with what ``validation_step`` returned."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: _StepOutput, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each test batch, with what ``test_step`` returned."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each predicted batch, with what ``predict_step`` returned."""

    def on_validation_model_zero_grad(self) -> None:
        """Frees the gradients before a validation inside fit."""
        self.zero_grad()  # pyright: ignore[reportAttributeAccessIssue]

    def on_validation_model_eval(self) -> None:
        """Puts the model in eval mode for validation."""
        self.trainer.model.eval()

    def on_validation_model_train(self) -> None:
        """Puts the model back in train mode. Unless overridden, each sub-module gets the mode that it had."""
        self.trainer.model.train()

    def on_test_model_eval(self) -> None:
        """Puts the model in eval mode for testing."""
        self.trainer.model.eval()

    def on_test_model_train(self) -> None:
        """Puts the model back in train mode. Unless overridden, each sub-module gets the mode that it had."""
        self.trainer.model.train()

    def on_predict_model_eval(self) -> None:
        """Puts the model in eval mode for predicting."""
        self.trainer.model.eval()

    def on_train_epoch_start(self) -> None:
        """Called before each training epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after each training epoch, and after the validation inside it."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first batch of each validation."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last batch of each validation."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last predicted batch."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients are cleared, which is between forward and backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before ``loss.backward()``, with the loss divided by ``accumulate_grad_batches``."""

    def on_after_backward(self) -> None:
        """Called after ``loss.backward()``, before optimizers are stepped; fp16 gradients are still scaled."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each optimizer step, with unscaled gradients that are not clipped yet."""

    def configure_sharded_model(self) -> None:
        """The old name of `configure_model`."""

    def configure_model(self) -> None:
        """Creates or wraps layers with the run's device, precision and sharding in place.

        Called in every stage, and by ``load_from_checkpoint``: make it return at once when its work is done already.
        """


class DataHooks:
    """Where data comes from and what happens to each batch; modules and datamodules both have these."""

    #: Whether `prepare_data` runs once per node (True) or on the first node only.
    prepare_data_per_node = True
    #: Whether a rank may have no batch at all while others have some.
    allow_zero_length_dataloader_with_multiple_devices = False

    def prepare_data(self) -> None:
        """Downloads and prepares data on disk. Runs in one process per node; set no attributes here."""

    def setup(self, stage: str) -> None:
        """Called on every rank at the start of a run; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called on every rank at the end of a run; ``stage`` as in `setup`."""

    def train_dataloader(self) -> Any:
        """The training data: an iterable, or a nested collection of them."""
        raise _not_implemented(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        """The validation data: an iterable, or a nested collection of them, run one after the other."""
        raise _not_implemented(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        """The test data: an iterable, or a nested collection of them, run one after the other."""
        raise _not_implemented(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        """The data to predict: an iterable, or a nested collection of them, run one after the other."""
        raise _not_implemented(self, "predict_dataloader")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch: tensors, objects with ``to(device)``, and nested containers of these."""
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes a batch on the device."""
        return batch


class CheckpointHooks:
    """What a module adds to checkpoints."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the loaded checkpoint, before the weights are taken from it; may change it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the checkpoint about to be written; may change it."""


def _not_implemented(owner: Any, name: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(owner).__name__} has no `{name}`: define it, or pass the data to the trainer's method"
    )
