"""From what the user gave as data to batches on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from leyden.base.errors import CheckpointError
from leyden.base.log import warn_once
from leyden.base.states import RunningStage
from leyden.base.tree import move_to_device
from leyden.core.datamodule import LightningDataModule
from leyden.core.hooks import is_overridden
from leyden.loops.calls import module_overrides
from leyden.loops.combined import CombinedLoader, sized_len
from leyden.loops.data import DataSource, set_epoch, setup_loaders
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["Batches", "LoadedData", "batch_transfer", "load_data"]


@dataclass
class LoadedData:
    """The loaders of one stage, ready to be read."""

    combined: CombinedLoader
    limits: list[int | float]  # batches to read of each loader

    @property
    def num_batches(self) -> int | float:
        """Batches of one pass; infinity where nobody knows."""
        return self.combined.num_batches

    @property
    def has_streams(self) -> bool:
        """Whether some loader reads a stream, whose length is known for certain only when it has been read."""
        return any(
            isinstance(getattr(loader, "dataset", None), IterableDataset) or sized_len(loader) is None
            for loader in self.combined.flattened
        )

    @property
    def loaders(self) -> Any:
        """The loaders as the user nested them."""
        return self.combined.iterables

    def load_states(self, states: list[dict[str, Any]]) -> bool:
        """Gives loaders that have ``load_state_dict`` their states of a checkpoint, in order.

        Returns:
            Whether all loaders continue by themselves, so that no batch has to be skipped.
        """
        if not states:
            return False
        stateful = [loader for loader in self.combined.flattened if hasattr(loader, "load_state_dict")]
        if len(stateful) != len(states):
            raise CheckpointError(
                f"the checkpoint holds the states of {len(states)} stateful training loaders, there are "
                f"{len(stateful)}: pass the same loaders as before"
            )
        for loader, state in zip(stateful, states, strict=True):
            loader.load_state_dict(state)
        return len(stateful) == len(self.combined.flattened)

    def set_epoch(self, epoch: int) -> None:
        """Tells samplers that shuffle by epoch which one begins."""
        for loader in self.combined.flattened:
            set_epoch(loader, epoch)


def load_data(trainer: Trainer, source: DataSource, stage: RunningStage) -> LoadedData:
    """Asks for the loaders of a stage and gets them ready: samplers for several ranks, limits, checks."""
    assert trainer.state.fn is not None
    combined, limits = setup_loaders(
        source,
        stage=stage,
        fn=trainer.state.fn,
        strategy=trainer.strategy,
        limit=getattr(trainer, f"limit_{stage.dataloader_prefix}_batches"),
        use_distributed_sampler=trainer.use_distributed_sampler,
        overfit=trainer.overfit_batches > 0,
        allow_zero_length=trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices
        or getattr(trainer.datamodule, "allow_zero_length_dataloader_with_multiple_devices", False),
        reload_every_n_epochs=trainer.reload_dataloaders_every_n_epochs,
    )
    return LoadedData(combined, limits)


class Batches:
    """One pass over training data.

    The loaders' iterators are made at construction. Data without length is read one batch ahead, to know which is the
    last; with several ranks they agree on that each time, and end together with the first that runs out. So they do
    for a stream that has a length, which can be wrong on some rank.

    Attributes:
        ended: The batch that was handed out last is the last one. Only data that is read ahead knows.
    """

    def __init__(self, data: LoadedData, comm: Any) -> None:
        self.ended = False
        self._length = data.num_batches
        self._position = 0
        self._comm = comm
        combined = data.combined
        # One loader has no others to pack its batch with.
        packed = not (len(combined.flattened) == 1 and combined.flattened[0] is combined.iterables)
        source = map(itemgetter(0), combined.batches()) if packed else iter(combined.flattened[0])
        self._source: Iterator[Any] = source
        self._ahead: list[Any] = []
        looks_ahead = math.isinf(self._length) or (comm is not None and data.has_streams)
        if looks_ahead:
            self._look_ahead()
        # Else the loop gets the loader's own iterator, and counts: nothing is between them.
        self._iterator = self._read_ahead() if looks_ahead else source

    def skip(self, count: int) -> None:
        """Reads and drops ``count`` batches: those that were trained before the checkpoint."""
        for _ in range(count):
            next(self._iterator, None)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def _read_ahead(self) -> Iterator[Any]:
        while self._ahead:
            batch = self._ahead.pop()
            self._position += 1
            self._look_ahead()
            self.ended = not self._ahead
            yield batch

    def _look_ahead(self) -> None:
        if self._position >= self._length:
            return
        end: Any = object()
        item = next(self._source, end)
        more = item is not end
        if self._comm is not None:
            everywhere = self._comm.reduce_bool(more, all=True)
            if more and not everywhere:
                warn_once(
                    "training data without length ended on another rank first: all ranks end the epoch there, and the "
                    "rest of this rank's data is not read",
                    key="uneven-unsized",
                )
            more = everywhere
        if more:
            self._ahead.append(item)


def batch_transfer(trainer: Trainer, source: DataSource) -> Callable[[Any, int], Any] | None:
    """Returns ``transfer(batch, dataloader_idx)``: input conversion, then the three transfer hooks.

    A datamodule's hooks are for the data that come from it. None: there is nothing to do, because this machine has only
    a CPU, where all batches are.
    """
    strategy, precision, device = trainer.strategy, trainer.precision_plugin, trainer.strategy.root_device
    before = _data_hook(trainer, source, "on_before_batch_transfer")
    move = _data_hook(trainer, source, "transfer_batch_to_device")
    after = _data_hook(trainer, source, "on_after_batch_transfer")
    convert = precision.convert_input if type(precision).convert_input is not Precision.convert_input else None
    own_strategy = type(strategy).batch_to_device is not Strategy.batch_to_device
    if before is move is after is convert is None and not own_strategy:
        if device.type == "cpu" and not torch.accelerator.is_available():
            return None
        return _keep_on_cpu if device.type == "cpu" else lambda batch, dataloader_idx: move_to_device(batch, device)

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if convert is not None:
            batch = convert(batch)
        if before is not None:
            batch = before(batch, dataloader_idx)
        if own_strategy:
            batch = strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
        elif move is not None:
            batch = move(batch, device, dataloader_idx)
        else:
            batch = move_to_device(batch, device)
        return batch if after is None else after(batch, dataloader_idx)

    return transfer


def _keep_on_cpu(batch: Any, dataloader_idx: int) -> Any:
    """Most batches of a CPU run are flat and where they should be: look before walking the tree."""
    kind = type(batch)
    if kind is tuple or kind is list:
        for item in batch:
            if type(item) is not Tensor or not item.is_cpu:
                return move_to_device(batch, "cpu")
        return batch
    return move_to_device(batch, "cpu")


def _data_hook(trainer: Trainer, source: DataSource, name: str) -> Callable | None:
    """The user's own transfer hook: the datamodule's goes before the module's. None: the default."""
    module, datamodule = trainer.lightning_module, source.owner if source.is_module() else None
    theirs = isinstance(datamodule, LightningDataModule) and is_overridden(name, datamodule, LightningDataModule)
    ours = module_overrides(name, module)
    if theirs and ours:
        warn_once(
            f"both {type(module).__name__} and {type(datamodule).__name__} define `{name}`: the datamodule's is used",
            key=f"both-define:{name}",
        )
    if theirs:
        return getattr(datamodule, name)
    return getattr(module, name) if ours else None
