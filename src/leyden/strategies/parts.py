"""Parts of `Strategy` that change seldom: what it says to other processes, its checkpoints, its empty hooks."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from leyden.base.errors import CheckpointError
from leyden.dist.comm import Comm, NoComm
from leyden.strategies.tools import optimizer_to_device, unwrap_optimizer

if TYPE_CHECKING:
    from leyden.checkpoint.io import CheckpointIO

__all__ = ["CheckpointMethods", "CommMethods", "StageHooks"]

T = TypeVar("T")


class CommMethods:
    """Collectives; every rank must call them, in the same order."""

    comm: Comm | NoComm

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        self.comm.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Sends a picklable object from rank ``src`` to all."""
        return self.comm.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Combines a tensor over processes; other objects are returned as they are."""
        return self.comm.all_reduce(tensor, reduce_op or "sum", group) if isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stacks the tensors of all processes on a new first dimension; one process: the tensor itself."""
        return self.comm.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One answer for all processes: whether all of them, or any, said True."""
        return self.comm.reduce_bool(decision, all)


class CheckpointMethods:
    """State in and out of files."""

    lightning_module: Any
    is_global_zero: Any
    root_device: Any
    optimizers: list[Optimizer]
    _checkpoint_io: "CheckpointIO | None"

    @property
    def checkpoint_io(self) -> "CheckpointIO":
        """Reads and writes checkpoint files."""
        if self._checkpoint_io is None:
            # on use, so that strategies load without the checkpoint package
            from leyden.checkpoint.io import TorchCheckpointIO

            self._checkpoint_io = TorchCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: "CheckpointIO | None") -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The user's module's state; the same keys under every strategy."""
        return self.lightning_module.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads ``checkpoint["state_dict"]`` into the user's module."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer; on rank 0 only where the optimizer itself is split over processes."""
        optimizer = unwrap_optimizer(optimizer)
        consolidate = getattr(optimizer, "consolidate_state_dict", None)
        if consolidate is None:
            return optimizer.state_dict()
        consolidate()
        return optimizer.state_dict() if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads ``checkpoint["optimizer_states"]``, one per optimizer.

        Raises:
            CheckpointError: The checkpoint has another number of optimizers than the module.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(self.optimizers)}: restore the optimizers it was saved with, or load the weights only"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            optimizer_to_device(optimizer, self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint from rank 0; call it on all ranks."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint to the CPU, on every rank."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, map_location="cpu", weights_only=weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Deletes a checkpoint from rank 0."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)


class StageHooks:
    """Hooks for subclasses; the loop calls the overridden ones only."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_validation_start(self) -> None:
        """Before each validation."""

    def on_validation_end(self) -> None:
        """After each validation."""

    def on_test_start(self) -> None:
        """Before the test."""

    def on_test_end(self) -> None:
        """After the test."""

    def on_predict_start(self) -> None:
        """Before the prediction."""

    def on_predict_end(self) -> None:
        """After the prediction."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before each training batch."""
