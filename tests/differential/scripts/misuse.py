"""Scripts about mistakes: each must be refused by both roots, and explained."""

from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub


@script
def trainer_arguments(L: Any, tmp: Path, rec: Record) -> None:
    """Values that `Trainer` refuses."""
    wrong: dict[str, dict[str, Any]] = {
        "unknown": {"nonsense": 1},
        "devices 0": {"devices": 0},
        "devices text": {"devices": "many"},
        "devices empty": {"devices": []},
        "accelerator": {"accelerator": "abacus"},
        "strategy": {"strategy": "nonsense"},
        "max_epochs": {"max_epochs": -2},
        "max_steps": {"max_steps": -2},
        "max_time": {"max_time": "soon"},
        "val_check_interval": {"val_check_interval": 1.5},
        "val_check_interval negative": {"val_check_interval": -1},
        "check_val_every_n_epoch": {"check_val_every_n_epoch": 1.5},
        "interval over epochs": {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
        "overfit": {"overfit_batches": -1},
        "overfit fraction": {"overfit_batches": 1.5},
        "fast_dev_run": {"fast_dev_run": -1},
        "clip value": {"gradient_clip_val": "big"},
        "clip algorithm": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "nonsense"},
        "profiler": {"profiler": "nonsense"},
        "reload": {"reload_dataloaders_every_n_epochs": -1},
        "precision": {"precision": "nonsense"},
        "plugins twice": {"plugins": [sub(L, "plugins").MixedPrecision("bf16-mixed", "cpu")] * 2},
        "plugin and precision": {"plugins": [sub(L, "plugins").MixedPrecision("bf16-mixed", "cpu")], "precision": 16},
        "plugin of no kind": {"plugins": [object()]},
        "bar off but given": {"callbacks": [sub(L, "callbacks").TQDMProgressBar()], "enable_progress_bar": False},
        "two bars": {"callbacks": [sub(L, "callbacks").TQDMProgressBar()] * 2, "enable_progress_bar": True},
    }
    for name, kwargs in wrong.items():
        words = tuple(kwargs) + ("nonsense", "abacus", "many", "soon")
        arguments = {"accelerator": "cpu", "default_root_dir": tmp, "logger": False, **kwargs}
        rec.error(name, lambda arguments=arguments: L.Trainer(**arguments), names=words)
    rec.error("positional", lambda: L.Trainer("cpu", logger=False))


@script
def module_mistakes(L: Any, tmp: Path, rec: Record) -> None:
    """Modules and data that can't be fitted, validated, tested or predicted."""

    class NoStep(L.LightningModule):
        def configure_optimizers(self) -> None:
            return None

    class NoOptimizer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).sum()

    net = net_class(L)
    legacy = {
        name: type("Legacy", (net,), {name: lambda self, outputs: None})
        for name in ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
    }

    def returning(value: Any) -> Any:
        return type("Returning", (net,), {"training_step": lambda self, batch, batch_idx: value})()

    fit = lambda module, *data, **kwargs: quiet_trainer(L, tmp, **kwargs).fit(module, *data)  # noqa: E731
    rec.error("no step", lambda: fit(NoStep(), loader(2)), names=("training_step",))
    rec.error("no optimizer", lambda: fit(NoOptimizer(), loader(2)), names=("configure_optimizers",))
    rec.error("no data", lambda: fit(net()), names=("train_dataloader",))
    rec.error("not a module", lambda: fit(torch.nn.Linear(1, 1), loader(2)), names=("LightningModule",))
    rec.error("not iterable", lambda: fit(net(), 5))
    rec.error(
        "loader and datamodule", lambda: quiet_trainer(L, tmp).fit(net(), loader(2), datamodule=L.LightningDataModule())
    )
    rec.error("no test step", lambda: quiet_trainer(L, tmp).test(NoOptimizer(), loader(2)), names=("test_step",))
    rec.error(
        "no validation step",
        lambda: quiet_trainer(L, tmp).validate(NoOptimizer(), loader(2)),
        names=("validation_step",),
    )
    rec.error("no test data", lambda: quiet_trainer(L, tmp).test(net()), names=("test_dataloader",))
    rec.error("no predict data", lambda: quiet_trainer(L, tmp).predict(net()), names=("predict_dataloader",))
    rec.error("validation data without step", lambda: fit(NoOptimizer(), loader(2), loader(2)))
    for name, cls in legacy.items():
        run = (
            (lambda cls=cls: quiet_trainer(L, tmp).test(cls(), loader(2)))
            if "test" in name
            else (lambda cls=cls: fit(cls(), loader(2), loader(2)))
        )
        rec.error(name, run, names=(name,))
    rec.error("loss of two", lambda: fit(returning(torch.ones(2, requires_grad=True)), loader(2)))
    rec.error("loss text", lambda: fit(returning("text"), loader(2)))
    rec.error("loss missing", lambda: fit(returning({"no": 1}), loader(2)), names=("loss",))
    rec.error("loss without graph", lambda: fit(returning(torch.tensor(1.0)), loader(2)))
    rec.error(
        "val_check_interval too long", lambda: fit(net(), loader(4), loader(2), val_check_interval=5), names=("5",)
    )
    rec.error("unattached trainer", lambda: net().trainer)
    rec.error("unattached optimizers", lambda: net().optimizers())


@script
def optimizer_mistakes(L: Any, tmp: Path, rec: Record) -> None:
    """What `configure_optimizers` may not return, and manual and automatic mode mixed up."""
    sgd = torch.optim.SGD
    scheduler = torch.optim.lr_scheduler.StepLR

    def configured(configure: Any, **members: Any) -> Any:
        return type("Configured", (net_class(L),), {"configure_optimizers": configure, **members})()

    def made(self: Any) -> Any:
        return sgd(self.parameters(), lr=0.1)

    cases: dict[str, Any] = {
        "number": lambda self: 3,
        "text": lambda self: "sgd",
        "two optimizers": lambda self: [made(self), made(self)],
        "interval": lambda self: {
            "optimizer": made(self),
            "lr_scheduler": {"scheduler": scheduler(made(self), 1), "interval": "hour"},
        },
        "no scheduler": lambda self: {"optimizer": made(self), "lr_scheduler": {"interval": "step"}},
        "scheduler of another optimizer": lambda self: ([made(self)], [scheduler(made(self), 1)]),
        "scheduler number": lambda self: ([made(self)], [3]),
    }
    for name, configure in cases.items():
        run = lambda c=configure: quiet_trainer(L, tmp).fit(configured(c), loader(2))  # noqa: E731
        rec.error(name, run, names=("interval", "hour"), any_kind=name == "scheduler number")

    def manual_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))

    automatic = configured(made, training_step=manual_step)
    rec.error("manual_backward in automatic mode", lambda: quiet_trainer(L, tmp).fit(automatic, loader(2)))
    for name, kwargs in {"clip": {"gradient_clip_val": 0.5}, "accumulate": {"accumulate_grad_batches": 2}}.items():
        manual = configured(made, automatic_optimization=False)
        rec.error(f"manual, {name}", lambda m=manual, k=kwargs: quiet_trainer(L, tmp, **k).fit(m, loader(2)))
    callback = sub(L, "callbacks").GradientAccumulationScheduler
    for name, make in {
        "negative": lambda: callback({-1: 2}),
        "text": lambda: callback({0: "two"}),
        "empty": lambda: callback({}),
        "with trainer": lambda: quiet_trainer(L, tmp, callbacks=[callback({0: 2})], accumulate_grad_batches=2).fit(
            net_class(L)(), loader(2)
        ),
    }.items():
        rec.error(f"accumulation, {name}", make)
    rec.error("timer", lambda: sub(L, "callbacks").Timer(duration="soon"))
    rec.error("timer interval", lambda: sub(L, "callbacks").Timer(duration="00:00:00:01", interval="year"))


@script
def datamodule_mistakes(L: Any, tmp: Path, rec: Record) -> None:
    """Datamodules without the loader that a stage needs, in the wrong place, or with a broken hook."""

    class Empty(L.LightningDataModule):
        pass

    class Broken(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            raise ZeroDivisionError("a broken loader")

        def on_exception(self, exception: BaseException) -> None:
            rec.event("on_exception", exception=exception)

    module = net_class(L)()
    for stage, words in (("fit", "train"), ("validate", "val"), ("test", "test"), ("predict", "predict")):
        run = lambda stage=stage: getattr(quiet_trainer(L, tmp), stage)(module, datamodule=Empty())  # noqa: E731
        rec.error(stage, run, names=(f"{words}_dataloader",))
    rec.error("broken", lambda: quiet_trainer(L, tmp).fit(module, datamodule=Broken()), names=("broken",))
    rec.error("datamodule as module", lambda: quiet_trainer(L, tmp).fit(Empty(), loader(2)))


@script
def warnings_given(L: Any, tmp: Path, rec: Record) -> None:
    """Mistakes that do not stop a run but must be pointed out."""
    net = net_class(L)
    scheduler = torch.optim.lr_scheduler.StepLR

    class NoOptimizer(net):
        def configure_optimizers(self) -> None:
            return None

    class OddScheduler(net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": scheduler(optimizer, 1), "nonsense": 1}]

    class NoValidation(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit = lambda module, *data, **kwargs: quiet_trainer(L, tmp, **kwargs).fit(module, *data)  # noqa: E731
    rec.warned("no optimizer", lambda: fit(NoOptimizer(), loader(2)), ["configure_optimizers"])
    rec.warned("scheduler key", lambda: fit(OddScheduler(), loader(2)), ["nonsense"])
    rec.warned("no validation step", lambda: fit(NoValidation(), loader(2), loader(2)), ["validation_step"])
    rec.warned("no validation data", lambda: fit(net(), loader(2)), ["val_dataloader"])
    rec.warned("shuffled validation", lambda: fit(net(), loader(4), loader(4, shuffle=True)), ["shuffle"])
    rec.warned("no length given", lambda: quiet_trainer(L, tmp, max_epochs=None, max_steps=-1), ["max_epochs", "1000"])
    rec.warned("log interval", lambda: fit(net(), loader(2), log_every_n_steps=50, logger=True), ["log_every_n_steps"])
    saver = sub(L, "callbacks").ModelCheckpoint(tmp / "in_use")
    (tmp / "in_use").mkdir()
    (tmp / "in_use" / "there.txt").write_text("not empty")
    rec.warned("folder in use", lambda: fit(net(), loader(2), callbacks=[saver]), ["in_use"])
    rec.warned(
        "metric missing",
        lambda: fit(net(), loader(2), callbacks=[sub(L, "callbacks").EarlyStopping("no", strict=False)]),
        ["no"],
    )
