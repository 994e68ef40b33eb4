"""Scripts about going on from a checkpoint: fit, evaluation, `load_from_checkpoint`, keywords, mismatches."""

from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import Batches, StatefulLoader, csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub

PLACES = ("batch end", "validation end", "epoch end", "after fit")


def saving_callback(L: Any, path: Path, place: str, step: int) -> Any:
    """A callback that writes one checkpoint in the named hook when ``global_step`` is ``step``."""

    class Saving(L.Callback):
        def save(self, trainer: Any, here: str) -> None:
            if here == place and trainer.global_step == step and not trainer.sanity_checking and not path.exists():
                trainer.save_checkpoint(path)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.save(trainer, "batch end")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "validation end")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "epoch end")

    return Saving()


def resumable(L: Any, rec: Record | None = None) -> Any:
    """Adam with a scheduler per step, hyper-parameters, and a note of each batch it sees."""

    class Resumable(net_class(L)):
        def __init__(self, lr: float = 0.05, extra: Any = None) -> None:
            super().__init__(lr)
            self.save_hyperparameters()
            self.seen: list[tuple[Any, ...]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(("train", self.current_epoch, batch_idx, self.global_step, float(batch[0].sum())))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.trainer.sanity_checking:
                self.seen.append(("val", self.current_epoch, batch_idx, self.global_step, float(batch[0].sum())))
            return super().validation_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Resumable


def _resume(L: Any, tmp: Path, rec: Record, name: str, place: str, step: int, make: Any, **kwargs: Any) -> None:
    """Writes a file at a place, goes on from it in a new trainer, and records both runs."""
    path = tmp / f"{name}.ckpt"
    first, second = resumable(L)(), resumable(L)()
    arguments = {"max_epochs": 3, **kwargs}
    trainer = quiet_trainer(L, tmp, **{**arguments, "callbacks": [saving_callback(L, path, place, step)]})
    trainer.fit(first, make(), loader(4, seed=2))
    if place == "after fit":
        trainer.save_checkpoint(path)
        arguments["max_epochs"] += 1
    rec.fact(f"{name}.whole", first.seen)
    content = torch.load(path, weights_only=False)
    rec.fact(f"{name}.loops", [content["epoch"], content["global_step"], content["loops"]])
    trainer = csv_trainer(L, tmp / name, **arguments)
    trainer.fit(second, make(), loader(4, seed=2), ckpt_path=str(path))
    rec.fact(f"{name}.resumed", second.seen)
    rec.result(trainer, name)
    rec.csv(tmp / name / "logs" / "version_0", f"{name}.csv")


@script
def resume_at_epoch_end(L: Any, tmp: Path, rec: Record) -> None:
    """From files written in `on_train_epoch_end`, after validation and after the run."""
    plain = lambda: loader(8)  # noqa: E731
    _resume(L, tmp, rec, "epoch end", "epoch end", 4, plain)
    _resume(L, tmp, rec, "second epoch end", "epoch end", 8, plain)
    _resume(L, tmp, rec, "validation end", "validation end", 4, plain)
    _resume(L, tmp, rec, "after fit", "after fit", 0, plain)
    _resume(L, tmp, rec, "accumulated", "epoch end", 2, plain, accumulate_grad_batches=2)
    _resume(L, tmp, rec, "by steps", "epoch end", 4, plain, max_steps=9, max_epochs=-1)


@script
def resume_mid_epoch(L: Any, tmp: Path, rec: Record) -> None:
    """From files written inside an epoch, with a loader that keeps its own state."""
    batches = list(loader(12))
    stateful = lambda: StatefulLoader(batches)  # noqa: E731
    _resume(L, tmp, rec, "batch end", "batch end", 2, stateful)
    _resume(L, tmp, rec, "second epoch", "batch end", 9, stateful)
    _resume(L, tmp, rec, "validation end", "validation end", 3, stateful, val_check_interval=3)
    _resume(L, tmp, rec, "accumulated", "batch end", 2, stateful, accumulate_grad_batches=2)


@script
def resume_mid_epoch_plain_loader(L: Any, tmp: Path, rec: Record) -> None:
    """From a file written inside an epoch, with an ordinary loader: which batches come after the resume."""
    _resume(L, tmp, rec, "batch end", "batch end", 2, lambda: loader(8))


@script
def resume_at_last_batch(L: Any, tmp: Path, rec: Record) -> None:
    """From a file written after an epoch's last batch but before the validation that was due."""
    _resume(L, tmp, rec, "last batch", "batch end", 4, lambda: loader(8))


@script
def resume_with_plateau(L: Any, tmp: Path, rec: Record) -> None:
    """`ReduceLROnPlateau` steps after the epoch-end checkpoint: what a run that goes on from it knows of that step."""

    class Plateau(net_class(L)):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

        def on_train_epoch_start(self) -> None:
            scheduler = self.lr_schedulers()
            rec.event("epoch", number=self.current_epoch, steps=scheduler.last_epoch, lr=scheduler.get_last_lr())

    path = tmp / "saved.ckpt"
    trainer = quiet_trainer(L, tmp, max_epochs=4, callbacks=[saving_callback(L, path, "epoch end", 4)])
    trainer.fit(Plateau(), loader(4), loader(4, seed=2))
    rec.event("== resumed ==")
    trainer = quiet_trainer(L, tmp, max_epochs=4)
    trainer.fit(Plateau(), loader(4), loader(4, seed=2), ckpt_path=str(path))


@script
def resume_callbacks(L: Any, tmp: Path, rec: Record) -> None:
    """State of early stopping, top-k checkpoints, timers and own callbacks goes on; a finished run stays finished."""
    callbacks = sub(L, "callbacks")
    values = [0.5, 0.4, 0.6, 0.7, 0.3, 0.2, 0.9, 0.9, 0.9, 0.9]

    class Scored(net_class(L)):
        def on_train_epoch_end(self) -> None:
            self.log("score", values[self.current_epoch])

    class Own(L.Callback):
        count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    def run(epochs: int, ckpt_path: str | None, name: str) -> Any:
        stop = callbacks.EarlyStopping("score", patience=3)
        best = callbacks.ModelCheckpoint(tmp / "best", monitor="score", save_top_k=2, save_last=True)
        own = Own()
        trainer = quiet_trainer(L, tmp, callbacks=[stop, best, own], max_epochs=epochs)
        trainer.fit(Scored(), loader(4), ckpt_path=ckpt_path)
        rec.fact(f"{name}.stop", stop.state_dict())
        rec.fact(f"{name}.best", best.state_dict())
        rec.fact(f"{name}.own", own.count)
        rec.result(trainer, name)
        rec.files(tmp / "best", f"{name}.files")

    run(3, None, "first")
    run(5, str(tmp / "best" / "last.ckpt"), "second")
    run(10, "last", "third")
    run(10, "last", "finished")


@script
def ckpt_path_keywords(L: Any, tmp: Path, rec: Record) -> None:
    """ "best" and "last" for every stage, no model after fit, and keywords that find nothing."""
    callbacks = sub(L, "callbacks")
    saver = callbacks.ModelCheckpoint(tmp / "saved", monitor="val_loss", mode="max", save_last=True)
    trainer = quiet_trainer(L, tmp, callbacks=[saver], max_epochs=3)
    module = net_class(L)()
    trainer.fit(module, loader(6), loader(4, seed=2))
    data = loader(4, seed=3)
    rec.fact("best of", [saver.best_model_path, saver.last_model_path])
    for name, keyword in {"best": "best", "last": "last", "None": None, "path": saver.best_model_path}.items():
        rec.fact(f"test {name}", trainer.test(module, data, ckpt_path=keyword))
        rec.fact(f"path after {name}", trainer.ckpt_path)
    rec.fact("validate best", trainer.validate(module, data, ckpt_path="best"))
    rec.fact("predict best", trainer.predict(module, data, ckpt_path="best"))
    rec.fact("no model", trainer.test(dataloaders=data))
    rec.weights(module, "after test of best")
    trainer = quiet_trainer(L, tmp, callbacks=[callbacks.ModelCheckpoint(tmp / "saved")], max_epochs=4)
    trainer.fit(net_class(L)(), loader(6), loader(4, seed=2), ckpt_path="last")
    rec.result(trainer, "fit last")
    fresh = lambda **kwargs: quiet_trainer(L, tmp / "none", **kwargs)  # noqa: E731
    checkpointing = {"enable_checkpointing": True}
    rec.error("best, nothing fitted", lambda: fresh(**checkpointing).test(net_class(L)(), data, ckpt_path="best"))
    rec.error("best, no callback", lambda: fresh().test(net_class(L)(), data, ckpt_path="best"))
    rec.error("last, nothing there", lambda: fresh(**checkpointing).fit(net_class(L)(), data, ckpt_path="last"))
    rec.error("hpc, nothing there", lambda: fresh().fit(net_class(L)(), data, ckpt_path="hpc"))
    rec.error(
        "missing file", lambda: fresh().fit(net_class(L)(), data, ckpt_path=str(tmp / "no.ckpt")), names=("no.ckpt",)
    )
    rec.error("no model at all", lambda: fresh().test(dataloaders=data))


@script
def evaluation_from_file(L: Any, tmp: Path, rec: Record) -> None:
    """validate, test and predict with `ckpt_path`: weights, results, counters."""
    path = tmp / "saved.ckpt"
    trainer = quiet_trainer(L, tmp, max_epochs=2)
    trainer.fit(resumable(L)(lr=0.02, extra=[1]), loader(6), loader(4))
    trainer.save_checkpoint(path)
    for stage in ("validate", "test", "predict"):
        trainer = csv_trainer(L, tmp / stage)
        module = resumable(L)()
        rec.fact(f"{stage}.returns", getattr(trainer, stage)(module, loader(4, seed=3), ckpt_path=str(path)))
        rec.result(trainer, stage)
        if stage != "predict":
            rec.csv(tmp / stage / "logs" / "version_0", f"{stage}.csv")


@script
def load_from_checkpoint(L: Any, tmp: Path, rec: Record) -> None:
    """The class method: hyper-parameters from the file, overridden, missing, strict or not, plus datamodules."""

    class Sized(net_class(L)):
        def __init__(self, width: int, options: Any = None, ignored: int = 1, **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="ignored")
            self.extra = torch.nn.Linear(width, 1)
            self.ignored = ignored

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            rec.event("on_load_checkpoint", epoch=checkpoint["epoch"])

    class Wider(Sized):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.another = torch.nn.Linear(1, 1)
            torch.nn.init.zeros_(self.another.weight)
            torch.nn.init.zeros_(self.another.bias)

    class Data(L.LightningDataModule):
        def __init__(self, size: int = 2, name: str = "n") -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(self.hparams.size)

    path = tmp / "saved.ckpt"
    trainer = quiet_trainer(L, tmp)
    trainer.fit(Sized(3, options={"a": {"b": 1}}, more="yes"), datamodule=Data(6))
    trainer.save_checkpoint(path)
    loaded = Sized.load_from_checkpoint(path)
    rec.weights(loaded, "loaded")
    rec.fact("hparams", [dict(loaded.hparams), dict(loaded.hparams_initial), loaded.ignored, loaded.training])
    changed = Sized.load_from_checkpoint(str(path), map_location="cpu", options=5, ignored=9)
    rec.fact("changed", [dict(changed.hparams), changed.ignored])
    rec.error("other shape", lambda: Sized.load_from_checkpoint(path, width=4))
    rec.error("missing keys", lambda: Wider.load_from_checkpoint(path), names=("another",))
    rec.weights(Wider.load_from_checkpoint(path, strict=False), "not strict")
    rec.fact("data", dict(Data.load_from_checkpoint(path).hparams))
    rec.fact("data changed", dict(Data.load_from_checkpoint(path, name="m").hparams))
    rec.error("on an instance", lambda: loaded.load_from_checkpoint(path))
    rec.error("missing file", lambda: Sized.load_from_checkpoint(tmp / "no.ckpt"), names=("no.ckpt",))
    trainer.save_checkpoint(tmp / "weights.ckpt", weights_only=True)
    rec.weights(Sized.load_from_checkpoint(tmp / "weights.ckpt"), "weights only")
    plain = torch.load(path, weights_only=False)
    del plain["hyper_parameters"]
    torch.save(plain, tmp / "plain.ckpt")
    rec.error("no hparams", lambda: Sized.load_from_checkpoint(tmp / "plain.ckpt"), names=("width",))
    rec.weights(Sized.load_from_checkpoint(tmp / "plain.ckpt", width=3), "hparams by hand")


@script
def resume_mismatch(L: Any, tmp: Path, rec: Record) -> None:
    """Files that do not fit: weights only, other layers, other optimizers, `strict_loading`."""

    class Other(net_class(L)):
        def __init__(self, strict: bool = True) -> None:
            super().__init__()
            self.more = torch.nn.Linear(1, 1)
            torch.nn.init.ones_(self.more.weight)
            torch.nn.init.ones_(self.more.bias)
            self.strict_loading = strict

    class Partial(net_class(L)):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "0" in k}

    path, weights = tmp / "saved.ckpt", tmp / "weights.ckpt"
    trainer = quiet_trainer(L, tmp)
    trainer.fit(net_class(L)(), loader(4))
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(weights, weights_only=True)
    again = lambda module, file, fn="fit": getattr(quiet_trainer(L, tmp, max_epochs=2), fn)(  # noqa: E731
        module, loader(4), ckpt_path=str(file)
    )
    rec.error("weights only, fit", lambda: again(net_class(L)(), weights))
    rec.error("weights only, test", lambda: again(net_class(L)(), weights, "test"))
    rec.error("more layers", lambda: again(Other(), path), names=("more",))
    rec.error("more layers, not strict", lambda: again(Other(strict=False), path, "test"))
    (tmp / "damaged.ckpt").write_bytes(b"not a checkpoint")
    rec.error("damaged", lambda: again(net_class(L)(), tmp / "damaged.ckpt"), any_kind=True)
    trainer = quiet_trainer(L, tmp)
    trainer.fit(Partial(), loader(4))
    trainer.save_checkpoint(tmp / "partial.ckpt")
    rec.error("partial", lambda: again(Partial(), tmp / "partial.ckpt"))


@script
def second_fit(L: Any, tmp: Path, rec: Record) -> None:
    """The same trainer used again: fit after fit, fit after test, a longer fit, another module."""
    trainer = csv_trainer(L, tmp, max_epochs=2)
    module = net_class(L)()
    trainer.fit(module, Batches(list(loader(6))), loader(2))
    rec.result(trainer, "first")
    trainer.fit(module, loader(6), loader(2))
    rec.result(trainer, "nothing left")
    trainer.test(module, loader(4))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(6), loader(2))
    rec.result(trainer, "one more")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(net_class(L)(), loader(6), loader(2))
    rec.result(trainer, "other module")
    rec.csv(tmp / "logs" / "version_0")
