"""Scripts about which hooks run, in which order, with what, and what they see."""

from pathlib import Path
from typing import Any

import torch

from differential.harness import script
from differential.nets import loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub, tracing_callback, tracing_datamodule, tracing_logger, tracing_module


def _scheduled(L: Any) -> Any:
    class Scheduled(net_class(L)):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Scheduled


def _loaders(train: int = 4, val: int = 2) -> dict[str, Any]:
    return {
        "train_dataloader": lambda: loader(train),
        "val_dataloader": lambda: loader(val, seed=2),
        "test_dataloader": lambda: loader(val, seed=3),
        "predict_dataloader": lambda: loader(val, seed=4),
    }


@script
def hook_order_fit(L: Any, tmp: Path, rec: Record) -> None:
    """Every hook of a fit with sanity check, validation, clipping, a scheduler, a checkpoint and a logger."""
    module = tracing_module(L, rec, _scheduled(L), deep=True, skip=["transfer_batch_to_device"])()
    data = tracing_datamodule(L, rec, loaders=_loaders(), skip=["on_before_batch_transfer", "on_after_batch_transfer"])
    saver = sub(L, "callbacks").ModelCheckpoint(dirpath=tmp / "saved")
    trainer = quiet_trainer(
        L,
        tmp,
        callbacks=[saver, tracing_callback(L, rec, deep=True)],
        logger=tracing_logger(L, rec),
        gradient_clip_val=0.5,
        log_every_n_steps=1,
    )
    trainer.fit(module, data)
    rec.result(trainer)
    rec.files()


@script
def hook_order_epochs(L: Any, tmp: Path, rec: Record) -> None:
    """Three epochs, validation twice in each, several callbacks: monitors come last, then others in list order."""
    callbacks = sub(L, "callbacks")
    skip = ["on_save_checkpoint"]
    stop = tracing_callback(L, rec, "stop", skip=skip, base=_bound(callbacks.EarlyStopping, monitor="val_loss"))
    trainer = quiet_trainer(
        L,
        tmp,
        callbacks=[stop, tracing_callback(L, rec, "A"), tracing_callback(L, rec, "B")],
        max_epochs=3,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
    )
    module = tracing_module(L, rec, net_class(L), deep=True)()
    trainer.fit(module, loader(8), loader(4, seed=2))
    rec.result(trainer)


def _bound(cls: Any, **kwargs: Any) -> Any:
    class Bound(cls):
        def __init__(self) -> None:
            super().__init__(**kwargs)

    return Bound


@script
def hook_order_evaluation(L: Any, tmp: Path, rec: Record) -> None:
    """Every hook of validate, test and predict with a datamodule, and the results they return."""
    for stage in ("validate", "test", "predict"):
        module = tracing_module(L, rec, net_class(L), deep=True, skip=["transfer_batch_to_device"])()
        trainer = quiet_trainer(L, tmp, callbacks=[tracing_callback(L, rec, deep=True)], logger=tracing_logger(L, rec))
        data = tracing_datamodule(L, rec, loaders=_loaders(val=4), skip=["transfer_batch_to_device"])
        rec.event(f"== {stage} ==")
        rec.fact(f"{stage}.returns", getattr(trainer, stage)(module, datamodule=data))
        rec.counters(trainer, stage)
        rec.metrics(trainer, stage)


@script
def hook_order_manual(L: Any, tmp: Path, rec: Record) -> None:
    """Manual optimisation: which hooks run around `manual_backward` and `step`, and which do not."""

    class Manual(net_class(L)):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss, "extra": loss.detach() * 2}

    trainer = quiet_trainer(L, tmp, callbacks=[tracing_callback(L, rec, deep=True)], num_sanity_val_steps=1)
    trainer.fit(tracing_module(L, rec, Manual)(), loader(4), loader(2))
    rec.result(trainer)


@script
def hook_order_accumulation(L: Any, tmp: Path, rec: Record) -> None:
    """Accumulation over three of five batches with a scheduler per step: what runs on which batch."""

    class Stepped(net_class(L)):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = quiet_trainer(
        L, tmp, callbacks=[tracing_callback(L, rec, deep=True)], accumulate_grad_batches=3, max_epochs=2
    )
    trainer.fit(tracing_module(L, rec, Stepped)(), loader(10))
    rec.result(trainer)


@script
def hook_order_failure(L: Any, tmp: Path, rec: Record) -> None:
    """An error in a training batch, in validation and in setup: who hears of it, and what does not run."""

    def failing(where: str, error: BaseException) -> Any:
        class Failing(net_class(L)):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if where == "train" and batch_idx == 1:
                    raise error
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch: Any, batch_idx: int) -> Any:
                if where == "val":
                    raise error
                return super().validation_step(batch, batch_idx)

            def setup(self, stage: str) -> None:
                if where == "setup":
                    raise error

        return Failing

    for where, error in (
        ("train", ZeroDivisionError("a broken batch")),
        ("val", ValueError("a broken validation")),
        ("setup", LookupError("a broken setup")),
        ("train", KeyboardInterrupt()),
    ):
        name = f"{where}.{type(error).__name__}"
        rec.event(f"== {name} ==")
        trainer = quiet_trainer(L, tmp, callbacks=[tracing_callback(L, rec)], logger=tracing_logger(L, rec))
        data = tracing_datamodule(L, rec, loaders=_loaders(), skip=["transfer_batch_to_device"])
        module = tracing_module(L, rec, failing(where, error))()
        rec.error(name, lambda trainer=trainer, module=module, data=data: trainer.fit(module, datamodule=data))
        rec.counters(trainer, name)
        rec.fact(f"{name}.interrupted", trainer.interrupted)


@script
def hook_order_resume(L: Any, tmp: Path, rec: Record) -> None:
    """Which load hooks run when a fit and a test start from a checkpoint, and the hooks of a second fit."""
    path = tmp / "saved.ckpt"
    first = quiet_trainer(L, tmp, callbacks=[tracing_callback(L, rec)], max_epochs=1)
    first.fit(tracing_module(L, rec, _scheduled(L))(), datamodule=tracing_datamodule(L, rec, loaders=_loaders()))
    first.save_checkpoint(path)
    rec.checkpoint(path)
    rec.event("== resume ==")
    second = quiet_trainer(L, tmp, callbacks=[tracing_callback(L, rec, deep=True)], max_epochs=2)
    data = tracing_datamodule(L, rec, loaders=_loaders())
    second.fit(tracing_module(L, rec, _scheduled(L), deep=True)(), datamodule=data, ckpt_path=str(path))
    rec.result(second, "resumed")
    rec.event("== test ==")
    third = quiet_trainer(L, tmp, callbacks=[tracing_callback(L, rec)])
    third.test(tracing_module(L, rec, _scheduled(L))(), datamodule=data, ckpt_path=str(path))
    rec.event("== again ==")
    second.fit_loop.max_epochs = 3
    second.fit(second.lightning_module, datamodule=data)
    rec.result(second, "again")


@script
def hooks_model_train(L: Any, tmp: Path, rec: Record) -> None:
    """Sub-modules frozen in eval mode stay so after validation; `on_validation_model_train` takes over if defined."""

    class Frozen(net_class(L)):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Dropout(0.5)

        def note(self, where: str) -> None:
            rec.event(where, modes=[module.training for module in self.modules()])

        def on_train_start(self) -> None:
            self.frozen.eval()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.note("train")

        def on_validation_start(self) -> None:
            self.note("validation")

        def on_test_start(self) -> None:
            self.note("test")

    class Overridden(Frozen):
        def on_validation_model_train(self) -> None:
            rec.event("on_validation_model_train")
            self.layer.train()

    for cls in (Frozen, Overridden):
        module = cls().eval()
        trainer = quiet_trainer(L, tmp, max_epochs=2, num_sanity_val_steps=1)
        trainer.fit(module, loader(4), loader(2))
        module.note("after fit")
        trainer.test(module, loader(2))
        module.note("after test")


@script
def hooks_nested_module(L: Any, tmp: Path, rec: Record) -> None:
    """A LightningModule inside another one reaches the trainer; its own hooks do not run."""

    class Child(net_class(L)):
        def on_train_start(self) -> None:
            rec.event("child.on_train_start")

    class Parent(net_class(L)):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Child()

        def on_train_start(self) -> None:
            rec.event("parent.on_train_start", same=self.layer.trainer is self.trainer)

    trainer = quiet_trainer(L, tmp)
    trainer.fit(Parent(), loader(4))
    rec.result(trainer)


@script
def trainer_in_hooks(L: Any, tmp: Path, rec: Record) -> None:
    """What properties of trainer and module say inside each group of hooks."""

    class Watching(net_class(L)):
        def look(self, where: str) -> None:
            t = self.trainer
            rec.event(
                where,
                flags=[t.training, t.validating, t.testing, t.predicting, t.sanity_checking, t.evaluating],
                here=[self.current_epoch, self.global_step, self.global_rank, self.local_rank],
                batches=[t.num_training_batches, t.num_val_batches, t.num_sanity_val_batches],
                device=self.device,
                optimizers=len(t.optimizers),
                schedulers=len(t.lr_scheduler_configs),
                callbacks=[type(callback).__name__ for callback in t.callbacks],
                metrics=sorted(t.callback_metrics),
            )

    names = ["setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start"]
    names += [f"on_{s}_{w}" for s in ("train", "validation", "test") for w in ("start", "end", "epoch_end")]
    for name in names:
        setattr(Watching, name, lambda self, *args, name=name, **kwargs: self.look(name))
    trainer = quiet_trainer(L, tmp, max_epochs=2)
    module = Watching()
    trainer.fit(module, loader(4), loader(2))
    trainer.validate(module, loader(4))
    trainer.test(module, loader(4))
