"""Where the loaders of a stage come from, what is done to them before they are read, and how many batches they have."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from leyden.base.errors import MisconfigurationException, PossibleUserWarning
from leyden.base.log import rank_zero_warn
from leyden.base.seed import global_seed, worker_init_function, workers_are_seeded
from leyden.base.states import RunningStage, TrainerFn
from leyden.loops.combined import CombinedLoader, sized_len
from leyden.loops.counts import agree_on_length, loader_length, num_batches
from leyden.loops.rebuild import (
    capture_loader_args,
    copy_loader,
    has_own_batch_sampler,
    index_sampler,
    rebuild_loader,
)
from leyden.loops.samplers import (
    DistributedBatchSampler,
    DistributedSamplerWrapper,
    RecordedBatchSampler,
    UnpaddedDistributedSampler,
    batch_indices,
    is_shuffled,
    set_epoch,
)

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

__all__ = [
    "DataSource",
    "DistributedSamplerWrapper",
    "UnpaddedDistributedSampler",
    "agree_on_length",
    "batch_indices",
    "capture_loader_args",
    "disable_shuffling",
    "is_shuffled",
    "loader_length",
    "num_batches",
    "prepare_loader",
    "set_epoch",
    "setup_loaders",
    "suggested_max_num_workers",
]


@dataclass
class DataSource:
    """Where a stage's loaders come from: an argument of ``fit`` and its like, or a method of a (data) module.

    Args:
        loaders: What the user passed: one iterable or any nesting of them; None asks ``owner``.
        owner: The LightningDataModule or LightningModule that may have the method.
        name: The method, ``"train_dataloader"`` for example.
    """

    loaders: Any
    owner: Any
    name: str

    @classmethod
    def pick(cls, loaders: Any, datamodule: Any, module: Any, name: str) -> "DataSource":
        """The source by precedence: a datamodule, if there is one; else the loaders passed; else the module."""
        if datamodule is not None:
            return cls(None, datamodule, name)
        return cls(loaders, module, name)

    def is_module(self) -> bool:
        """Whether the loaders come from a method of a module or datamodule, be it overridden or not."""
        return self.loaders is None

    def is_defined(self) -> bool:
        """Whether there are loaders to be had: some were passed, or the method is overridden."""
        if not self.is_module():
            return True
        from leyden.core.datamodule import LightningDataModule
        from leyden.core.hooks import is_overridden
        from leyden.core.module import LightningModule

        base = LightningDataModule if isinstance(self.owner, LightningDataModule) else LightningModule
        return self.owner is not None and is_overridden(self.name, self.owner, base)

    def request(self) -> Any:
        """Returns the loaders; calls the method, if it is one, in such a way that they can be made again.

        Raises:
            MisconfigurationException: None were passed and the method is not overridden.
        """
        if not self.is_module():
            return self.loaders
        if not self.is_defined():
            raise MisconfigurationException(
                f"There are no loaders: none were passed, and {type(self.owner).__name__} defines no `{self.name}`."
                f" Pass them to the method of the Trainer, or define `def {self.name}(self)` in your LightningModule or"
                " LightningDataModule."
            )
        with capture_loader_args():
            return getattr(self.owner, self.name)()

    def check_iterable(self, loader: object, fn: TrainerFn) -> None:
        """Raises a TypeError that names the source when ``loader`` can't be iterated over."""
        if isinstance(loader, DataLoader):  # its iterator starts workers and draws random numbers
            return
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            name = type(loader).__name__
            rank_zero_warn(
                f"{self.name}: a {name} is a data set, so each of its samples is taken for a batch. If that is not on"
                f" purpose, wrap it: DataLoader({name}(...), batch_size=...)",
                category=PossibleUserWarning,
            )
        try:
            iter(loader)  # pyright: ignore[reportCallIssue, reportArgumentType]
        except TypeError:
            if self.is_module():
                origin = f"`{type(self.owner).__name__}.{self.name}()` returned"
            else:
                origin = f"`Trainer.{fn}` was given as dataloaders"
            raise TypeError(
                f"{origin} {loader!r}, which is not iterable. It takes a DataLoader, another iterable of batches, or a"
                f" dict, list or tuple of them; or define `def {self.name}(self)` in your LightningModule or"
                " LightningDataModule."
            ) from None


def setup_loaders(
    source: DataSource,
    *,
    stage: RunningStage,
    fn: TrainerFn,
    strategy: "Strategy",
    limit: int | float,
    use_distributed_sampler: bool = True,
    overfit: bool = False,
    allow_zero_length: bool = False,
    reload_every_n_epochs: int = 0,
) -> tuple[CombinedLoader, list[int | float]]:
    """Gets a stage's loaders ready: asks for them, combines them, prepares each, and counts their batches.

    Args:
        source: Where they come from.
        stage: What they are for.
        fn: The Trainer method that runs; ``overfit`` touches the loaders of ``fit`` only.
        strategy: Knows the ranks; may wrap loaders (``process_dataloader``).
        limit: ``limit_{stage}_batches``.
        use_distributed_sampler: Deal the data out to the ranks.
        overfit: ``overfit_batches`` is on: read the same batches in the same order in every epoch.
        allow_zero_length: A rank may have no batch while others have some.
        reload_every_n_epochs: For a warning about a torch bug.

    Returns:
        The combined loader, with its limits set, and the number of batches of each of its iterables (infinity if
        unknown). All ranks get the same numbers for training.

    Raises:
        TypeError: Something can't be iterated over.
        ValueError: The mode of the user's CombinedLoader doesn't suit the stage.
        MisconfigurationException: There are no loaders, a sampler can't be replaced, or the limit leaves no batch.
    """
    loaders = source.request()
    strategy.barrier(f"{stage.dataloader_prefix}_dataloader()")
    combined = _combine(loaders, stage)
    if overfit and fn is TrainerFn.FITTING:
        disable_shuffling(combined, stage)

    prepared = []
    for loader in combined.flattened:
        source.check_iterable(loader, fn)
        prepared.append(
            prepare_loader(
                loader,
                stage=stage,
                sampler_kwargs=strategy.distributed_sampler_kwargs,
                use_distributed_sampler=use_distributed_sampler,
                overfit=overfit,
                process=strategy.process_dataloader,
                global_rank=strategy.global_rank,
                num_processes=strategy.num_processes,
                reload_every_n_epochs=reload_every_n_epochs,
            )
        )
    combined.flattened = prepared
    counts = [
        num_batches(agree_on_length(loader, strategy, stage, allow_zero_length), limit, stage) for loader in prepared
    ]
    combined.limits = counts
    return combined, counts


def _combine(loaders: Any, stage: RunningStage) -> CombinedLoader:
    training = stage is RunningStage.TRAINING
    if not isinstance(loaders, CombinedLoader):
        return CombinedLoader(loaders, "max_size_cycle" if training else "sequential")
    if training and loaders.mode == "sequential":
        raise ValueError(
            'Training can\'t read a CombinedLoader(mode="sequential"); use "min_size", "max_size_cycle" or "max_size".'
        )
    if stage is RunningStage.PREDICTING and loaders.mode != "sequential":
        raise ValueError(f'`trainer.predict()` reads a CombinedLoader(mode="sequential") only, not {loaders.mode!r}.')
    return loaders


def prepare_loader(
    loader: Any,
    *,
    stage: RunningStage,
    sampler_kwargs: dict[str, Any] | None = None,
    use_distributed_sampler: bool = True,
    overfit: bool = False,
    seed: int | None = None,
    process: Callable[[Any], Any] | None = None,
    global_rank: int = 0,
    num_processes: int = 1,
    reload_every_n_epochs: int = 0,
) -> Any:
    """Returns the loader that a stage reads in the place of the user's.

    - Distributed training: every rank gets the same number of indices; Random- and SequentialSampler become a shuffling
      DistributedSampler, other samplers keep their order, and a user's batch sampler is dealt out batch by batch.
    - Distributed evaluation and prediction: each sample is read exactly once over all ranks, in its order.
    - Prediction: ``drop_last`` is off, and the dataset indices of each batch are kept (see `batch_indices`).
    - Loader workers get a seed each after ``seed_everything(workers=True)``.

    Loaders of an IterableDataset, and iterables that are no DataLoader, are read as they are.

    Args:
        loader: What the user made; it stays as it is, but for its ``worker_init_fn``.
        stage: What it is for.
        sampler_kwargs: ``num_replicas`` and ``rank``; None when the run is not distributed.
        use_distributed_sampler: False leaves it to the user to deal out the data.
        overfit: Don't shuffle.
        seed: Of the order of samples; None takes the one of `seed_everything`, else 0.
        process: The strategy's ``process_dataloader``.
        global_rank: This process's rank, for the workers' seeds.
        num_processes: Processes on this host, for advice about the number of workers.
        reload_every_n_epochs: The Trainer's, for a warning about a torch bug.
    """
    if stage is not RunningStage.TRAINING and is_shuffled(loader):
        rank_zero_warn(
            f"The sampler of your `{stage.dataloader_prefix}_dataloader` shuffles; it is strongly recommended to turn"
            " shuffling off for validation, test and prediction.",
            category=PossibleUserWarning,
        )
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        distributed = use_distributed_sampler and sampler_kwargs is not None and not _is_distributed(loader)
        replicas = {**sampler_kwargs, "seed": global_seed() if seed is None else seed} if distributed else None  # pyright: ignore[reportGeneralTypeIssues]
        if stage is RunningStage.PREDICTING:
            loader = _for_prediction(loader, replicas)
        elif replicas is not None:
            loader = _for_rank(loader, replicas, stage is RunningStage.TRAINING, overfit)
    if process is not None:
        loader = process(loader)
    _advise(loader, f"{stage.dataloader_prefix}_dataloader", num_processes, reload_every_n_epochs)
    if workers_are_seeded() and getattr(loader, "worker_init_fn", False) is None:
        loader.worker_init_fn = partial(worker_init_function, rank=global_rank)
    return loader


def _is_distributed(loader: DataLoader) -> bool:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
    return any(isinstance(sampler, (DistributedSampler, DistributedBatchSampler)) for sampler in samplers)


def _for_rank(loader: DataLoader, replicas: dict[str, Any], training: bool, overfit: bool) -> DataLoader:
    if has_own_batch_sampler(loader):
        return rebuild_loader(
            loader, batch_sampler=DistributedBatchSampler(loader.batch_sampler, pad=training, **replicas)
        )
    return rebuild_loader(loader, sampler=_rank_sampler(loader, replicas, training, overfit))


def _rank_sampler(loader: DataLoader, replicas: dict[str, Any], training: bool, overfit: bool) -> DistributedSampler:
    sampler, dataset = index_sampler(loader), loader.dataset
    every_index_once = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sized_len(sampler) == sized_len(dataset)
    )
    if training and every_index_once:
        return DistributedSampler(dataset, shuffle=not overfit, **replicas)
    if training:
        return DistributedSamplerWrapper(sampler, **replicas)
    if every_index_once and isinstance(sampler, RandomSampler):
        return UnpaddedDistributedSampler(range(len(sampler)), shuffle=True, **replicas)
    return UnpaddedDistributedSampler(sampler, **replicas)


def _for_prediction(loader: DataLoader, replicas: dict[str, Any] | None) -> DataLoader:
    """A loader of all samples of this rank, whose batch sampler keeps the indices of the batches."""
    if loader.batch_sampler is None:  # batch_size=None: there are no batches of indices
        return loader if replicas is None else _for_rank(loader, replicas, training=False, overfit=False)
    batch_sampler: Any = loader.batch_sampler
    if isinstance(batch_sampler, RecordedBatchSampler):  # the user passes the same CombinedLoader again
        batch_sampler = batch_sampler.wrapped
    own = has_own_batch_sampler(loader)
    if own and getattr(batch_sampler, "drop_last", False):
        rank_zero_warn(
            f"The batch sampler {type(batch_sampler).__name__} has drop_last=True, so the predictions will lack the"
            " samples that it drops; set it to False for prediction.",
            category=PossibleUserWarning,
        )
    if own and replicas is not None:
        batch_sampler = DistributedBatchSampler(batch_sampler, pad=False, **replicas)
    elif not own:
        sampler = index_sampler(loader) if replicas is None else _rank_sampler(loader, replicas, False, False)
        batch_size = batch_sampler.batch_size if loader.batch_size is None else loader.batch_size
        batch_sampler = BatchSampler(sampler, batch_size, drop_last=False)
    recorded: Any = RecordedBatchSampler(batch_sampler)
    try:
        return rebuild_loader(loader, batch_sampler=recorded)
    except MisconfigurationException:  # a class that takes a sampler may still not take a batch sampler
        if replicas is not None:
            loader = _for_rank(loader, replicas, training=False, overfit=False)
        return copy_loader(loader, batch_sampler=recorded)


def disable_shuffling(combined: CombinedLoader, stage: RunningStage) -> None:
    """Gives the loaders that don't read in order a SequentialSampler, in place, and says so."""
    flattened = list(combined.flattened)
    for index, loader in enumerate(flattened):
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            continue
        if has_own_batch_sampler(loader) or isinstance(index_sampler(loader), SequentialSampler):
            continue
        rank_zero_warn(
            f"overfit_batches needs the same batches in every epoch: shuffling of your `{stage.dataloader_prefix}"
            "_dataloader` is turned off."
        )
        flattened[index] = rebuild_loader(loader, sampler=SequentialSampler(loader.dataset))  # pyright: ignore[reportArgumentType]
    combined.flattened = flattened


def suggested_max_num_workers(num_processes: int) -> int:
    """The most loader workers that make sense for each of ``num_processes`` processes on this host."""
    if num_processes < 1:
        raise ValueError(f"num_processes={num_processes}: at least one process runs on this host.")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // num_processes - 1)  # one core is left to the process itself


def _advise(loader: Any, name: str, num_processes: int, reload_every_n_epochs: int) -> None:
    """Warns about settings of a loader that make it slow or, by a bug of torch, unstable."""
    if not isinstance(loader, DataLoader):
        return
    context = loader.multiprocessing_context
    start_method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    upper_bound = suggested_max_num_workers(num_processes)
    if loader.num_workers > 0 and start_method == "spawn" and not loader.persistent_workers:
        rank_zero_warn(f"Consider persistent_workers=True in '{name}': its spawned workers then start only once.")
    elif loader.num_workers < 2 and upper_bound > 1:
        rank_zero_warn(
            f"the '{name}' reads with num_workers={loader.num_workers}: training may wait for data. This machine has"
            f" room for num_workers={upper_bound} in its DataLoader.",
            category=PossibleUserWarning,
        )
    if loader.persistent_workers and loader.pin_memory and reload_every_n_epochs > 0:
        rank_zero_warn(
            f"'{name}' has pin_memory=True and persistent_workers=True, which with reload_dataloaders_every_n_epochs"
            f"={reload_every_n_epochs} can be unstable (pytorch issue 91252); set pin_memory=False.",
            category=PossibleUserWarning,
        )
