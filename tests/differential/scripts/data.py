"""Scripts about where batches come from: loaders, collections of loaders, limits, datamodules, transfer."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from differential.harness import script
from differential.nets import Batches, Stream, csv_trainer, dataset, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub


@script
def several_val_loaders(L: Any, tmp: Path, rec: Record) -> None:
    """Two evaluation loaders: suffixes of metric names, `dataloader_idx`, limits per loader, returned results."""

    class Several(net_class(L)):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            rec.event("val", batch_idx=batch_idx, dataloader_idx=dataloader_idx)
            self.log("val_loss", self.loss(batch), prog_bar=True)
            self.log(f"own_{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            self.log("end", 1.0)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            return self(batch[0]) + dataloader_idx

    loaders = [loader(4, seed=2), loader(6, seed=3)]
    trainer = csv_trainer(L, tmp, max_epochs=2)
    module = Several()
    trainer.fit(module, loader(4), loaders)
    rec.result(trainer, "fit")
    for stage in ("validate", "test", "predict"):
        rec.fact(f"{stage}.returns", getattr(trainer, stage)(module, dataloaders=loaders))
        rec.metrics(trainer, stage)
    rec.csv(tmp / "logs" / "version_0")
    trainer = csv_trainer(L, tmp / "limited", limit_val_batches=0.5, num_sanity_val_steps=-1)
    trainer.fit(module, loader(4), loaders)
    rec.fact("limited", [trainer.num_val_batches, trainer.num_sanity_val_batches])
    rec.metrics(trainer, "limited")


@script
def train_collections(L: Any, tmp: Path, rec: Record) -> None:
    """Training on dicts, lists and nests of loaders of unequal length, and on `CombinedLoader` in each mode."""
    combined = sub(L, "utilities").CombinedLoader

    class Collection(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("train", batch=batch, batch_idx=batch_idx)
            parts = torch.utils._pytree.tree_leaves(batch)
            return sum(
                self(part).pow(2).mean() for part in parts if isinstance(part, torch.Tensor) and part.shape[-1] == 4
            )

    short, long = loader(4, seed=2), loader(8, seed=3)
    sources: dict[str, Any] = {
        "dict": {"a": short, "b": long},
        "list": [short, long],
        "tuple": (short, long),
        "nested": {"a": [short, long], "b": {"c": long}},
        "min_size": combined({"a": short, "b": long}, "min_size"),
        "max_size": combined({"a": short, "b": long}, "max_size"),
        "max_size_cycle": combined([short, long], "max_size_cycle"),
        "sequential": combined([short, long], "sequential"),
    }
    for name, source in sources.items():
        rec.event(f"== {name} ==")
        trainer = quiet_trainer(L, tmp, max_epochs=2)
        if not rec.error(name, lambda t=trainer, s=source: t.fit(Collection(), s), names=("sequential",)):
            rec.counters(trainer, name)


@script
def combined_loader(L: Any, tmp: Path, rec: Record) -> None:
    """`CombinedLoader` by itself: what it yields, its lengths, limits and parts."""
    combined = sub(L, "utilities").CombinedLoader
    for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
        for limits in (None, 1, [2, 1]):
            source = combined({"a": range(3), "b": [range(5, 7)]}, mode)
            source.limits = limits
            iter(source)
            name = f"{mode} {limits}"
            rec.fact(f"{name}.length", len(source))
            rec.fact(name, list(source))
            rec.fact(f"{name}.parts", [list(part) for part in source.flattened])
        unsized = combined({"a": DataLoader(Stream(4), batch_size=2), "b": range(2)}, mode)
        rec.error(f"{mode}.unsized", lambda unsized=unsized: len(iter(unsized)))
        rec.fact(f"{mode}.unsized batches", len(list(unsized)))
    rec.error("mode", lambda: combined([range(2)], "nonsense"), names=("nonsense",))
    rec.error("early length", lambda: len(combined([DataLoader(Stream(2))], "min_size")))
    nested = combined([loader(4), {"x": loader(4, shuffle=True)}], "min_size")
    rec.fact("samplers", [type(sampler).__name__ for sampler in torch.utils._pytree.tree_leaves(nested.sampler)])
    nested.flattened = [range(2), range(3)]
    rec.fact("replaced", nested.iterables)


@script
def evaluation_modes(L: Any, tmp: Path, rec: Record) -> None:
    """`CombinedLoader` modes in evaluation and prediction."""
    combined = sub(L, "utilities").CombinedLoader

    class Any_(net_class(L)):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            rec.event("val", batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
            self.log("count", 1.0, reduce_fx="sum", batch_size=2)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch_idx

    for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
        rec.event(f"== {mode} ==")
        for stage in ("validate", "predict"):
            source = combined([loader(4), loader(6)], mode)
            trainer = quiet_trainer(L, tmp)
            results: list[Any] = []
            run = lambda t=trainer, s=source, r=results, g=stage: r.append(getattr(t, g)(Any_(), s))  # noqa: E731
            rec.error(f"{mode}.{stage}", run)
            rec.fact(f"{mode}.{stage}.returns", results)


@script
def predict_shapes(L: Any, tmp: Path, rec: Record) -> None:
    """What `predict` returns: one loader, several, nothing wanted, no batches, default step, drop_last."""

    class Whole(L.LightningModule):
        def forward(self, batch: Any) -> Any:
            return batch[0].sum()

    module, default = net_class(L)(), Whole()
    trainer = quiet_trainer(L, tmp)
    rec.fact("one", trainer.predict(module, loader(6)))
    rec.fact("list of one", trainer.predict(module, [loader(4)]))
    rec.fact("default step", trainer.predict(default, loader(6)))
    rec.fact("two", trainer.predict(default, [loader(4), loader(2, seed=2)]))
    rec.fact("unwanted", trainer.predict(default, loader(4), return_predictions=False))
    rec.fact("drop_last", trainer.predict(default, loader(5, drop_last=True)))
    rec.fact("shuffled", [len(batch) for batch in [trainer.predict(default, loader(6, shuffle=True))]])
    rec.fact("limited", quiet_trainer(L, tmp, limit_predict_batches=2).predict(default, loader(6)))
    rec.fact("none", quiet_trainer(L, tmp, limit_predict_batches=0).predict(default, loader(6)))
    rec.fact("unsized", trainer.predict(default, DataLoader(Stream(4), batch_size=2)))
    rec.fact("own loader", trainer.predict(default, Batches([[torch.ones(1)], [torch.zeros(1)]])))


@script
def limits(L: Any, tmp: Path, rec: Record) -> None:
    """Numbers and fractions for every limit, and what is refused."""

    class Counting(net_class(L)):
        counts: dict[str, int]

        def count(self, name: str) -> None:
            self.counts[name] = self.counts.get(name, 0) + 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count("train")
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.count("val")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.count("test")

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.count("predict")

    for limit in (0, 1, 3, 100, 0.0, 0.1, 0.5, 1.0, 1.5, -1):
        module = Counting()
        module.counts = {}

        def run(limit: Any = limit, module: Any = module) -> None:
            names = ("train", "val", "test", "predict")
            trainer = quiet_trainer(
                L, tmp, **{f"limit_{name}_batches": limit for name in names}, num_sanity_val_steps=0
            )
            trainer.fit(module, loader(10), loader(10))
            trainer.test(module, loader(10))
            trainer.predict(module, loader(10))

        rec.error(f"{limit!r}", run)
        rec.fact(f"{limit!r}.counts", module.counts)


@script
def overfitting(L: Any, tmp: Path, rec: Record) -> None:
    """`overfit_batches` takes the shuffling out of training and limits validation to as many batches."""

    class Watching(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("train", batch=batch)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            rec.event("val", batch=batch)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            rec.event("test", batch_idx=batch_idx)

    for amount in (1, 3, 0.4):
        rec.event(f"== {amount} ==")
        trainer = quiet_trainer(L, tmp, overfit_batches=amount, max_epochs=2)
        module = Watching()
        trainer.fit(module, loader(10, shuffle=True), loader(10, seed=2))
        sampler = trainer.train_dataloader.sampler
        rec.fact(f"{amount}.sampler", type(sampler).__name__)
        trainer.test(module, loader(6))
        rec.result(trainer, str(amount))


@script
def reloading(L: Any, tmp: Path, rec: Record) -> None:
    """How often the data hooks are called, with and without `reload_dataloaders_every_n_epochs`."""

    class Reloading(net_class(L)):
        def train_dataloader(self) -> Any:
            rec.event("train_dataloader", epoch=self.current_epoch)
            return loader(2 + 2 * self.current_epoch)

        def val_dataloader(self) -> Any:
            rec.event("val_dataloader", epoch=self.current_epoch)
            return loader(4)

        def on_train_epoch_start(self) -> None:
            rec.event("epoch", batches=self.trainer.num_training_batches)

    for every in (0, 1, 2):
        for sanity in (0, 1):
            rec.event(f"== {every} {sanity} ==")
            trainer = quiet_trainer(
                L, tmp, reload_dataloaders_every_n_epochs=every, max_epochs=4, num_sanity_val_steps=sanity
            )
            trainer.fit(Reloading())
            rec.result(trainer, f"{every}.{sanity}")


@script
def datamodule_hooks(L: Any, tmp: Path, rec: Record) -> None:
    """Datamodule and module both have hooks: who wins, and what `from_datasets` and the attributes give."""

    class Data(L.LightningDataModule):
        def prepare_data(self) -> None:
            rec.event("data.prepare_data")

        def setup(self, stage: str) -> None:
            rec.event("data.setup", stage=stage, trainer=self.trainer is not None)

        def train_dataloader(self) -> Any:
            rec.event("data.train_dataloader")
            return loader(4)

        def test_dataloader(self) -> Any:
            return [loader(2), loader(4)]

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part * 2 for part in batch]

    class Both(net_class(L)):
        def train_dataloader(self) -> Any:
            rec.event("module.train_dataloader")
            return loader(8)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            rec.event("module.on_before_batch_transfer")
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part + 1 for part in batch]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("step", batch=batch)
            return self.loss(batch)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            rec.event("test", batch=batch, dataloader_idx=dataloader_idx)

    module = Both()
    trainer = quiet_trainer(L, tmp)
    data = Data()
    trainer.fit(module, data)
    rec.fact("same", [trainer.datamodule is data, data.trainer is trainer])
    trainer.test(module, data)
    rec.result(trainer)
    made = L.LightningDataModule.from_datasets(
        dataset(4), dataset(2), predict_dataset=[dataset(2), dataset(2)], batch_size=2
    )
    rec.fact("made", [len(made.train_dataloader()), len(made.val_dataloader()), len(made.predict_dataloader())])
    rec.fact("shuffled", type(made.train_dataloader().sampler).__name__)
    rec.error("no test data", lambda: trainer.test(module, datamodule=made), names=("test_dataloader",))


@script
def batch_transfer(L: Any, tmp: Path, rec: Record) -> None:
    """Batches of many types reach the step as they were made, moved by `transfer_batch_to_device`."""
    Pair = namedtuple("Pair", "x y")

    class Own:
        def __init__(self) -> None:
            self.x, self.moved = torch.ones(2, 4), False

        def to(self, device: Any, **kwargs: Any) -> Any:
            self.moved = True
            return self

    class Moved(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kind = type(batch).__name__
            rec.event("step", kind=kind, batch=batch.moved if isinstance(batch, Own) else batch)
            return self(torch.ones(1, 4)).sum()

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            rec.event("transfer", kind=type(batch).__name__, device=device)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    x = torch.ones(2, 4)
    batches = [
        x,
        (x, x),
        [x, "text"],
        {"x": x, "n": 3, "none": None},
        Pair(x, x),
        Own(),
        {"deep": [{"x": (x,)}]},
        "text",
    ]
    trainer = quiet_trainer(L, tmp)
    trainer.fit(Moved(), Batches(batches))
    rec.result(trainer)


@script
def random_numbers(L: Any, tmp: Path, rec: Record) -> None:
    """Dropout and a shuffling loader: which random numbers a run with sanity check and validation uses up."""

    class Noisy(net_class(L)):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self(torch.nn.functional.dropout(x, 0.5, self.training)), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            rec.event("val", noise=torch.rand(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("train", batch=batch)
            return super().training_step(batch, batch_idx)

    rec.fact("seed", L.seed_everything(11))
    for name, kwargs in {"plain": {}, "shuffled": {"shuffle": True}}.items():
        L.seed_everything(12)
        trainer = quiet_trainer(L, tmp, max_epochs=2, val_check_interval=0.5)
        trainer.fit(Noisy(), loader(8, **kwargs), loader(4, seed=2))
        rec.result(trainer, name)
        rec.fact(f"{name}.next", torch.rand(4))
    generator = torch.Generator().manual_seed(5)
    trainer = quiet_trainer(L, tmp, max_epochs=2)
    trainer.fit(Noisy(), loader(8, shuffle=True, generator=generator))
    rec.weights(trainer.lightning_module, "own generator")


@script
def loader_sources(L: Any, tmp: Path, rec: Record) -> None:
    """Loaders by argument win over those of module and datamodule; anything that can be iterated will do."""

    class Sourced(net_class(L)):
        def train_dataloader(self) -> Any:
            return loader(2)

        def val_dataloader(self) -> Any:
            return [loader(2), loader(4)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            rec.event("val", dataloader_idx=dataloader_idx)

    trainer = quiet_trainer(L, tmp)
    for name, arguments in {
        "own": {},
        "train": {"train_dataloaders": loader(6)},
        "val": {"val_dataloaders": loader(6)},
        "own loader": {"train_dataloaders": Batches(list(loader(4)))},
        "no val": {"val_dataloaders": []},
    }.items():
        rec.event(f"== {name} ==")
        trainer = quiet_trainer(L, tmp)
        trainer.fit(Sourced(), **arguments)
        rec.counters(trainer, name)
        rec.fact(f"{name}.types", [type(trainer.train_dataloader).__name__, type(trainer.val_dataloaders).__name__])
