"""Scripts about `ModelCheckpoint`: when it saves, under which names, what is in the files, what it forgets."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub, tracing_callback, tracing_datamodule

# Validation losses that go up and down, so that "best" and "latest" are different files.
LOSSES = [0.5, 0.3, 0.4, 0.1, 0.2, 0.6]


def _scored(L: Any) -> Any:
    """A module whose ``score`` in the n-th validation is ``LOSSES[n]``."""

    class Scored(net_class(L)):
        count = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.log("score", LOSSES[self.count % len(LOSSES)])
                self.log("deep/score", float(self.count))
                self.count += 1

    return Scored()


def _note_saver(rec: Record, saver: Any, name: str) -> None:
    attributes = ("best_model_path", "best_model_score", "best_k_models", "last_model_path", "kth_value", "state_key")
    rec.fact(f"{name}.saver", {attribute: getattr(saver, attribute) for attribute in attributes})
    rec.fact(f"{name}.state", saver.state_dict())


def _run_saver(L: Any, tmp: Path, rec: Record, name: str, saver_args: dict[str, Any], **trainer_args: Any) -> Any:
    """One fit with one `ModelCheckpoint`, traced file by file."""

    class Watched(sub(L, "callbacks").ModelCheckpoint):
        def _files(self) -> list[str]:
            return sorted(path.name for path in (tmp / name).rglob("*.ckpt"))

    class Watcher(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            rec.event("batch end", epoch=trainer.current_epoch, batch_idx=batch_idx, files=saver._files())

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            rec.event("epoch start", epoch=trainer.current_epoch, files=saver._files())

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            rec.event("validation start", files=saver._files())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            rec.event("train end", files=saver._files())

    rec.event(f"== {name} ==")
    saver = Watched(**{"dirpath": tmp / name, **saver_args})
    trainer = quiet_trainer(L, tmp, **{"max_epochs": 4, "callbacks": [saver, Watcher()], **trainer_args})
    trainer.fit(_scored(L), loader(6), loader(2, seed=2))
    rec.files(tmp / name, f"{name}.files")
    _note_saver(rec, saver, name)
    return trainer


@script
def checkpoint_default(L: Any, tmp: Path, rec: Record) -> None:
    """The checkpoint that a trainer writes unasked: place, name and whole content, without and with a logger."""
    trainer = quiet_trainer(L, tmp / "bare", enable_checkpointing=True, max_epochs=2)
    trainer.fit(net_class(L)(), loader(6), loader(4))
    rec.checkpoint(trainer.checkpoint_callback.best_model_path, "bare")
    _note_saver(rec, trainer.checkpoint_callback, "bare")
    trainer = csv_trainer(L, tmp / "logged", enable_checkpointing=True, max_epochs=2)
    trainer.fit(net_class(L)(), loader(6))
    rec.checkpoint(trainer.checkpoint_callback.best_model_path, "logged")
    rec.fact("dirs", [trainer.log_dir, trainer.default_root_dir, trainer.checkpoint_callback.dirpath])
    rec.files()


@script
def checkpoint_top_k(L: Any, tmp: Path, rec: Record) -> None:
    """The best k by a monitored value, both modes, all, none; which files come and go and when."""
    cases: dict[str, dict[str, Any]] = {
        "best": {"monitor": "score"},
        "best two": {"monitor": "score", "save_top_k": 2},
        "worst": {"monitor": "score", "mode": "max"},
        "all": {"monitor": "score", "save_top_k": -1},
        "none": {"monitor": "score", "save_top_k": 0},
        "none but last": {"monitor": "score", "save_top_k": 0, "save_last": True},
        "latest": {"save_top_k": 1},
        "every": {"save_top_k": -1},
        "plain none": {"save_top_k": 0},
    }
    for name, kwargs in cases.items():
        _run_saver(L, tmp, rec, name, kwargs, max_epochs=6)


@script
def checkpoint_last(L: Any, tmp: Path, rec: Record) -> None:
    """`save_last` as copy and as link, with a monitor, per step, and with an own name."""
    cases: dict[str, dict[str, Any]] = {
        "copy": {"save_last": True},
        "copy, best": {"save_last": True, "monitor": "score"},
        "link": {"save_last": "link"},
        "link, best": {"save_last": "link", "monitor": "score"},
        "link, all": {"save_last": "link", "save_top_k": -1},
        "steps": {"save_last": True, "every_n_train_steps": 2},
        "steps, link": {"save_last": "link", "every_n_train_steps": 2, "save_top_k": -1},
        "seldom": {"save_last": True, "every_n_epochs": 3},
    }
    for name, kwargs in cases.items():
        trainer = _run_saver(L, tmp, rec, name, kwargs)
        last = tmp / name / "last.ckpt"
        if last.exists():
            content = torch.load(last, weights_only=False)
            rec.fact(f"{name}.last", [content["epoch"], content["global_step"], list(content["callbacks"])])
    saver = trainer.checkpoint_callback
    saver.CHECKPOINT_NAME_LAST = "{epoch}-last"
    _run_saver(L, tmp, rec, "again", {"save_last": True}, max_epochs=1)


@script
def checkpoint_triggers(L: Any, tmp: Path, rec: Record) -> None:
    """Every n steps, every n epochs, by time; at the training epoch's end or after validation."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "steps": ({"every_n_train_steps": 2, "save_top_k": -1}, {}),
        "steps, best": ({"every_n_train_steps": 2, "monitor": "score", "save_top_k": 2}, {}),
        "steps, accumulated": ({"every_n_train_steps": 1, "save_top_k": -1}, {"accumulate_grad_batches": 2}),
        "steps, train loss": ({"every_n_train_steps": 1, "monitor": "train_loss"}, {}),
        "epochs": ({"every_n_epochs": 2, "save_top_k": -1}, {}),
        "epoch end": ({"save_on_train_epoch_end": True, "save_top_k": -1}, {"val_check_interval": 0.5}),
        "after validation": ({"save_on_train_epoch_end": False, "save_top_k": -1}, {}),
        "val twice": ({"save_top_k": -1}, {"val_check_interval": 0.34}),
        "val seldom": ({"save_top_k": -1}, {"check_val_every_n_epoch": 2}),
        "val seldom, best": ({"monitor": "score", "save_top_k": -1}, {"check_val_every_n_epoch": 2}),
        "time, long": ({"train_time_interval": timedelta(hours=1)}, {}),
        "time, none": ({"train_time_interval": timedelta(0), "save_top_k": -1}, {}),
        "off": ({"every_n_epochs": 0}, {}),
        "no val": ({"save_top_k": -1}, {"limit_val_batches": 0}),
        "fast": ({"save_top_k": -1}, {"fast_dev_run": True}),
    }
    for name, (saver_args, trainer_args) in cases.items():
        _run_saver(L, tmp, rec, name, saver_args, **trainer_args)


@script
def checkpoint_names(L: Any, tmp: Path, rec: Record) -> None:
    """Templates of file names, and `format_checkpoint_name`."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {"filename": "model"},
        "formats": {"filename": "m-{epoch:02d}-{step:04d}-{score:.2f}"},
        "bare values": {"filename": "{epoch}_{score:.3f}", "auto_insert_metric_name": False},
        "prefix": {"filename": "pre-{epoch}", "monitor": "score"},
        "folder": {"filename": "{epoch}-{deep/score:.1f}"},
        "no counter": {"filename": "same", "enable_version_counter": False, "save_top_k": -1},
        "counter": {"filename": "same", "save_top_k": -1},
        "weights": {"filename": "w-{epoch}", "save_weights_only": True},
    }
    for name, kwargs in cases.items():
        trainer = _run_saver(L, tmp, rec, name, kwargs, max_epochs=3)
        if name == "weights":
            rec.checkpoint(trainer.checkpoint_callback.best_model_path)
    saver = sub(L, "callbacks").ModelCheckpoint(dirpath=tmp, filename="{epoch}-{a:.2f}-{b}")
    rec.fact("formatted", saver.format_checkpoint_name({"epoch": 3, "step": 7, "a": 1.239, "b": torch.tensor(2)}))
    rec.fact("versioned", saver.format_checkpoint_name({"epoch": 3, "step": 7, "a": 1.0, "b": 0}, ver=4))
    default = sub(L, "callbacks").ModelCheckpoint(dirpath=tmp)
    rec.fact("default", default.format_checkpoint_name({"epoch": 1, "step": 5}))


@script
def checkpoint_missing_metric_name(L: Any, tmp: Path, rec: Record) -> None:
    """A file name that asks for a metric nobody logged."""
    _run_saver(L, tmp, rec, "missing", {"filename": "{epoch}-{nobody:.2f}"}, max_epochs=1)


@script
def checkpoint_monitor(L: Any, tmp: Path, rec: Record) -> None:
    """Monitored values that are NaN, infinite, equal, missing, or come from training."""

    class Given(net_class(L)):
        values = [float("nan"), 0.5, 0.5, float("inf"), 0.2]

        def on_train_epoch_end(self) -> None:
            self.log("given", self.values[self.current_epoch])

    for mode in ("min", "max"):
        for k in (1, 2):
            saver = sub(L, "callbacks").ModelCheckpoint(tmp / f"{mode}{k}", monitor="given", mode=mode, save_top_k=k)
            trainer = quiet_trainer(L, tmp, callbacks=[saver], max_epochs=5)
            trainer.fit(Given(), loader(4))
            _note_saver(rec, saver, f"{mode}{k}")
            rec.files(tmp / f"{mode}{k}", f"{mode}{k}.files")
    for name, kwargs in {
        "missing": {"monitor": "nobody"},
        "missing, steps": {"monitor": "no", "every_n_train_steps": 1},
    }.items():
        saver = sub(L, "callbacks").ModelCheckpoint(tmp / name, **kwargs)
        trainer = quiet_trainer(L, tmp, callbacks=[saver])
        rec.error(name, lambda trainer=trainer: trainer.fit(net_class(L)(), loader(4), loader(2)), names=("nobody",))
        rec.files(tmp, f"{name}.files")


@script
def checkpoint_misuse(L: Any, tmp: Path, rec: Record) -> None:
    """Arguments of `ModelCheckpoint` that can't work together."""
    make = sub(L, "callbacks").ModelCheckpoint
    wrong: dict[str, dict[str, Any]] = {
        "top k": {"save_top_k": -3},
        "several without monitor": {"save_top_k": 3},
        "mode": {"mode": "middle"},
        "steps and epochs": {"every_n_train_steps": 1, "every_n_epochs": 1},
        "steps and time": {"every_n_train_steps": 1, "train_time_interval": timedelta(1)},
        "negative": {"every_n_epochs": -1},
        "negative steps": {"every_n_train_steps": -1},
    }
    for name, kwargs in wrong.items():
        rec.error(
            name, lambda kwargs=kwargs: make(dirpath=tmp, **kwargs), names=("save_top_k", "mode", "every_n_train_steps")
        )
    twins = [make(tmp / "a", monitor="x"), make(tmp / "b", monitor="x")]
    rec.error("twins", lambda: quiet_trainer(L, tmp, callbacks=twins))
    rec.error("switched off", lambda: quiet_trainer(L, tmp, callbacks=[make(tmp)], enable_checkpointing=False))
    rec.error("nothing to save", lambda: quiet_trainer(L, tmp).save_checkpoint(tmp / "x.ckpt"))


@script
def checkpoint_on_exception(L: Any, tmp: Path, rec: Record) -> None:
    """Files that a failure leaves: `save_on_exception` and `OnExceptionCheckpoint`."""
    callbacks = sub(L, "callbacks")

    class Failing(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == 1:
                raise ZeroDivisionError("a broken batch")
            return super().training_step(batch, batch_idx)

    savers = {
        "model": callbacks.ModelCheckpoint(tmp / "model", save_on_exception=True),
        "own": callbacks.OnExceptionCheckpoint(tmp / "own"),
        "named": callbacks.OnExceptionCheckpoint(tmp / "named", filename="failed"),
    }
    for name, saver in savers.items():
        trainer = quiet_trainer(L, tmp, callbacks=[saver], max_epochs=3)
        rec.error(name, lambda trainer=trainer: trainer.fit(Failing(), loader(6)))
        rec.files(tmp / name, f"{name}.files")
        for path in sorted((tmp / name).rglob("*.ckpt")):
            rec.checkpoint(path, f"{name}/{path.name}")
    saver = callbacks.OnExceptionCheckpoint(tmp / "fine")
    quiet_trainer(L, tmp, callbacks=[saver]).fit(net_class(L)(), loader(4))
    rec.files(tmp, "files")


@script
def checkpoint_content(L: Any, tmp: Path, rec: Record) -> None:
    """Everything that can be in a file: hyper-parameters, two schedulers, callbacks, datamodule, added keys."""

    class Full(net_class(L)):
        def __init__(self, lr: float = 0.05, deep: Any = None, text: str = "x") -> None:
            super().__init__(lr)
            self.save_hyperparameters()
            self.register_buffer("kept", torch.arange(3))
            self.register_buffer("dropped", torch.ones(2), persistent=False)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
            steps = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (1, 2)]
            return [optimizer], [steps[0], {"scheduler": steps[1], "interval": "step"}]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["added"] = {"a": 1}

    class Data(L.LightningDataModule):
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(self.hparams.size)

        def val_dataloader(self) -> Any:
            return loader(2)

        def state_dict(self) -> dict[str, Any]:
            return {"position": 3}

    saver = sub(L, "callbacks").ModelCheckpoint(tmp / "saved", save_top_k=-1, every_n_train_steps=1)
    stop = sub(L, "callbacks").EarlyStopping("val_loss")
    timer = sub(L, "callbacks").Timer(duration=timedelta(hours=1))
    trainer = quiet_trainer(L, tmp, callbacks=[saver, stop, tracing_callback(L, rec)], max_epochs=2)
    trainer.fit(Full(deep={"a": [1, 2]}), datamodule=Data(6))
    for path in sorted((tmp / "saved").iterdir()):
        rec.checkpoint(path, path.name)
    trainer.save_checkpoint(tmp / "whole.ckpt")
    trainer.save_checkpoint(tmp / "weights.ckpt", weights_only=True)
    rec.checkpoint(tmp / "whole.ckpt", "whole")
    rec.checkpoint(tmp / "weights.ckpt", "weights")
    rec.fact("timer key", timer.state_key)


@script
def checkpoint_evaluation_state(L: Any, tmp: Path, rec: Record) -> None:
    """Files written from hooks: after sanity, inside training, in validation, in test."""

    class Saving(L.Callback):
        def save(self, trainer: Any, name: str) -> None:
            path = tmp / f"{name}-{trainer.global_step}.ckpt"
            if not path.exists():
                trainer.save_checkpoint(path)
                content = torch.load(path, weights_only=False)
                rec.fact(path.name, {key: content[key] for key in ("epoch", "global_step", "loops")})

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "start")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.save(trainer, "batch start")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.save(trainer, "batch end")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                self.save(trainer, "validation end")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "epoch end")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "train end")

        def on_test_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "test end")

    trainer = quiet_trainer(L, tmp, callbacks=[Saving()], max_epochs=2, val_check_interval=2)
    module = net_class(L)()
    data = tracing_datamodule(
        L, rec, loaders={"train_dataloader": lambda: loader(8), "val_dataloader": lambda: loader(2)}
    )
    trainer.fit(module, datamodule=data)
    trainer.test(module, loader(4))
