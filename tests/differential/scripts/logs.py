"""Scripts about `log`: defaults, names, reductions, rows of loggers, and what is refused."""

from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import Batches, csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub

STEP_HOOKS = [
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start",
    "on_test_batch_end",
]  # fmt: skip
EPOCH_HOOKS = [
    f"on_{stage}_{when}" for stage in ("train", "validation", "test") for when in ("start", "epoch_start", "epoch_end")
]
NO_LOG_HOOKS = [
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_test_end",
    "on_predict_start", "on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end", "on_predict_batch_start",
    "on_predict_batch_end",
]  # fmt: skip


def _logging_hook(parent: Any, hook: str, call: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call(self, args)
        return getattr(parent, hook)(self, *args, **kwargs)

    return method


@script
def log_in_every_hook(L: Any, tmp: Path, rec: Record) -> None:
    """`log` from each hook of module and callback where it is allowed, with the defaults of that hook."""
    members = {
        hook: _logging_hook(
            net_class(L),
            hook,
            lambda self, args, hook=hook: self.log(f"m.{hook}", float(self.global_step), batch_size=2),
        )
        for hook in STEP_HOOKS + EPOCH_HOOKS
    }
    heard = {
        hook: _logging_hook(
            L.Callback,
            hook,
            lambda self, args, hook=hook: self.log(f"c.{hook}", float(args[0].current_epoch + 1), batch_size=2),
        )
        for hook in STEP_HOOKS + EPOCH_HOOKS
    }
    module = type("Everywhere", (net_class(L),), members)()
    trainer = csv_trainer(L, tmp, max_epochs=2, callbacks=[type("Hearing", (L.Callback,), heard)()])
    trainer.fit(module, loader(4), loader(4, seed=2))
    rec.metrics(trainer, "fit")
    rec.fact("test", trainer.test(module, loader(4)))
    rec.metrics(trainer, "test")
    rec.csv(tmp / "logs" / "version_0")


@script
def log_both_flags(L: Any, tmp: Path, rec: Record) -> None:
    """`on_step` and `on_epoch` in all four combinations in each step method: names, rows, three views."""

    class Flags(net_class(L)):
        def note(self, prefix: str, value: Any) -> None:
            for on_step in (None, True, False):
                for on_epoch in (None, True, False):
                    name = f"{prefix}.{on_step}.{on_epoch}"
                    if (on_step, on_epoch) != (False, False) and (
                        prefix != "train" or (on_step, on_epoch) != (False, None)
                    ):
                        if (on_step, on_epoch) == (None, False) and prefix != "train":
                            continue
                        self.log(name, value, on_step=on_step, on_epoch=on_epoch, prog_bar=on_step is True)
            self.log(f"{prefix}.hidden", value, logger=False, prog_bar=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.note("train", loss)
            rec.event("train", seen=sorted(self.trainer.callback_metrics))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.note("val", self.loss(batch))
            rec.event("val", seen=sorted(self.trainer.callback_metrics))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.note("test", self.loss(batch))

        def look(self, where: str) -> None:
            t = self.trainer
            rec.event(where, callback=t.callback_metrics, logged=t.logged_metrics, bar=t.progress_bar_metrics)

        def on_train_batch_end(self, *args: Any) -> None:
            self.look("train batch end")

        def on_validation_batch_end(self, *args: Any) -> None:
            self.look("val batch end")

        def on_validation_epoch_end(self) -> None:
            self.look("val epoch end")

        def on_validation_end(self) -> None:
            self.look("val end")

        def on_train_epoch_end(self) -> None:
            self.look("train epoch end")

        def on_train_epoch_start(self) -> None:
            self.look("train epoch start")

        def on_train_end(self) -> None:
            self.look("train end")

    trainer = csv_trainer(L, tmp, max_epochs=2)
    module = Flags()
    trainer.fit(module, loader(6), loader(4, seed=2))
    rec.metrics(trainer, "fit")
    rec.fact("test", trainer.test(module, loader(4)))
    rec.fact("validate", trainer.validate(module, loader(4)))
    rec.metrics(trainer, "test")
    rec.csv(tmp / "logs" / "version_0")


@script
def log_every_n_steps(L: Any, tmp: Path, rec: Record) -> None:
    """Which steps get a row: intervals, accumulation, 0, epochs shorter than the interval."""
    for every, accumulate in ((1, 1), (2, 1), (3, 1), (2, 2), (50, 1), (0, 1)):
        name = f"{every}by{accumulate}"
        trainer = csv_trainer(L, tmp / name, max_epochs=3, log_every_n_steps=every, accumulate_grad_batches=accumulate)
        trainer.fit(net_class(L)(), loader(10), loader(2, seed=2))
        rec.csv(tmp / name / "logs" / "version_0", name)
        rec.metrics(trainer, name)


@script
def log_reductions(L: Any, tmp: Path, rec: Record) -> None:
    """All reductions over an epoch, in training and validation, and names for them."""

    class Reducing(net_class(L)):
        def note(self, prefix: str, batch: Any) -> None:
            value = batch[0].sum()
            for kind in (
                "mean",
                "avg",
                "min",
                "max",
                "sum",
                torch.mean,
                torch.min,
                torch.max,
                torch.sum,
                min,
                max,
                sum,
            ):
                name = kind if isinstance(kind, str) else f"fn.{kind.__name__}.{getattr(kind, '__module__', '')[:5]}"
                self.log(f"{prefix}.{name}", value, on_step=False, on_epoch=True, reduce_fx=kind)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("train", batch)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.note("val", batch)

    trainer = csv_trainer(L, tmp, max_epochs=2)
    trainer.fit(Reducing(), loader(7), loader(5, seed=2))
    rec.metrics(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def log_batch_size(L: Any, tmp: Path, rec: Record) -> None:
    """The weight of a batch in an epoch's mean: found in the batch, given, or impossible to find."""

    class Weighted(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("found", float(batch_idx), on_step=True, on_epoch=True)
            self.log("given", float(batch_idx), on_step=False, on_epoch=True, batch_size=batch_idx + 1)
            return self(torch.ones(1, 4)).sum()

    batches: dict[str, Any] = {
        "tensors": [torch.ones(3, 4), torch.ones(1, 4)],
        "dicts": [{"n": 1, "x": torch.ones(3, 4)}, {"n": 1, "x": torch.ones(1, 4)}],
        "nested": [[{"x": (torch.ones(5, 2),)}], [{"x": (torch.ones(1, 2),)}]],
        "scalars": [torch.tensor(1.0), torch.tensor(2.0)],
        "strings": [["ab", "c"], ["d"]],
        "ambiguous": [(torch.ones(2, 4), torch.ones(3)), (torch.ones(1, 4), torch.ones(3))],
        "nothing": [object(), object()],
        "numbers": [1, 2],
    }
    for name, source in batches.items():
        trainer = csv_trainer(L, tmp / name)
        failed = rec.error(name, lambda t=trainer, s=source: t.fit(Weighted(), Batches(s)), names=("batch_size",))
        if not failed:
            rec.metrics(trainer, name)


@script
def log_values(L: Any, tmp: Path, rec: Record) -> None:
    """What may be logged: numbers, booleans, tensors of any kind; and how each comes out."""

    class Values(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for flags in ({"on_step": True, "on_epoch": False}, {"on_step": False, "on_epoch": True}):
                suffix = "step" if flags["on_step"] else "epoch"
                self.log(f"int.{suffix}", batch_idx, **flags)
                self.log(f"float.{suffix}", 0.1 * batch_idx, **flags)
                self.log(f"double.{suffix}", torch.tensor(0.1, dtype=torch.float64), **flags)
                self.log(f"half.{suffix}", torch.tensor(0.1, dtype=torch.float16), **flags)
                self.log(f"bfloat.{suffix}", torch.tensor(1.1 + batch_idx, dtype=torch.bfloat16), **flags)
                self.log(f"long.{suffix}", torch.tensor(batch_idx + 1), **flags)
                self.log(f"bool.{suffix}", torch.tensor(True), **flags)
                self.log(f"one element.{suffix}", torch.tensor([[2.5]]), **flags)
                self.log(f"nan.{suffix}", float("nan"), **flags)
                self.log(f"inf.{suffix}", float("inf"), **flags)
            self.log("graph", self.loss(batch), enable_graph=True)
            self.log_dict({"a": 1.0, "b": torch.tensor(2.0)}, on_epoch=True)
            rec.event("views", logged=self.trainer.logged_metrics)
            return self.loss(batch)

    trainer = csv_trainer(L, tmp)
    trainer.fit(Values(), loader(6))
    rec.metrics(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def log_step_axis(L: Any, tmp: Path, rec: Record) -> None:
    """The step column: an own "step" metric, validation mid-epoch, evaluation on_step, `log_metrics` by hand."""

    class Stepping(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("step", float(100 + batch_idx))
            self.log("train", 1.0)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(batch_idx), on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log("step", float(self.current_epoch))
            self.log("end", 1.0)
            self.logger.log_metrics({"by hand": 2.0}, step=77)
            self.logger.log_metrics({"without step": 2.0})

    trainer = csv_trainer(L, tmp, max_epochs=2, val_check_interval=0.5)
    module = Stepping()
    trainer.fit(module, loader(8), loader(4, seed=2))
    trainer.validate(module, loader(4))
    rec.metrics(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def log_misuse(L: Any, tmp: Path, rec: Record) -> None:
    """Everything `log` refuses, and the hooks in which it may not be called at all."""

    def fitting(call: Any, hook: str = "training_step", run: str = "fit") -> None:
        members = {hook: _logging_hook(net_class(L), hook, call)}
        module = type("Misusing", (net_class(L),), members)()
        trainer = quiet_trainer(L, tmp, num_sanity_val_steps=0)
        if run == "fit":
            trainer.fit(module, loader(4), loader(4))
        else:
            getattr(trainer, run)(module, loader(4))

    def twice(self: Any, args: Any) -> None:
        self.log("x", 1.0, prog_bar=True)
        self.log("x", 1.0, prog_bar=False)

    calls: dict[str, Any] = {
        "both off": lambda self, args: self.log("x", 1.0, on_step=False, on_epoch=False),
        "string value": lambda self, args: self.log("x", "text"),
        "None value": lambda self, args: self.log("x", None),
        "dict value": lambda self, args: self.log("x", {"a": 1.0}),
        "list value": lambda self, args: self.log("x", [1.0]),
        "many elements": lambda self, args: self.log("x", torch.ones(2)),
        "no name": lambda self, args: self.log(3, 1.0),
        "loader suffix in name": lambda self, args: self.log("x/dataloader_idx_0", 1.0),
        "twice": twice,
        "reduction": lambda self, args: self.log("x", 1.0, on_epoch=True, reduce_fx="nonsense"),
        "reduction, function": lambda self, args: self.log("x", 1.0, on_epoch=True, reduce_fx=lambda values: values[0]),
    }
    for name, call in calls.items():
        rec.error(
            name,
            lambda call=call: fitting(call),
            names=("nonsense", "dataloader_idx", "on_step", "on_epoch"),
            any_kind=name == "no name",
        )
    for hook in NO_LOG_HOOKS:
        run = "predict" if "predict" in hook else "test" if "test" in hook else "fit"
        rec.error(
            f"in {hook}", lambda h=hook, r=run: fitting(lambda self, args: self.log("x", 1.0), h, r), names=(hook,)
        )
    for hook in EPOCH_HOOKS:
        if "test" not in hook:
            call = lambda self, args: self.log("x", 1.0, on_step=True)  # noqa: E731
            rec.error(f"on_step in {hook}", lambda h=hook, call=call: fitting(call, h), names=(hook, "on_step"))
    rec.error("unattached", lambda: net_class(L)().log("x", 1.0))
    rec.error("predict_step", lambda: fitting(lambda self, args: self.log("x", 1.0), "predict_step", "predict"))
    rec.error("configure_optimizers", lambda: fitting(lambda self, args: self.log("x", 1.0), "configure_optimizers"))
    rec.error("in validation", lambda: fitting(lambda self, args: self.log("x", torch.ones(3)), "validation_step"))


@script
def torchmetrics_objects(L: Any, tmp: Path, rec: Record) -> None:
    """Metric objects from torchmetrics: logged whole, by value, in a collection, in train and validation."""
    torchmetrics = __import__("torchmetrics")

    class Measured(net_class(L)):
        def __init__(self) -> None:
            super().__init__()
            self.train_error = torchmetrics.MeanSquaredError()
            self.val_error = torchmetrics.MeanAbsoluteError()
            self.mean = torchmetrics.MeanMetric()
            self.many = torchmetrics.MetricCollection(
                {"mse": torchmetrics.MeanSquaredError(), "r2": torchmetrics.R2Score()}
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self(x)
            self.train_error(prediction, y)
            self.log("train_error", self.train_error, on_step=True, on_epoch=True)
            self.mean.update(float(batch_idx))
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            prediction = self(x)
            self.val_error(prediction, y)
            self.log("val_error", self.val_error, prog_bar=True)
            self.many.update(prediction, y)
            self.log("by value", self.val_error.compute())

        def on_validation_epoch_end(self) -> None:
            self.log_dict({f"many_{name}": value for name, value in self.many.compute().items()})
            self.many.reset()

        def on_train_epoch_start(self) -> None:
            counts = [self.train_error._update_count, self.val_error._update_count, self.mean._update_count]
            rec.event("reset", counts=counts)

    trainer = csv_trainer(L, tmp, max_epochs=2)
    module = Measured()
    trainer.fit(module, loader(7), loader(5, seed=2))
    rec.result(trainer, "fit")
    rec.fact("validate", trainer.validate(module, loader(7)))
    rec.csv(tmp / "logs" / "version_0")


@script
def bar_metrics(L: Any, tmp: Path, rec: Record) -> None:
    """What a progress bar is given: `progress_bar_metrics` and the bar's own `get_metrics`."""
    callbacks = sub(L, "callbacks")

    class Bar(callbacks.ProgressBar):
        def __init__(self) -> None:
            super().__init__()
            self.enabled = True

        def disable(self) -> None:
            self.enabled = False

        def enable(self) -> None:
            self.enabled = True

        def note(self, where: str, trainer: Any, module: Any) -> None:
            metrics = self.get_metrics(trainer, module)
            rec.event(where, metrics=metrics, train=self.total_train_batches, val=trainer.num_val_batches)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.note("train", trainer, pl_module)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.note("val", trainer, pl_module)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.note("epoch", trainer, pl_module)

    class Shown(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log_dict({"loss": loss, "batch": float(batch_idx)}, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), prog_bar=True)

    bar = Bar()
    trainer = csv_trainer(L, tmp, max_epochs=2, callbacks=[bar], enable_progress_bar=True)
    trainer.fit(Shown(), loader(4), loader(4, seed=2))
    rec.result(trainer)
    rec.fact("bar", [trainer.progress_bar_callback is bar, bar.train_description, bar.sanity_check_description])
