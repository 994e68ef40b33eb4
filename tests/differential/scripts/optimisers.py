"""Scripts about optimizers: closures, several of them, clipping, accumulation, manual mode."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from differential.harness import script
from differential.nets import csv_trainer, loader, net_class, quiet_trainer
from differential.record import Record
from differential.tracing import sub


@script
def accumulation(L: Any, tmp: Path, rec: Record) -> None:
    """Gradients over 2, 3 and more batches than there are: steps, logged rows and weights."""
    for factor in (2, 3, 9):
        trainer = csv_trainer(L, tmp / str(factor), accumulate_grad_batches=factor, max_epochs=2)
        trainer.fit(net_class(L)(), loader(10), loader(4, seed=2))
        rec.result(trainer, f"by{factor}")
        rec.csv(tmp / str(factor) / "logs" / "version_0", f"by{factor}.csv")


@script
def accumulation_scheduler(L: Any, tmp: Path, rec: Record) -> None:
    """`GradientAccumulationScheduler` changes the factor from epoch to epoch."""

    class Noting(net_class(L)):
        def on_train_epoch_start(self) -> None:
            rec.event("epoch", factor=self.trainer.accumulate_grad_batches, step=self.global_step)

    callback = sub(L, "callbacks").GradientAccumulationScheduler({1: 3, 2: 2})
    trainer = csv_trainer(L, tmp, callbacks=[callback], max_epochs=4)
    trainer.fit(Noting(), loader(10))
    rec.result(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def clipping(L: Any, tmp: Path, rec: Record) -> None:
    """Clipping by norm and by value, with accumulation, and norms seen before the optimizer step."""

    class Noting(net_class(L)):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rec.event("before", grads=[p.grad for p in self.parameters()])

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            rec.event("after", grads=[p.grad for p in self.parameters()])

    settings: dict[str, dict[str, Any]] = {
        "norm": {"gradient_clip_val": 0.5},
        "int": {"gradient_clip_val": 1, "gradient_clip_algorithm": "norm"},
        "value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        "zero": {"gradient_clip_val": 0.0},
        "accumulated": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    }
    for name, kwargs in settings.items():
        trainer = quiet_trainer(L, tmp, **kwargs)
        trainer.fit(Noting(), loader(6))
        rec.weights(trainer.lightning_module, name)


@script
def clipping_by_hand(L: Any, tmp: Path, rec: Record) -> None:
    """`configure_gradient_clipping` and `clip_gradients` in user hands, with and without trainer values."""

    class Own(net_class(L)):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            rec.event("configure", value=gradient_clip_val, algorithm=gradient_clip_algorithm)
            if self.global_step >= 1:
                self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="value")

    trainer = quiet_trainer(L, tmp)
    trainer.fit(Own(), loader(6))
    rec.weights(trainer.lightning_module)
    rec.error("conflict", lambda: quiet_trainer(L, tmp, gradient_clip_val=0.5).fit(Own(), loader(6)))

    class Manual(net_class(L)):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()

    trainer = quiet_trainer(L, tmp)
    trainer.fit(Manual(), loader(6))
    rec.weights(trainer.lightning_module, "manual")


@script
def closures(L: Any, tmp: Path, rec: Record) -> None:
    """Overridden `optimizer_step`: warm-up by hand, a step every second batch, a closure called by hand."""

    class Warm(net_class(L)):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 3)

    class Second(net_class(L)):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    class Early(net_class(L)):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            rec.event("closure", loss=optimizer_closure())
            optimizer.step()

    for cls in (Warm, Second, Early):
        trainer = csv_trainer(L, tmp / cls.__name__, max_epochs=2)
        trainer.fit(cls(), loader(8))
        rec.result(trainer, cls.__name__)
        rec.csv(tmp / cls.__name__ / "logs" / "version_0", f"{cls.__name__}.csv")


@script
def lbfgs(L: Any, tmp: Path, rec: Record) -> None:
    """LBFGS calls its closure several times per step."""

    class Newton(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            rec.event("training_step", batch_idx=batch_idx, loss=loss)
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    trainer = csv_trainer(L, tmp, max_epochs=2)
    trainer.fit(Newton(), loader(6))
    rec.result(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def skipped_batches(L: Any, tmp: Path, rec: Record) -> None:
    """`training_step` returns None for some batches, with and without accumulation."""

    class Skipping(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 4) else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rec.event("end", outputs=outputs, batch_idx=batch_idx, step=self.global_step)

    for factor in (1, 2):
        trainer = csv_trainer(L, tmp / str(factor), accumulate_grad_batches=factor)
        trainer.fit(Skipping(), loader(10))
        rec.result(trainer, f"by{factor}")
        rec.csv(tmp / str(factor) / "logs" / "version_0", f"by{factor}.csv")


@script
def step_outputs(L: Any, tmp: Path, rec: Record) -> None:
    """`training_step` returns a dict with more than the loss, and what the batch-end hooks see of it."""

    class Extra(net_class(L)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "prediction": self(batch[0]).detach(), "text": "kept", "number": batch_idx}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"val": self.loss(batch), "list": [1, 2]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs["loss"]
            rec.event("train", outputs=outputs, grad=loss.requires_grad, leaf=loss.is_leaf)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            rec.event("val", outputs=outputs)

    trainer = quiet_trainer(L, tmp, accumulate_grad_batches=2)
    trainer.fit(Extra(), loader(6), loader(2))
    rec.result(trainer)


@script
def no_optimizer(L: Any, tmp: Path, rec: Record) -> None:
    """`configure_optimizers` returns None, or is not there: the loop runs, the weights stay."""

    class Nothing(net_class(L)):
        def configure_optimizers(self) -> None:
            return None

    trainer = csv_trainer(L, tmp, max_epochs=2)
    module = Nothing()
    trainer.fit(module, loader(4))
    rec.result(trainer)
    rec.csv(tmp / "logs" / "version_0")


def _gan(L: Any) -> Any:
    class Gan(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(3)
            self.generator = nn.Linear(4, 4)
            self.critic = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, _ = batch
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            rec_flags = [p.requires_grad for p in self.parameters()]
            g_loss = -self.critic(self.generator(x)).mean()
            self.manual_backward(g_loss)
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            with second.toggle_model():
                d_loss = self.critic(self.generator(x).detach()).mean() - self.critic(x).mean()
                self.manual_backward(d_loss)
                if batch_idx % 2 == 0:
                    second.step()
                    second.zero_grad()
            self.log_dict({"g_loss": g_loss, "d_loss": d_loss, "toggled": float(sum(rec_flags))}, prog_bar=True)
            scheduler = self.lr_schedulers()
            if self.trainer.is_last_batch:
                scheduler.step()

        def configure_optimizers(self) -> Any:
            first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
            second = torch.optim.SGD(self.critic.parameters(), lr=0.02)
            return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.5)]

    return Gan


@script
def two_optimizers(L: Any, tmp: Path, rec: Record) -> None:
    """A GAN by hand: toggling, unequal numbers of steps, a scheduler, the checkpoint and its counters."""
    trainer = csv_trainer(L, tmp, max_epochs=2, enable_checkpointing=True)
    trainer.fit(_gan(L)(), loader(6))
    rec.result(trainer)
    rec.csv(tmp / "logs" / "version_0")
    rec.fact("lr", [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])
    rec.files()
    rec.checkpoint(trainer.checkpoint_callback.best_model_path)


@script
def manual_accumulation(L: Any, tmp: Path, rec: Record) -> None:
    """Manual mode with a step every second batch, closures, plain optimizers and several backward calls."""

    class Manual(net_class(L)):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            wrapped, bare = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            rec.event("optimizers", wrapped=wrapped, bare=bare, same=wrapped.optimizer is bare)
            self.manual_backward(self.loss(batch) / 2, retain_graph=False)
            self.manual_backward(self(batch[0]).abs().mean() * 0.1)
            if batch_idx % 2:
                wrapped.step()
                wrapped.zero_grad()
            if batch_idx == 2:

                def closure() -> Any:
                    wrapped.zero_grad()
                    loss = self.loss(batch)
                    self.manual_backward(loss)
                    return loss

                rec.event("returned", value=wrapped.step(closure=closure))
            self.log("steps", float(self.global_step))

    trainer = csv_trainer(L, tmp)
    trainer.fit(Manual(), loader(10))
    rec.result(trainer)
    rec.csv(tmp / "logs" / "version_0")


@script
def optimizer_access(L: Any, tmp: Path, rec: Record) -> None:
    """Parameter groups, `trainer.optimizers`, hidden weights in no optimizer, sparse use of `requires_grad`."""

    class Groups(net_class(L)):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.layer[0].bias.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.layer[0].parameters(), "lr": 0.1},
                {"params": self.layer[2].parameters(), "weight_decay": 0.01, "name": "last"},
                {"params": self.unused.parameters()},
            ]
            return torch.optim.AdamW(groups, lr=0.02)

        def on_train_batch_end(self, *args: Any) -> None:
            groups = self.trainer.optimizers[0].param_groups
            rec.event("groups", rates=[group["lr"] for group in groups], kind=self.optimizers())

    torch.manual_seed(1)
    trainer = quiet_trainer(L, tmp, gradient_clip_val=1.0)
    trainer.fit(Groups(), loader(6))
    rec.result(trainer)
