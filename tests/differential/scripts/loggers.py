"""Scripts about loggers, learning rates in them, and profilers."""

import csv
from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub, tracing_logger


@script
def lr_monitor(L: Any, tmp: Path, rec: Record) -> None:
    """Names and rows of `LearningRateMonitor`: groups, several optimizers, names, momentum, intervals."""
    monitor = sub(L, "callbacks").LearningRateMonitor

    def configured(kind: str) -> Any:
        class Configured(net_class(L)):
            def configure_optimizers(self) -> Any:
                first = torch.optim.SGD(self.layer[0].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
                if kind == "plain":
                    return first
                schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
                if kind == "named":
                    return [first], [{"scheduler": schedule, "name": "mine", "interval": "step"}]
                if kind == "groups":
                    groups = [{"params": [p], "name": f"g{i}"} for i, p in enumerate(self.layer.parameters())]
                    first = torch.optim.Adam(groups, lr=0.1)
                elif kind == "unnamed groups":
                    first = torch.optim.Adam([{"params": [p]} for p in self.parameters()], lr=0.1)
                return [first], [torch.optim.lr_scheduler.ExponentialLR(first, 0.5)]

        return Configured()

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("plain", {}),
        "scheduled": ("scheduled", {}),
        "step": ("scheduled", {"logging_interval": "step"}),
        "epoch": ("named", {"logging_interval": "epoch"}),
        "more": ("named", {"log_momentum": True, "log_weight_decay": True}),
        "groups": ("groups", {"log_momentum": True}),
        "unnamed groups": ("unnamed groups", {}),
    }
    for name, (kind, kwargs) in cases.items():
        callback = monitor(**kwargs)
        trainer = csv_trainer(L, tmp / name, callbacks=[callback], max_epochs=2)
        trainer.fit(configured(kind), loader(6))
        rec.csv(tmp / name / "logs" / "version_0", name)
        rec.fact(f"{name}.lrs", callback.lrs)
        rec.metrics(trainer, name)
    rec.error("no logger", lambda: quiet_trainer(L, tmp, callbacks=[monitor()]).fit(net_class(L)(), loader(2)))
    rec.error("interval", lambda: monitor(logging_interval="minute"), names=("logging_interval",))


@script
def csv_logger(L: Any, tmp: Path, rec: Record) -> None:
    """Folders, versions, hyper-parameters, prefix, new columns, and the logger used by hand."""
    make = sub(L, "loggers").CSVLogger

    class Described(net_class(L)):
        def __init__(
            self, lr: float = 0.1, deep: Any = None, none: Any = None, words: tuple[str, ...] = ("a", "b")
        ) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

        def on_train_epoch_end(self) -> None:
            self.log(f"only in {self.current_epoch}", 1.0)

    for number in range(3):
        logger = make(tmp, **({"prefix": "pre"} if number == 1 else {}))
        trainer = quiet_trainer(
            L, tmp, logger=logger, log_every_n_steps=1, max_epochs=2, enable_checkpointing=number == 0
        )
        trainer.fit(Described(deep={"a": {"b": 1}, "list": [1, 2]}), loader(4), loader(2))
        rec.fact(f"{number}.names", [logger.name, logger.version, logger.log_dir, logger.root_dir, logger.save_dir])
        rec.csv(Path(logger.log_dir), f"{number}.csv")
        rec.fact(f"{number}.hparams", (Path(logger.log_dir) / "hparams.yaml").read_text())
    logger = make(tmp, name="mine", version="v")
    logger.log_hyperparams({"a": 1, "b": None})
    for step in range(3):
        logger.log_metrics({"x": torch.tensor(0.25) * step, "y" if step else "z": step}, step)
    logger.save()
    logger.log_metrics({"late": 1.5})
    logger.finalize("success")
    rec.csv(tmp / "mine" / "v", "by hand")
    rec.fact("no name", [make(tmp, name="").log_dir, make(tmp, name=None, version=7).log_dir])
    rec.files()


@script
def tensorboard_logger(L: Any, tmp: Path, rec: Record) -> None:
    """The default logger: folder layout, scalars with their steps, hyper-parameters."""
    accumulator = __import__("tensorboard.backend.event_processing.event_accumulator", fromlist=["EventAccumulator"])

    class Described(net_class(L)):
        def __init__(self, lr: float = 0.1, width: int = 3) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    for name, kwargs in {
        "default": {},
        "own": {"name": "own", "version": "v1", "sub_dir": "s", "default_hp_metric": False},
    }.items():
        logger: Any = sub(L, "loggers").TensorBoardLogger(tmp, **kwargs) if kwargs else True
        trainer = quiet_trainer(L, tmp, logger=logger, log_every_n_steps=1, max_epochs=2)
        trainer.fit(Described(), loader(4), loader(2))
        rec.fact(f"{name}.dir", [trainer.log_dir, trainer.logger.name, trainer.logger.version, trainer.logger.save_dir])
        events = accumulator.EventAccumulator(str(trainer.log_dir))
        events.Reload()
        scalars = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}
        rec.fact(f"{name}.scalars", scalars)
        yaml = sorted(Path(tmp).rglob("hparams.yaml"))
        rec.fact(f"{name}.hparams", [path.read_text() for path in yaml])
    rec.files()


@script
def several_loggers(L: Any, tmp: Path, rec: Record) -> None:
    """Three loggers get the same calls in list order; hyper-parameters of module and datamodule are merged."""

    class Described(net_class(L)):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    class Data(L.LightningDataModule):
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(4)

    loggers = [
        tracing_logger(L, rec, "one"),
        tracing_logger(L, rec, "two", version=3),
        sub(L, "loggers").CSVLogger(tmp),
    ]
    trainer = quiet_trainer(L, tmp, logger=loggers, enable_checkpointing=True, log_every_n_steps=1)
    module = Described()
    trainer.fit(module, Data())
    trainer.test(module, loader(4))
    rec.fact("same", [trainer.logger is loggers[0], module.logger is loggers[0], module.loggers == loggers])
    rec.fact("dir", [trainer.log_dir, trainer.checkpoint_callback.dirpath])
    trainer.logger = None
    rec.fact("none", [trainer.loggers, trainer.logger])
    quiet = quiet_trainer(L, tmp, logger=[tracing_logger(L, rec, "quiet")], enable_autolog_hparams=False)
    quiet.fit(Described(), loader(2))


@script
def profiler_actions(L: Any, tmp: Path, rec: Record) -> None:
    """Names of the actions that a profiler hears of for hooks of the user's own classes."""
    base = sub(L, "profilers").Profiler

    class Hearing(base):
        def start(self, action_name: str) -> None:
            if "Heard" in action_name:
                rec.event(action_name)

        def stop(self, action_name: str) -> None:
            pass

    class HeardModule(net_class(L)):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

    class HeardCallback(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pass

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    names = {"[LightningModule]HeardModule.on_train_batch_start", "[Callback]HeardCallback.on_train_epoch_start"}
    trainer = quiet_trainer(L, tmp, profiler=Hearing(dirpath=tmp, filename="p"), callbacks=[HeardCallback()])
    trainer.fit(HeardModule(), loader(4), loader(2))
    # Hooks that nobody has overridden need not be profiled: keep only those that somebody has.
    rec.trace = [event for event in rec.trace if event.removesuffix("()") in names or "on_validation_end" in event]
    rec.trace = [event for event in rec.trace if "[LightningModule]HeardModule.on_validation_end" not in event]
    rec.fact("count", len(rec.trace))


@script
def csv_reader_sanity(L: Any, tmp: Path, rec: Record) -> None:
    """The raw text of metrics.csv of a short run: order of columns and number format."""
    trainer = csv_trainer(L, tmp, max_epochs=2)
    trainer.fit(net_class(L)(), loader(4), loader(2))
    with (tmp / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        rec.fact("rows", list(csv.reader(file)))
