"""Loaders before they are read: sources, samplers per rank, rebuilt subclasses, counts."""

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage as ReferenceStage
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from leyden.base.errors import MisconfigurationException, PossibleUserWarning
from leyden.base.seed import worker_init_function
from leyden.base.states import RunningStage, TrainerFn
from leyden.core.datamodule import LightningDataModule
from leyden.core.module import LightningModule
from leyden.loops import data
from leyden.loops.combined import CombinedLoader
from leyden.loops.data import (
    DataSource,
    DistributedSamplerWrapper,
    UnpaddedDistributedSampler,
    batch_indices,
    capture_loader_args,
    is_shuffled,
    num_batches,
    prepare_loader,
    set_epoch,
    setup_loaders,
)

TRAIN, VAL, TEST, PREDICT = (
    RunningStage.TRAINING,
    RunningStage.VALIDATING,
    RunningStage.TESTING,
    RunningStage.PREDICTING,
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "suggested_max_num_workers", lambda count: 1)  # no advice that depends on the host
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    logging.getLogger("leyden").setLevel(logging.ERROR)


def ranks(loader: DataLoader, stage: RunningStage, world: int, epoch: int = 0, **kwargs: Any) -> list[list[list[int]]]:
    """Batches of every rank of a world."""
    result = []
    for rank in range(world):
        torch.manual_seed(rank)  # the order must not depend on a rank's own random state
        prepared = prepare_loader(loader, stage=stage, sampler_kwargs={"num_replicas": world, "rank": rank}, **kwargs)
        set_epoch(prepared, epoch)
        result.append([batch.tolist() for batch in prepared])
        assert len(prepared) == len(result[-1])
    return result


def flat(batches: Any) -> list[int]:
    return [index for part in batches for index in (flat(part) if isinstance(part, list) else [part])]


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


# ---- training on several ranks


@pytest.mark.parametrize("shuffle", [True, False])
def test_training_shuffles_evenly(shuffle: bool) -> None:
    loader = DataLoader(range(10), batch_size=2, shuffle=shuffle)
    dealt = ranks(loader, TRAIN, 3)
    assert [len(flat(part)) for part in dealt] == [4, 4, 4]  # 10 samples, two of them repeated
    assert set(flat(dealt)) == set(range(10))
    expected = list(DistributedSampler(range(10), num_replicas=3, rank=1, seed=0))  # pyright: ignore[reportArgumentType]
    assert flat(dealt[1]) == expected
    assert ranks(loader, TRAIN, 3, epoch=1) != dealt
    assert ranks(loader, TRAIN, 3, seed=5) != dealt
    assert flat(ranks(loader, TRAIN, 2, overfit=True)[0]) == [0, 2, 4, 6, 8]


def test_order_is_that_of_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    two = ranks(DataLoader(range(24), batch_size=6), TRAIN, 2)
    four = ranks(DataLoader(range(24), batch_size=3), TRAIN, 4)
    for step in range(2):
        assert set(flat([part[step] for part in two])) == set(flat([part[step] for part in four]))
    assert ranks(DataLoader(range(24), batch_size=6), TRAIN, 2, seed=11) == two


def test_own_samplers_keep_their_order() -> None:
    dealt = ranks(DataLoader(range(10), batch_size=2, sampler=[7, 3, 5, 1, 9]), TRAIN, 2)
    assert dealt == [[[7, 5], [9]], [[3, 1], [7]]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler([1.0] * 12, 12, replacement=False),
        lambda: SubsetRandomSampler(range(12)),
        lambda: RandomSampler(range(12), num_samples=8),
    ],
)
def test_random_samplers_agree_between_ranks(make: Any) -> None:
    sampler = make()
    loader = DataLoader(range(12), batch_size=3, sampler=sampler)
    dealt = ranks(loader, TRAIN, 2)
    assert len(set(flat(dealt))) == len(sampler)  # nothing twice: both ranks drew the same order
    assert ranks(loader, TRAIN, 2) == dealt
    assert ranks(loader, TRAIN, 2, epoch=1) != dealt
    evaluated = ranks(loader, VAL, 2)
    assert len(set(flat(evaluated))) == len(sampler)


def test_drawing_leaves_the_random_state_alone() -> None:
    loader = DataLoader(range(8), sampler=SubsetRandomSampler(range(8)))
    prepared = prepare_loader(loader, stage=TRAIN, sampler_kwargs={"num_replicas": 2, "rank": 0})
    state = torch.get_rng_state()
    list(prepared.sampler)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampler_without_length() -> None:
    class Endless(Sampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match=r"Endless has no finite.*use_distributed_sampler=False"):
        ranks(DataLoader(range(3), sampler=Endless()), TRAIN, 2)


def test_distributed_loaders_stay() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1)  # pyright: ignore[reportArgumentType]
    kwargs = {"stage": TRAIN, "sampler_kwargs": {"num_replicas": 2, "rank": 0}}
    for loader in (
        DataLoader(range(8), sampler=sampler),
        DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False)),
        DataLoader(Numbers()),
        DataLoader(range(8), sampler=UnpaddedDistributedSampler(range(8), 2, 1)),
        [torch.zeros(2)],
    ):
        assert prepare_loader(loader, **kwargs) is loader
    plain = DataLoader(range(8))
    assert prepare_loader(plain, **kwargs, use_distributed_sampler=False) is plain
    assert prepare_loader(plain, stage=TRAIN) is plain


def test_original_loader_is_untouched() -> None:
    loader = DataLoader(range(8), batch_size=4)
    loader.note = "mine"
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    prepared = prepare_loader(loader, stage=TRAIN, sampler_kwargs={"num_replicas": 2, "rank": 0})
    assert (loader.sampler, loader.batch_sampler) == (sampler, batch_sampler)
    assert prepared.sampler is not sampler
    assert (prepared.note, prepared.dataset, prepared.batch_size) == ("mine", loader.dataset, 4)


# ---- evaluation


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_evaluation_sees_each_sample_once(world: int, count: int) -> None:
    for stage in (VAL, TEST, PREDICT):
        dealt = ranks(DataLoader(range(count), batch_size=2), stage, world)
        assert sorted(flat(dealt)) == list(range(count))
        assert all(flat(part) == list(range(count))[rank::world] for rank, part in enumerate(dealt))


def test_evaluation_with_shuffling() -> None:
    loader = DataLoader(range(9), batch_size=2, shuffle=True)
    with pytest.warns(PossibleUserWarning, match="val_dataloader` shuffles"):
        dealt = ranks(loader, VAL, 2)
    assert sorted(flat(dealt)) == list(range(9))
    assert flat(dealt) != flat(ranks(DataLoader(range(9), batch_size=2), VAL, 2))
    assert ranks(loader, VAL, 2) == dealt
    assert ranks(loader, VAL, 2, epoch=1) != dealt


def test_unpadded_sampler_numbers() -> None:
    samplers = [UnpaddedDistributedSampler(range(7), 3, rank) for rank in range(3)]
    assert [len(sampler) for sampler in samplers] == [3, 2, 2]
    assert [sampler.num_samples for sampler in samplers] == [3, 2, 2]
    padded = [DistributedSamplerWrapper(range(7), 3, rank) for rank in range(3)]
    assert [list(sampler) for sampler in padded] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert list(DistributedSamplerWrapper([5], 4, 3)) == [5]
    assert list(DistributedSamplerWrapper([], 4, 3)) == []
    with pytest.raises(ValueError, match="rank"):
        UnpaddedDistributedSampler(range(7), 3, 3)


# ---- batch samplers


class Buckets(Sampler):
    """Batches by a rule of its own; takes no sampler."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches
        self.epoch = -1

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_own_batch_samplers_are_dealt_by_batch() -> None:
    buckets = Buckets([[0, 1], [2], [3, 4, 5]])
    loader = DataLoader(range(6), batch_sampler=buckets)
    assert ranks(loader, TRAIN, 2, epoch=4) == [[[0, 1], [3, 4, 5]], [[2], [0, 1]]]
    assert buckets.epoch == 4
    assert ranks(loader, VAL, 2) == [[[0, 1], [3, 4, 5]], [[2]]]
    assert ranks(loader, PREDICT, 2) == [[[0, 1], [3, 4, 5]], [[2]]]


def test_plain_batch_sampler_around_a_sampler() -> None:
    loader = DataLoader(range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, drop_last=True))
    assert ranks(loader, VAL, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert ranks(loader, PREDICT, 2) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]


def test_no_batching() -> None:
    loader = DataLoader(torch.arange(5), batch_size=None)  # pyright: ignore[reportArgumentType]
    assert ranks(loader, VAL, 2) == [[0, 2, 4], [1, 3]]
    prepared = prepare_loader(loader, stage=PREDICT)
    assert prepared is loader
    assert batch_indices(prepared, 0) is None


# ---- prediction


@pytest.mark.parametrize("num_workers", [0, 2])
def test_prediction_keeps_indices_and_drops_nothing(num_workers: int) -> None:
    loader = DataLoader(range(10, 20), batch_size=4, drop_last=True, num_workers=num_workers)
    prepared = prepare_loader(loader, stage=PREDICT)
    for _ in range(2):
        seen = [(batch.tolist(), batch_indices(prepared, index)) for index, batch in enumerate(prepared)]
        assert seen == [([10, 11, 12, 13], [0, 1, 2, 3]), ([14, 15, 16, 17], [4, 5, 6, 7]), ([18, 19], [8, 9])]
    assert batch_indices(prepared, 2) is None or batch_indices(prepared, 2) == []  # each is handed out once
    assert batch_indices(loader, 0) is None
    assert (loader.drop_last, loader.batch_sampler.drop_last) == (True, True)  # pyright: ignore[reportOptionalMemberAccess]
    again = prepare_loader(prepared, stage=PREDICT)  # the loaders of a CombinedLoader that is passed again
    assert [batch_indices(again, index) for index, _ in enumerate(again)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_prediction_with_own_batch_sampler() -> None:
    prepared = prepare_loader(DataLoader(range(6), batch_sampler=Buckets([[3, 1], [5]])), stage=PREDICT)
    assert [batch_indices(prepared, index) for index, _ in enumerate(prepared)] == [[3, 1], [5]]
    buckets = Buckets([[1]])
    buckets.drop_last = True
    with pytest.warns(PossibleUserWarning, match="Buckets has drop_last=True"):
        prepare_loader(DataLoader(range(6), batch_sampler=buckets), stage=PREDICT)


# ---- subclasses


class Wrapping(DataLoader):
    """Changes its arguments before it passes them on, and takes more than DataLoader."""

    def __init__(self, count: int, *, size: int, note: Any, **kwargs: Any) -> None:
        super().__init__([number + 100 for number in range(count)], batch_size=size, **kwargs)
        self.upper = note.upper()


class Endless(DataLoader):
    """Makes its iterator at once: what it reads was decided in ``__init__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)
        self.iterator = super().__iter__()


class Strict(DataLoader):
    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False) -> None:
        super().__init__(dataset, batch_size=batch_size, shuffle=shuffle)


class Positional(DataLoader):
    def __init__(self, dataset: Any, batch_size: int = 3, shuffle: bool = True, sampler: Any = None) -> None:
        super().__init__(dataset, batch_size, shuffle, sampler)


class Hidden(DataLoader):
    def __init__(self, path: str, sampler: Any = None) -> None:
        super().__init__(range(len(path)), sampler=sampler)  # pyright: ignore[reportArgumentType]


def test_subclass_is_called_again_with_its_arguments() -> None:
    with capture_loader_args():
        loader = Wrapping(6, size=2, note="x", shuffle=True)
        loader.later = 3
        loader.upper = "Z"
    dealt = ranks(loader, TRAIN, 2)
    assert set(flat(dealt)) == set(range(100, 106))
    for stage in (TRAIN, VAL, PREDICT):
        prepared = prepare_loader(loader, stage=stage, sampler_kwargs={"num_replicas": 2, "rank": 0})
        assert (type(prepared), prepared.upper, prepared.later) == (Wrapping, "Z", 3)
    assert [batch_indices(prepared, index) is not None for index, _ in enumerate(prepared)] == [True, True]


@pytest.mark.parametrize("captured", [True, False])
def test_subclass_that_reads_at_once(captured: bool) -> None:
    def make() -> DataLoader:
        return Endless(range(8), 2, True)

    if captured:
        with capture_loader_args():
            loader = make()
    else:
        loader = make()
    assert sorted(flat(ranks(loader, VAL, 2))) == list(range(8))
    prepared = prepare_loader(loader, stage=PREDICT)
    assert sorted(flat([batch_indices(prepared, index) for index, _ in enumerate(prepared)])) == list(range(8))


def test_positional_arguments() -> None:
    with capture_loader_args():
        loader = Positional(range(6), 2, True)
    assert sorted(flat(ranks(loader, VAL, 2))) == list(range(6))
    assert len(prepare_loader(loader, stage=PREDICT)) == 3


def test_subclasses_that_cannot_be_rebuilt() -> None:
    with pytest.raises(MisconfigurationException, match=r"Strict has to be replaced.*takes no 'sampler'"):
        ranks(Strict(range(4)), TRAIN, 2)
    with pytest.raises(MisconfigurationException, match=r"arguments \['path'\].*set self\.path"):
        ranks(Hidden("abc"), TRAIN, 2)
    with capture_loader_args():
        hidden = Hidden("abcd")
    assert ranks(hidden, VAL, 2) == [[[0], [2]], [[1], [3]]]


def test_prediction_in_one_process_takes_any_subclass() -> None:
    for loader in (Strict(range(3), 2), Hidden("abc")):
        prepared = prepare_loader(loader, stage=PREDICT)
        assert flat([batch_indices(prepared, index) for index, _ in enumerate(prepared)]) == [0, 1, 2]


def test_capture_leaves_no_trace() -> None:
    def state() -> list[Any]:
        return [vars(cls).get(name) for cls in (DataLoader, Wrapping, Endless) for name in ("__init__", "__setattr__")]

    before = state()

    def fail() -> None:
        with capture_loader_args(), capture_loader_args():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert state() == before


# ---- workers


def test_workers_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_loader(DataLoader(range(2)), stage=TRAIN).worker_init_fn is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    function = prepare_loader(DataLoader(range(2)), stage=TRAIN, global_rank=3).worker_init_fn
    assert isinstance(function, functools.partial)
    assert (function.func, function.keywords) == (worker_init_function, {"rank": 3})
    assert prepare_loader(DataLoader(range(2), worker_init_fn=print), stage=TRAIN).worker_init_fn is print
    assert prepare_loader([1], stage=TRAIN) == [1]


def test_advice_about_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "suggested_max_num_workers", lambda count: 7)
    with pytest.warns(PossibleUserWarning, match=r"'test_dataloader' reads with.*num_workers=7"):
        prepare_loader(DataLoader(range(2)), stage=TEST)
    slow = DataLoader(range(2), num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="persistent_workers=True in 'train_dataloader'"):
        prepare_loader(slow, stage=TRAIN)
    unstable = DataLoader(range(2), num_workers=2, persistent_workers=True, pin_memory=True)
    with pytest.warns(PossibleUserWarning, match="91252"):
        prepare_loader(unstable, stage=TRAIN, reload_every_n_epochs=1)


def test_suggested_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert [data.suggested_max_num_workers(count) for count in (1, 2, 5, 16, 40)] == [15, 7, 2, 1, 1]
    with pytest.raises(ValueError, match="num_processes=0"):
        data.suggested_max_num_workers(0)


# ---- counts


@pytest.mark.parametrize("limit", [0, 1, 3, 100, 0.0, 0.01, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 250, math.inf])
def test_num_batches_as_lightning(length: float, limit: float) -> None:
    def outcome(function: Any) -> Any:
        try:
            return function()
        except Exception as error:
            return type(error).__name__

    ours = outcome(lambda: num_batches(length, limit, VAL))
    theirs = outcome(lambda: _parse_num_batches(ReferenceStage.VALIDATING, length, limit))
    if length == math.inf and isinstance(limit, float) and limit == 0.0:
        assert ours == 0  # Lightning never asks; its error would be wrong
    else:
        assert ours == theirs


def test_num_batches_errors() -> None:
    with pytest.raises(MisconfigurationException, match=r"limit_train_batches=0.1 of 5 batches.*at least 0.2"):
        num_batches(5, 0.1, TRAIN)
    with pytest.raises(MisconfigurationException, match=r"limit_test_batches=0.5.*has no length"):
        num_batches(math.inf, 0.5, TEST)


def test_shuffled() -> None:
    assert is_shuffled(DataLoader(range(3), shuffle=True))
    assert not is_shuffled(DataLoader(range(3)))
    assert not is_shuffled(DataLoader(Numbers()))
    assert not is_shuffled([1, 2])
    assert is_shuffled(DataLoader(range(3), batch_sampler=BatchSampler(RandomSampler(range(3)), 2, False)))
    assert not is_shuffled(DataLoader(range(3), batch_sampler=Buckets([[1]])))


# ---- sources and the whole set-up


class WithLoaders(LightningModule):
    def train_dataloader(self) -> Any:
        return {"a": DataLoader(range(4)), "b": DataLoader(range(6), shuffle=True)}

    def val_dataloader(self) -> Any:
        return [DataLoader(range(4), batch_size=2), DataLoader(range(6))]


def test_precedence() -> None:
    module, datamodule = WithLoaders(), LightningDataModule()
    assert DataSource.pick([1], datamodule, module, "train_dataloader").owner is datamodule
    source = DataSource.pick([1], None, module, "train_dataloader")
    assert (source.request(), source.is_module(), source.is_defined()) == ([1], False, True)
    source = DataSource.pick(None, None, module, "train_dataloader")
    assert (set(source.request()), source.is_module(), source.is_defined()) == ({"a", "b"}, True, True)
    assert not DataSource.pick(None, None, module, "test_dataloader").is_defined()
    missing = DataSource.pick(None, datamodule, module, "train_dataloader")
    assert not missing.is_defined()
    with pytest.raises(MisconfigurationException, match=r"LightningDataModule defines no `train_dataloader`"):
        missing.request()


def test_not_iterable() -> None:
    with pytest.raises(TypeError, match=r"`Trainer.fit` was given as dataloaders 3"):
        DataSource(3, None, "train_dataloader").check_iterable(3, TrainerFn.FITTING)
    with pytest.raises(TypeError, match=r"`WithLoaders.val_dataloader\(\)` returned None"):
        DataSource(None, WithLoaders(), "val_dataloader").check_iterable(None, TrainerFn.VALIDATING)


class World:
    """As much of a strategy as loaders see; the other ranks' lengths are given."""

    def __init__(self, lengths: list[float] | None = None, rank: int = 0) -> None:
        self.lengths = lengths or [0]
        self.world_size = len(self.lengths)
        self.global_rank, self.num_processes, self.root_device = rank, self.world_size, torch.device("cpu")
        distributed = self.world_size > 1
        self.distributed_sampler_kwargs = {"num_replicas": self.world_size, "rank": rank} if distributed else None
        self.barriers: list[str] = []
        self.processed: list[Any] = []

    def barrier(self, name: str) -> None:
        self.barriers.append(name)

    def process_dataloader(self, loader: Any) -> Any:
        self.processed.append(loader)
        return loader

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=tensor.dtype).unsqueeze(1)


def set_up(loaders: Any, stage: RunningStage = TRAIN, strategy: Any = None, **kwargs: Any) -> Any:
    fn = kwargs.pop("fn", TrainerFn.FITTING)
    strategy = strategy or World()
    source = DataSource(loaders, None, f"{stage.dataloader_prefix}_dataloader")
    return setup_loaders(source, stage=stage, fn=fn, strategy=strategy, limit=kwargs.pop("limit", 1.0), **kwargs)


def test_set_up_training() -> None:
    world: Any = World()
    source = DataSource(None, WithLoaders(), "train_dataloader")
    combined, counts = setup_loaders(source, stage=TRAIN, fn=TrainerFn.FITTING, strategy=world, limit=5)
    assert (combined.mode, counts, combined.limits, combined.num_batches) == ("max_size_cycle", [4, 5], [4, 5], 5)
    assert world.barriers == ["train_dataloader()"]
    assert world.processed == combined.flattened


def test_set_up_evaluation() -> None:
    combined, counts = set_up(WithLoaders().val_dataloader(), VAL, limit=0.5)
    assert (combined.mode, counts) == ("sequential", [1, 3])
    assert [(batch.tolist(), index, loader) for batch, index, loader in combined][:2] == [([0, 1], 0, 0), ([0], 0, 1)]


def test_set_up_refuses_modes() -> None:
    with pytest.raises(ValueError, match=r"Training can't read a CombinedLoader\(mode=\"sequential\"\)"):
        set_up(CombinedLoader([[1.5]], "sequential"))
    with pytest.raises(ValueError, match=r"not 'max_size'"):
        set_up(CombinedLoader([[1.5]], "max_size"), PREDICT, fn=TrainerFn.PREDICTING)
    mine = CombinedLoader([[torch.zeros(1)]], "max_size")
    assert set_up(mine, VAL)[0] is mine


@pytest.mark.parametrize("stage", [TRAIN, VAL])
def test_overfit_reads_in_order(stage: RunningStage) -> None:
    shuffled, own = DataLoader(range(6), shuffle=True), DataLoader(range(3), batch_sampler=Buckets([[2], [0]]))
    with pytest.warns(UserWarning, match=f"shuffling of your `{stage.dataloader_prefix}_dataloader` is turned off"):
        combined, _ = set_up([shuffled, own, DataLoader(Numbers())], stage, overfit=True)
    assert [flat([batch.tolist() for batch in loader]) for loader in combined.flattened[:2]] == [list(range(6)), [2, 0]]
    with pytest.warns(PossibleUserWarning, match="shuffles"):
        combined, _ = set_up(shuffled, VAL, overfit=True, fn=TrainerFn.VALIDATING)
    assert combined.flattened[0] is shuffled


def test_ranks_agree_on_the_length() -> None:
    def counts(lengths: list[float], stage: RunningStage = TRAIN, **kwargs: Any) -> list[float]:
        return set_up(DataLoader(range(5)), stage, World(lengths), use_distributed_sampler=False, **kwargs)[1]

    with pytest.warns(UserWarning, match="from 3 to 5 batches"):
        assert counts([5, 3]) == [3]
    with pytest.warns(UserWarning, match="from 3 to inf batches"):
        assert counts([math.inf, 3]) == [3]
    assert counts([5, 3], VAL) == [5]  # nothing is synchronised per batch
    with pytest.raises(RuntimeError, match="no batch on rank 1"):
        counts([5, 0])
    with pytest.warns(UserWarning, match=r"no batch on the ranks \[1\]"):
        assert counts([5, 0], allow_zero_length=True) == [5]
    with pytest.warns(UserWarning, match=r"no batch on the ranks \[1\]"):
        assert counts([5, 0], VAL) == [5]


def test_doubtful_lengths_warn() -> None:
    with pytest.warns(UserWarning, match=r"`train_dataloader` \(list\) has no batch"):
        assert set_up(CombinedLoader([[]], "min_size"))[1] == [0]

    class Sized(Numbers):
        def __len__(self) -> int:
            return 5

    with pytest.warns(UserWarning, match="IterableDataset has a `__len__`"):
        assert set_up(DataLoader(Sized()))[1] == [5]
    assert set_up(DataLoader(Numbers()))[1] == [math.inf]
