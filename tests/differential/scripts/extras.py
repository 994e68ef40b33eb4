"""Scripts about callbacks, hyper-parameters, precision and smaller features."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import CALLBACK_HOOKS, sub


@script
def early_stopping(L: Any, tmp: Path, rec: Record) -> None:
    """Patience, delta, modes, thresholds, non-finite values, strictness, and when the check runs."""
    values = [0.5, 0.4, 0.39, 0.41, 0.42, 0.43, 0.1, 0.1]

    class Scored(net_class(L)):
        def __init__(self, scores: list[float]) -> None:
            super().__init__()
            self.scores = scores
            self.count = 0

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.log("score", self.scores[self.count % len(self.scores)])
                self.count += 1

    cases: dict[str, tuple[dict[str, Any], list[float], dict[str, Any]]] = {
        "patience": ({"patience": 2}, values, {}),
        "delta": ({"patience": 1, "min_delta": 0.05}, values, {}),
        "max": ({"patience": 2, "mode": "max"}, values, {}),
        "reached": ({"stopping_threshold": 0.4}, values, {}),
        "diverged": ({"divergence_threshold": 0.42, "patience": 9}, values, {}),
        "nan": ({}, [0.5, float("nan")], {}),
        "nan allowed": ({"check_finite": False, "patience": 2}, [0.5, float("nan")], {}),
        "val twice": ({"patience": 2}, values, {"val_check_interval": 0.5}),
        "at train epoch end": ({"patience": 2, "check_on_train_epoch_end": True}, values, {"val_check_interval": 0.5}),
        "min epochs": ({"patience": 1}, [0.1, 0.2], {"min_epochs": 5}),
        "not strict": ({"monitor": "nobody", "strict": False}, values, {}),
    }
    for name, (kwargs, scores, trainer_args) in cases.items():
        stop = sub(L, "callbacks").EarlyStopping(**{"monitor": "score", **kwargs})
        trainer = quiet_trainer(L, tmp, callbacks=[stop], max_epochs=8, **trainer_args)
        trainer.fit(Scored(scores), loader(4), loader(2))
        rec.counters(trainer, name)
        rec.fact(f"{name}.state", stop.state_dict())
        rec.fact(f"{name}.attributes", [stop.wait_count, stop.stopped_epoch, stop.best_score, stop.state_key])
        rec.fact(f"{name}.reason", stop.stopping_reason)
    stop = sub(L, "callbacks").EarlyStopping("nobody")
    trainer = quiet_trainer(L, tmp, callbacks=[stop])
    rec.error("missing", lambda: trainer.fit(Scored(values), loader(4), loader(2)), names=("nobody", "score"))
    rec.error("mode", lambda: sub(L, "callbacks").EarlyStopping("x", mode="middle"), names=("middle",))


@script
def lambda_callback(L: Any, tmp: Path, rec: Record) -> None:
    """`LambdaCallback` takes a function for each hook."""
    hooks = {
        name: lambda *args, name=name, **kwargs: rec.event(name, arguments=len(args) + len(kwargs))
        for name in CALLBACK_HOOKS
    }
    callback = sub(L, "callbacks").LambdaCallback(**hooks)
    trainer = quiet_trainer(L, tmp, callbacks=[callback])
    module = net_class(L)()
    trainer.fit(module, loader(4), loader(2))
    trainer.test(module, loader(2))
    trainer.predict(module, loader(2))
    rec.error("unknown hook", lambda: sub(L, "callbacks").LambdaCallback(on_nothing=print), names=("on_nothing",))


@script
def configure_callbacks(L: Any, tmp: Path, rec: Record) -> None:
    """Callbacks from the module replace those of the same kind; checkpoints go last."""
    callbacks = sub(L, "callbacks")

    class Own(L.Callback):
        pass

    class Sub(Own):
        pass

    class Configuring(net_class(L)):
        def configure_callbacks(self) -> Any:
            return [Sub(), callbacks.EarlyStopping("val_loss", patience=7), callbacks.ModelCheckpoint(tmp / "own")]

    saver = callbacks.ModelCheckpoint(tmp / "given")
    given = [saver, Own(), callbacks.EarlyStopping("val_loss"), callbacks.LambdaCallback()]
    trainer = quiet_trainer(L, tmp, callbacks=given)
    rec.fact("before", [type(callback).__name__ for callback in trainer.callbacks])
    trainer.fit(Configuring(), loader(4), loader(2))
    rec.fact("after", [type(callback).__name__ for callback in trainer.callbacks])
    rec.fact("patience", trainer.early_stopping_callback.patience)
    rec.fact("kinds", [len(trainer.checkpoint_callbacks), len(trainer.early_stopping_callbacks)])
    rec.files()


@script
def default_callbacks(L: Any, tmp: Path, rec: Record) -> None:
    """Which callbacks and loggers a trainer has by default and after switching things off."""
    for name, kwargs in {
        "defaults": {},
        "bare": {"logger": False, "enable_checkpointing": False, "enable_model_summary": False},
        "fast": {"fast_dev_run": True},
        "time": {"max_time": timedelta(hours=1)},
        "loggers": {"logger": [sub(L, "loggers").CSVLogger(tmp), sub(L, "loggers").CSVLogger(tmp, "other")]},
    }.items():
        trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp, **kwargs)
        kinds = [type(callback).__name__.replace("Rich", "").replace("TQDM", "") for callback in trainer.callbacks]
        rec.fact(name, kinds)
        rec.fact(f"{name}.loggers", [type(logger).__name__ for logger in trainer.loggers])


@script
def hyper_parameters(L: Any, tmp: Path, rec: Record) -> None:
    """`save_hyperparameters` in its forms, and what `hparams` are afterwards."""
    from argparse import Namespace

    class Base(L.LightningModule):
        pass

    class All(Base):
        def __init__(self, a: int, b: str = "b", *args: Any, c: float = 1.0, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Named(Base):
        def __init__(self, a: int, b: str = "b", c: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters("a", "c")

    class Ignoring(Base):
        def __init__(self, a: int, net: Any, c: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["net"])

    class Dict(Base):
        def __init__(self, conf: Any) -> None:
            super().__init__()
            self.save_hyperparameters(conf)

    class Child(All):
        def __init__(self, own: int = 5, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.save_hyperparameters()

    class Late(Child):
        def __init__(self, late: int = 6, **kwargs: Any) -> None:
            late = late * 2
            super().__init__(**kwargs)

    made = {
        "all": All(1, "x", c=2.0, d=4),
        "named": Named(1, c=[1]),
        "ignoring": Ignoring(1, torch.nn.Linear(1, 1)),
        "dict": Dict({"x": 1, "y": {"z": 2}}),
        "namespace": Dict(Namespace(x=1)),
        "child": Child(own=1, a=2, extra=3),
        "late": Late(late=1, own=2, a=3),
        "nothing": Base(),
    }
    for name, module in made.items():
        rec.fact(name, [dict(module.hparams), dict(module.hparams_initial), type(module.hparams).__name__])
    made["all"].hparams.a = 10
    made["all"].hparams["new"] = 11
    rec.fact("changed", [dict(made["all"].hparams), dict(made["all"].hparams_initial)])
    rec.error("attribute", lambda: made["all"].hparams.missing)
    rec.error("unsupported", lambda: Dict(3))

    class Twice(All):
        def __init__(self, a: int) -> None:
            super().__init__(a)
            self.save_hyperparameters({"more": 1})

    rec.fact("twice", dict(Twice(1).hparams))


@script
def precision(L: Any, tmp: Path, rec: Record) -> None:
    """Every precision that a CPU has: dtypes of weights, inputs, outputs, losses and files, and the weights."""

    class Typed(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self(batch[0])
            loss = super().training_step(batch, batch_idx)
            rec.event("train", input=batch[0].dtype, output=output.dtype, loss=loss.dtype, made=torch.ones(1).dtype)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("val", input=batch[0].dtype, output=self(batch[0]).dtype, module=self.dtype)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return super().predict_step(batch, batch_idx)

    for name in ("32-true", 32, "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", "bf16", "64"):
        rec.event(f"== {name} ==")
        trainer = csv_trainer(L, tmp / str(name), precision=name, enable_checkpointing=True, gradient_clip_val=0.5)
        module = Typed()
        rec.error(f"{name!r}", lambda t=trainer, m=module: t.fit(m, loader(6), loader(2)))
        rec.fact(f"{name!r}.name", trainer.precision)
        rec.result(trainer, f"{name!r}")
        rec.checkpoint(trainer.checkpoint_callback.best_model_path, f"{name!r}.file")
        rec.fact(f"{name!r}.predict", trainer.predict(module, loader(4)))
    rec.error("unknown", lambda: quiet_trainer(L, tmp, precision="17"), names=("17",))


@script
def barebones(L: Any, tmp: Path, rec: Record) -> None:
    """`barebones=True`: what is off, what is refused, and that `log` does nothing."""
    trainer = L.Trainer(barebones=True, max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp)
    trainer.fit(net_class(L)(), loader(4), loader(2))
    rec.result(trainer)
    rec.fact("callbacks", [type(callback).__name__ for callback in trainer.callbacks])
    rec.fact("settings", [trainer.loggers, trainer.log_every_n_steps, trainer.num_sanity_val_steps, trainer.barebones])
    refused: dict[str, Any] = {
        "enable_checkpointing": True, "logger": True, "enable_progress_bar": True, "log_every_n_steps": 1,
        "enable_model_summary": True, "num_sanity_val_steps": 1, "fast_dev_run": True, "detect_anomaly": True,
        "profiler": "simple",
    }  # fmt: skip
    for name, value in refused.items():
        make = lambda name=name, value=value: L.Trainer(barebones=True, accelerator="cpu", **{name: value})  # noqa: E731
        rec.error(name, make, names=(name,))
    rec.files()


@script
def detect_anomaly(L: Any, tmp: Path, rec: Record) -> None:
    """`detect_anomaly` turns a NaN in backward into an error, in fit only, and is off again afterwards."""

    class Nan(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("train", anomaly=torch.is_anomaly_enabled())
            return (self(batch[0]) * 0).sqrt().sum() if batch_idx else self.loss(batch)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            rec.event("test", anomaly=torch.is_anomaly_enabled())

    for on in (False, True):
        trainer = quiet_trainer(L, tmp, detect_anomaly=on)
        module = Nan()
        rec.error(str(on), lambda t=trainer, m=module: t.fit(m, loader(4)), names=("nan",))
        rec.fact(f"after {on}", torch.is_anomaly_enabled())
        trainer.test(Nan(), loader(2))


@script
def gradients_in_evaluation(L: Any, tmp: Path, rec: Record) -> None:
    """Inference mode, no-grad and grad in each stage, with `inference_mode` on and off."""

    class Looking(net_class(L)):
        def look(self, where: str) -> None:
            rec.event(
                where, grad=torch.is_grad_enabled(), inference=torch.is_inference_mode_enabled(), train=self.training
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.look("train")
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.look("val")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.look("test")

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.look("predict")

    for mode in (True, False):
        trainer = quiet_trainer(L, tmp, inference_mode=mode)
        module = Looking()
        trainer.fit(module, loader(2), loader(2))
        for stage in ("validate", "test", "predict"):
            getattr(trainer, stage)(module, loader(2))


@script
def seeds(L: Any, tmp: Path, rec: Record) -> None:
    """`seed_everything`: its result, the generators, the environment, bad values."""
    import os
    import random

    import numpy as np

    for seed in (0, 42):
        rec.fact(f"seed {seed}", [L.seed_everything(seed), torch.rand(2), random.random(), float(np.random.rand())])
        rec.fact(f"environment {seed}", os.environ.get("PL_GLOBAL_SEED"))
    rec.fact("workers", [L.seed_everything(3, workers=True), os.environ.get("PL_SEED_WORKERS")])
    os.environ["PL_GLOBAL_SEED"] = "17"
    rec.fact("from environment", L.seed_everything())
    for bad in (-1, 2**40):
        rec.error(f"bad {bad}", lambda bad=bad: L.seed_everything(bad))
    isolate = sub(L, "utilities.seed").isolate_rng
    L.seed_everything(5)
    with isolate():
        inside = [torch.rand(1), random.random()]
    rec.fact("isolated", [inside, torch.rand(1), random.random()])


@script
def trainer_properties(L: Any, tmp: Path, rec: Record) -> None:
    """Properties of a fresh and of a used trainer, and which of them can be set."""

    def look(trainer: Any, name: str) -> None:
        rec.fact(
            name,
            {
                "ranks": [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size],
                "devices": [trainer.num_devices, trainer.num_nodes, trainer.device_ids, trainer.is_global_zero],
                "steps": [trainer.global_step, trainer.current_epoch, trainer.max_steps, trainer.min_steps],
                "epochs": [trainer.max_epochs, trainer.min_epochs, trainer.interrupted, trainer.is_last_batch],
                "flags": [trainer.training, trainer.testing, trainer.validating, trainer.predicting],
                "batches": [trainer.num_training_batches, trainer.num_val_batches, trainer.num_test_batches],
                "more batches": [trainer.num_predict_batches, trainer.num_sanity_val_batches],
                "data": [trainer.train_dataloader, trainer.val_dataloaders, trainer.datamodule, trainer.ckpt_path],
                "optimisation": [len(trainer.optimizers), len(trainer.lr_scheduler_configs), trainer.precision],
                "settings": [trainer.log_every_n_steps, trainer.accumulate_grad_batches, trainer.gradient_clip_val],
                "checks": [trainer.check_val_every_n_epoch, trainer.val_check_interval, trainer.num_sanity_val_steps],
                "root": [trainer.default_root_dir, trainer.log_dir, trainer.enable_validation],
                "strategy": [type(trainer.strategy).__name__, type(trainer.accelerator).__name__],
                "callbacks": [
                    trainer.checkpoint_callback,
                    trainer.progress_bar_callback,
                    trainer.early_stopping_callbacks,
                ],
                "sampler": trainer.distributed_sampler_kwargs,
                "scaler": trainer.scaler,
            },
        )

    trainer = quiet_trainer(L, tmp)
    rec.fact("module", trainer.lightning_module)
    look(trainer, "fresh")
    trainer.fit(net_class(L)(), loader(4), loader(4))
    look(trainer, "fitted")
    trainer.test(trainer.lightning_module, loader(2))
    look(trainer, "tested")
