"""Scripts about learning-rate schedulers and about when a run validates and ends."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler

from differential.harness import script
from differential.nets import Stream, csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub


def _noting_rates(L: Any, rec: Record, configure: Any) -> Any:
    class Noting(net_class(L)):
        def configure_optimizers(self) -> Any:
            return configure(torch.optim.SGD(self.parameters(), lr=1.0), self)

        def note(self, where: str) -> None:
            rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
            rec.event(where, rates=rates)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("step")
            return self.loss(batch) * 0.01

        def on_train_batch_end(self, *args: Any) -> None:
            self.note("batch end")

        def on_train_epoch_end(self) -> None:
            self.note("epoch end")

    return Noting()


@script
def scheduler_forms(L: Any, tmp: Path, rec: Record) -> None:
    """Every form that `configure_optimizers` may return, and the configurations it becomes."""
    step = lr_scheduler.StepLR
    forms: dict[str, Any] = {
        "optimizer": lambda o, m: o,
        "list": lambda o, m: [o],
        "tuple": lambda o, m: (o,),
        "two lists": lambda o, m: ([o], [step(o, 1)]),
        "two lists, empty": lambda o, m: ([o], []),
        "two lists of dicts": lambda o, m: ([o], [{"scheduler": step(o, 1), "interval": "step", "name": "mine"}]),
        "two schedulers": lambda o, m: ([o], [step(o, 1), {"scheduler": step(o, 2), "frequency": 2}]),
        "dict": lambda o, m: {"optimizer": o},
        "dict with scheduler": lambda o, m: {"optimizer": o, "lr_scheduler": step(o, 1)},
        "dict with dict": lambda o, m: {"optimizer": o, "lr_scheduler": {"scheduler": step(o, 1), "strict": False}},
        "list of dict": lambda o, m: [{"optimizer": o, "lr_scheduler": {"scheduler": step(o, 1), "interval": "step"}}],
        "extra key": lambda o, m: {"optimizer": o, "lr_scheduler": {"scheduler": step(o, 1), "foo": 1}},
    }
    for name, form in forms.items():
        rec.event(f"== {name} ==")
        trainer = quiet_trainer(L, tmp, max_epochs=2)
        trainer.fit(_noting_rates(L, rec, form), loader(4))
        fields = ("name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")
        configs = [{field: getattr(config, field) for field in fields} for config in trainer.lr_scheduler_configs]
        rec.fact(name, configs)


@script
def scheduler_frequency(L: Any, tmp: Path, rec: Record) -> None:
    """Intervals and frequencies, with accumulation and over several epochs."""
    for interval, frequency, accumulate in (
        ("step", 1, 1),
        ("step", 2, 1),
        ("step", 2, 2),
        ("step", 1, 2),
        ("epoch", 2, 1),
    ):
        rec.event(f"== {interval} {frequency} {accumulate} ==")

        def form(o: Any, m: Any, interval: str = interval, frequency: int = frequency) -> Any:
            scheduler = lr_scheduler.ExponentialLR(o, 0.5)
            return [o], [{"scheduler": scheduler, "interval": interval, "frequency": frequency}]

        trainer = quiet_trainer(L, tmp, max_epochs=3, accumulate_grad_batches=accumulate)
        trainer.fit(_noting_rates(L, rec, form), loader(6))
        rec.weights(trainer.lightning_module, f"{interval}{frequency}{accumulate}")


@script
def scheduler_kinds(L: Any, tmp: Path, rec: Record) -> None:
    """Chained, sequential, one-cycle and lambda schedulers, with `estimated_stepping_batches` as their length."""
    kinds: dict[str, Any] = {
        "cycle": lambda o, m: lr_scheduler.OneCycleLR(o, 0.1, total_steps=m.trainer.estimated_stepping_batches),
        "sequential": lambda o, m: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
        "chained": lambda o, m: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.StepLR(o, 3)]),
        "lambda": lambda o, m: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        "cosine": lambda o, m: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    }
    for name, kind in kinds.items():
        rec.event(f"== {name} ==")
        form = lambda o, m, kind=kind: ([o], [{"scheduler": kind(o, m), "interval": "step"}])  # noqa: E731
        trainer = quiet_trainer(L, tmp, max_epochs=2, enable_checkpointing=True)
        trainer.fit(_noting_rates(L, rec, form), loader(6))
        rec.fact(name, trainer.lr_scheduler_configs[0].scheduler.state_dict())


@script
def scheduler_plateau(L: Any, tmp: Path, rec: Record) -> None:
    """`ReduceLROnPlateau` per epoch and per step, on validation and training metrics; a missing metric."""

    def form(interval: str, monitor: str | None, **more: Any) -> Any:
        def configure(o: Any, m: Any) -> Any:
            scheduler = lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0)
            if interval == "default":
                return {"optimizer": o, "lr_scheduler": scheduler, "monitor": monitor}
            config = {"scheduler": scheduler, "interval": interval, "monitor": monitor, **more}
            return {"optimizer": o, "lr_scheduler": config}

        return configure

    class Logged:
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
            self.log("train_loss", loss)  # type: ignore[attr-defined]
            return loss

    for interval, monitor, more in (
        ("default", "val_loss", {}),
        ("epoch", "val_loss", {}),
        ("step", "train_loss", {}),
        ("epoch", "missing", {"strict": False}),
        ("epoch", "missing", {"strict": True}),
        ("step", "val_loss", {"strict": False}),
        ("epoch", None, {}),
        ("default", None, {}),
    ):
        name = f"{interval} {monitor} {more}"
        rec.event(f"== {name} ==")
        module = _noting_rates(L, rec, form(interval, monitor, **more))
        module.__class__ = type("Logged", (Logged, type(module)), {})
        trainer = quiet_trainer(L, tmp, max_epochs=3)
        rec.error(name, lambda m=module, t=trainer: t.fit(m, loader(6), loader(2)), names=("missing",))


@script
def scheduler_own_class(L: Any, tmp: Path, rec: Record) -> None:
    """A scheduler that torch does not know, stepped by an overridden `lr_scheduler_step`."""

    class Own:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.count = optimizer, 0

        def step(self, epoch: int) -> None:
            self.count += 1
            self.optimizer.param_groups[0]["lr"] = 1.0 / (epoch + self.count + 1)

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    module = _noting_rates(L, rec, lambda o, m: ([o], [{"scheduler": Own(o), "interval": "step"}]))
    rec.error("not overridden", lambda: quiet_trainer(L, tmp).fit(module, loader(4)), names=("lr_scheduler_step",))

    class Stepping(type(module)):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            rec.event("lr_scheduler_step", metric=metric)
            scheduler.step(epoch=self.current_epoch)

    module.__class__ = Stepping
    trainer = quiet_trainer(L, tmp, max_epochs=2)
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(tmp / "own.ckpt")
    rec.checkpoint(tmp / "own.ckpt")


def _val_trace(L: Any, rec: Record) -> Any:
    class Validating(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("train", epoch=self.current_epoch, batch_idx=batch_idx, step=self.global_step)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            rec.event("val", batch_idx=batch_idx, sanity=self.trainer.sanity_checking)
            return super().validation_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            rec.event("train epoch end", metrics=sorted(self.trainer.callback_metrics))

    return Validating()


@script
def validation_schedule(L: Any, tmp: Path, rec: Record) -> None:
    """`val_check_interval` as fraction, count and time, and `check_val_every_n_epoch` as number and None."""
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "half": {"val_check_interval": 0.5},
        "third": {"val_check_interval": 0.34},
        "tiny": {"val_check_interval": 0.01},
        "count": {"val_check_interval": 2},
        "count over epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
        "count over epochs, accumulated": {
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "accumulate_grad_batches": 2,
        },
        "count beyond an epoch": {"val_check_interval": 12, "check_val_every_n_epoch": None},
        "epochs": {"check_val_every_n_epoch": 2},
        "epochs and count": {"check_val_every_n_epoch": 2, "val_check_interval": 2},
        "time": {"val_check_interval": timedelta(hours=1)},
        "time, text": {"val_check_interval": "00:00:00:00"},
        "time over epochs": {"val_check_interval": {"hours": 1}, "check_val_every_n_epoch": None},
        "limit": {"limit_val_batches": 1},
        "off": {"limit_val_batches": 0},
        "sanity all": {"num_sanity_val_steps": -1},
        "sanity none": {"num_sanity_val_steps": 0},
        "sanity many": {"num_sanity_val_steps": 5},
    }
    for name, kwargs in settings.items():
        rec.event(f"== {name} ==")
        trainer = csv_trainer(L, tmp / name, max_epochs=3, **kwargs)
        trainer.fit(_val_trace(L, rec), loader(10), loader(6, seed=2))
        rec.result(trainer, name)
        rec.csv(tmp / name / "logs" / "version_0", f"{name}.csv")


@script
def length_of_a_run(L: Any, tmp: Path, rec: Record) -> None:
    """`max_epochs`, `max_steps`, `min_epochs`, `min_steps` in the combinations that matter."""
    settings: dict[str, dict[str, Any]] = {
        "epochs": {"max_epochs": 2},
        "no epochs": {"max_epochs": 0},
        "no steps": {"max_steps": 0},
        "steps": {"max_steps": 7, "max_epochs": None},
        "steps at an epoch's end": {"max_steps": 10, "max_epochs": None},
        "steps and epochs": {"max_steps": 7, "max_epochs": 1},
        "endless epochs, steps": {"max_epochs": -1, "max_steps": 3},
        "accumulated steps": {"max_steps": 4, "max_epochs": 5, "accumulate_grad_batches": 2},
        "limit": {"max_epochs": 2, "limit_train_batches": 2},
        "limit, fraction": {"max_epochs": 2, "limit_train_batches": 0.5},
        "nothing to train on": {"limit_train_batches": 0, "max_epochs": 2},
        "min epochs": {"max_epochs": 4, "min_epochs": 2},
        "fast": {"fast_dev_run": True},
        "fast 3": {"fast_dev_run": 3},
        "overfit": {"overfit_batches": 2, "max_epochs": 2},
        "overfit, fraction": {"overfit_batches": 0.5, "max_epochs": 2},
    }
    for name, kwargs in settings.items():
        rec.event(f"== {name} ==")
        trainer = csv_trainer(L, tmp / name, **kwargs)
        trainer.fit(_val_trace(L, rec), loader(10), loader(6, seed=2))
        rec.result(trainer, name)


@script
def stopping(L: Any, tmp: Path, rec: Record) -> None:
    """`should_stop` from several hooks, minimum lengths against it, and -1 from `on_train_batch_start`."""

    def stopping_at(hook: str, batch: int) -> Any:
        module = _val_trace(L, rec)

        class Stopping(type(module)):
            pass

        def stop(self: Any, *args: Any) -> None:
            position = args[-1] if args else self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
            if position == batch:
                self.trainer.should_stop = True

        setattr(Stopping, hook, stop)
        module.__class__ = Stopping
        return module

    settings: dict[str, tuple[str, int, dict[str, Any]]] = {
        "batch end": ("on_train_batch_end", 1, {}),
        "batch start": ("on_train_batch_start", 1, {}),
        "last batch": ("on_train_batch_end", 4, {}),
        "epoch start": ("on_train_epoch_start", -1, {}),
        "validation end": ("on_validation_end", 1, {"val_check_interval": 2}),
        "min epochs": ("on_train_batch_end", 1, {"min_epochs": 2}),
        "min steps": ("on_train_batch_end", 1, {"min_steps": 4}),
        "min steps, long": ("on_train_batch_end", 1, {"min_steps": 8}),
        "no validation": ("on_train_batch_end", 1, {"limit_val_batches": 0}),
    }
    for name, (hook, batch, kwargs) in settings.items():
        rec.event(f"== {name} ==")
        trainer = quiet_trainer(L, tmp, max_epochs=3, **kwargs)
        trainer.fit(stopping_at(hook, batch), loader(10), loader(2, seed=2))
        rec.result(trainer, name)


@script
def skipping_an_epoch(L: Any, tmp: Path, rec: Record) -> None:
    """-1 from the module's `on_train_batch_start` skips the rest of the epoch; from a callback it does nothing."""

    class Skipping(net_class(L)):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            rec.event("start", epoch=self.current_epoch, batch_idx=batch_idx)
            return -1 if batch_idx == 2 and self.current_epoch == 0 else None

        def on_train_batch_end(self, *args: Any) -> None:
            rec.event("end", step=self.global_step)

        def on_train_epoch_end(self) -> None:
            rec.event("epoch end", step=self.global_step)

    class Callback(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int:
            return -1

    trainer = csv_trainer(L, tmp, max_epochs=2, callbacks=[Callback()])
    trainer.fit(Skipping(), loader(10), loader(2, seed=2))
    rec.result(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def time_limits(L: Any, tmp: Path, rec: Record) -> None:
    """`max_time` that is over at once, a Timer callback, and the forms of a duration."""
    for name, duration in (("dict", {"seconds": 0}), ("text", "00:00:00:00"), ("timedelta", timedelta(0))):
        trainer = quiet_trainer(L, tmp, max_epochs=3, max_time=duration)
        trainer.fit(net_class(L)(), loader(6))
        rec.result(trainer, name)
    for interval in ("step", "epoch"):
        timer = sub(L, "callbacks").Timer(duration=timedelta(0), interval=interval, verbose=False)
        trainer = quiet_trainer(L, tmp, max_epochs=3, callbacks=[timer])
        trainer.fit(net_class(L)(), loader(6), loader(2))
        rec.counters(trainer, interval)
        rec.fact(f"{interval}.times", [timer.time_elapsed() > 0, timer.start_time() is None, timer.end_time() is None])
        rec.fact(f"{interval}.other stages", [float(timer.time_elapsed("test")), timer.start_time("predict")])
        rec.fact(f"{interval}.keys", sorted(timer.state_dict()))
    timer = sub(L, "callbacks").Timer(duration="00:01:00:00")
    quiet_trainer(L, tmp, callbacks=[timer]).fit(net_class(L)(), loader(4))
    rec.fact("remaining", [timer.time_remaining() < 3600, timer.time_remaining() > 3500, timer.state_key])


@script
def unsized_data(L: Any, tmp: Path, rec: Record) -> None:
    """Iterable datasets without a length: limits, validation schedule, the last batch."""

    def stream(size: int) -> Any:
        return torch.utils.data.DataLoader(Stream(size), batch_size=2)

    class Last(type(_val_trace(L, rec))):
        pass

    settings: dict[str, dict[str, Any]] = {
        "all": {},
        "limited": {"limit_train_batches": 2, "limit_val_batches": 1},
        "count": {"val_check_interval": 2},
        "over epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
        "accumulated": {"accumulate_grad_batches": 3},
        "steps": {"max_steps": 3},
    }
    for name, kwargs in settings.items():
        rec.event(f"== {name} ==")
        trainer = csv_trainer(L, tmp / name, **{"max_epochs": 2, **kwargs})
        trainer.fit(Last(), stream(10), stream(4))
        rec.result(trainer, name)
        rec.fact(f"{name}.estimate", trainer.estimated_stepping_batches)
        rec.csv(tmp / name / "logs" / "version_0", f"{name}.csv")
    for name, kwargs in {"fraction": {"limit_train_batches": 0.5}, "interval": {"val_check_interval": 0.5}}.items():
        trainer = quiet_trainer(L, tmp, **kwargs)
        rec.error(name, lambda trainer=trainer: trainer.fit(Last(), stream(10), stream(4)), names=(name,))


@script
def estimated_steps(L: Any, tmp: Path, rec: Record) -> None:
    """`estimated_stepping_batches` in setup, in `configure_optimizers` and after the run."""

    class Asking(net_class(L)):
        def train_dataloader(self) -> Any:
            rec.event("train_dataloader")
            return loader(10)

        def configure_optimizers(self) -> Any:
            rec.event("estimate", value=self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    for kwargs in (
        {"max_epochs": 2},
        {"max_epochs": 2, "accumulate_grad_batches": 3},
        {"max_epochs": 2, "max_steps": 4},
        {"max_epochs": 2, "max_steps": 100},
        {"max_epochs": 2, "limit_train_batches": 3},
        {"max_epochs": -1, "max_steps": 3},
    ):
        rec.event(f"== {kwargs} ==")
        trainer = quiet_trainer(L, tmp, **kwargs)
        trainer.fit(Asking())
        rec.fact(str(kwargs), trainer.estimated_stepping_batches)
