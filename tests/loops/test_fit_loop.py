"""The training loop in one process: what it calls, counts and warns about."""

import math
import threading
import warnings

import pytest
import torch
from rank_threads import World
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leyden as L
from leyden.loops.watch import LossWatch, Request, StopWatch

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
X = torch.arange(48, dtype=torch.float32).reshape(16, 3).sin()
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """What is said once per process may have been said in another test."""
    monkeypatch.setattr("leyden.base.log._said", set())


class Linear(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 1)
        self.called = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(batch=2, rows=16):
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), batch)


def fit(module, train=None, val=None, **more):
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, **more})
    trainer.fit(module, train or loader(), val)
    return trainer


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def reference(make=None, accumulate=1, epochs=1, batch=2, between=None):
    """Plain torch; ``between(layer, optimizer)`` runs before each update."""
    layer = Linear().layer
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(layer.parameters())
    starts = range(0, 16, batch)
    for _ in range(epochs):
        for index, first in enumerate(starts):
            x, y = X[first : first + batch], Y[first : first + batch]

            def closure(x=x, y=y, zero=index % accumulate == 0):
                if zero:
                    optimizer.zero_grad()
                loss = nn.functional.mse_loss(layer(x), y) / accumulate
                loss.backward()
                return loss

            if isinstance(optimizer, (torch.optim.LBFGS, Twice)):
                optimizer.step(closure)
                continue
            closure()
            if (index + 1) % accumulate == 0 or index + 1 == len(starts):
                if between is not None:
                    between(layer, optimizer)
                optimizer.step()
    return weights(layer)


# ---- updates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 3, 8, 100])
def test_accumulation_equals_plain_torch(accumulate):
    module = Linear()
    trainer = fit(module, accumulate_grad_batches=accumulate, max_epochs=2)
    assert torch.equal(weights(module), reference(accumulate=accumulate, epochs=2))
    steps = 2 * math.ceil(8 / accumulate)
    assert trainer.global_step == trainer.fit_loop.epoch_loop._batches_that_stepped == steps
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 16


@pytest.mark.parametrize(
    ("value", "algorithm", "clip"),
    [
        (0.1, "norm", lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
        (0.05, "value", lambda p: nn.utils.clip_grad_value_(p, 0.05)),
    ],
)
def test_clipping_equals_plain_torch(value, algorithm, clip):
    module = Linear()
    fit(module, gradient_clip_val=value, gradient_clip_algorithm=algorithm, accumulate_grad_batches=2)
    expected = reference(accumulate=2, between=lambda layer, optimizer: clip(layer.parameters()))
    assert torch.equal(weights(module), expected)


class Twice(torch.optim.Optimizer):
    """Calls its closure twice, steps with the gradients of the second call, as sharpness-aware optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        loss = None
        for scale in (0.5, 1.0):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-scale * group["lr"])
        return loss


def _lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4)


@pytest.mark.parametrize("make", [Twice, _lbfgs])
def test_optimizers_that_evaluate_their_closure_several_times(make):
    class Counts(Linear):
        def training_step(self, batch, batch_idx):
            self.called.append("step")
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            self.called.append("before")

        def configure_optimizers(self):
            return make(self.parameters())

    module = Counts()
    trainer = fit(module)
    assert torch.equal(weights(module), reference(make))
    assert trainer.global_step == 8
    assert module.called.count("step") >= 16
    # Gradients are ready as often as the closure was evaluated.
    assert module.called.count("before") == module.called.count("step")


def test_overridden_methods_take_the_place_of_the_defaults():
    class Overrides(Linear):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            self.called.append(f"optimizer_step {epoch} {batch_idx}")
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()  # trained on, but not stepped

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.called.append("zero")
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss):
            self.called.append("backward")
            (2 * loss).backward()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.called.append(f"clip {gradient_clip_val} {gradient_clip_algorithm}")
            nn.utils.clip_grad_norm_(self.parameters(), 0.3)

    module = Overrides()
    fit(module, loader(rows=4), max_epochs=1)
    layer = Linear().layer
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    (2 * nn.functional.mse_loss(layer(X[:2]), Y[:2])).backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.3)
    optimizer.step()
    assert torch.equal(weights(module), weights(layer))
    first = ["optimizer_step 0 0", "zero", "backward", "clip None None"]
    assert module.called == [*first, "optimizer_step 0 1", "zero", "backward"]


def test_training_step_may_return_none_or_a_dict():
    class Skips(Linear):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                return None
            return {"loss": self.loss(batch), "extra": batch_idx}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.called.append((sorted(outputs), outputs.get("extra")))

    module = Skips()
    with pytest.warns(UserWarning, match="returned None"):
        trainer = fit(module, loader(rows=6))
    assert module.called == [(["extra", "loss"], 0), ([], None), (["extra", "loss"], 2)]
    assert trainer.global_step == 3


@pytest.mark.parametrize("value", [3.0, "loss", {"other": 1}, [torch.ones(())]])
def test_other_returns_of_training_step_are_refused(value):
    class Returns(Linear):
        def training_step(self, batch, batch_idx):
            return value

    with pytest.raises(L.utilities.exceptions.MisconfigurationException, match=r"Returns\.training_step returned"):
        fit(Returns())


def test_loss_without_gradient_is_explained():
    class Detached(Linear):
        def training_step(self, batch, batch_idx):
            return self.loss(batch).detach()

    with pytest.raises(RuntimeError, match=r"Detached\.training_step returned has no gradient"):
        fit(Detached())


def test_outputs_hold_the_loss_as_it_was_trained_on():
    class Keeps(Linear):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert not outputs["loss"].requires_grad
            self.called.append(float(outputs["loss"]))

    module = Keeps()
    fit(module, loader(batch=8), accumulate_grad_batches=2)
    layer = Linear().layer
    expected = [nn.functional.mse_loss(layer(X[i : i + 8]), Y[i : i + 8]).item() / 2 for i in (0, 8)]
    assert module.called == pytest.approx(expected)


def test_logged_value_stays_when_the_tensor_is_changed_in_place():
    class InPlace(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            self.count += 1
            self.log("count", self.count, on_step=True, on_epoch=True)
            self.count += 10
            return self.loss(batch)

    module = InPlace()
    trainer = fit(module, loader(batch=4))
    counts = [1.0, 12.0, 23.0, 34.0]
    assert float(trainer.callback_metrics["count_step"]) == counts[-1]
    assert float(trainer.callback_metrics["count_epoch"]) == sum(counts) / 4


# ---- counters ------------------------------------------------------------------------------------------------------


def _counters(lightning, **more):
    """What a callback sees of the counters, with callback and module of the given package."""

    class Sees(lightning.Callback):
        def __init__(self):
            self.seen = []

        def note(self, name, trainer):
            batches = trainer.fit_loop.epoch_loop.batch_progress
            epochs = trainer.fit_loop.epoch_progress.current
            rows = [(c.ready, c.started, c.processed, c.completed) for c in (batches.current, batches.total)]
            if name == "epoch start":
                del rows[0]  # Lightning still has the counts of the epoch before
            rows.append((epochs.ready, epochs.processed, epochs.completed))
            steps = (trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped)
            self.seen.append((name, trainer.current_epoch, steps, rows, trainer.is_last_batch))

        def on_train_epoch_start(self, trainer, pl_module):
            self.note("epoch start", trainer)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.note("batch start", trainer)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.note("batch end", trainer)

        def on_train_epoch_end(self, trainer, pl_module):
            self.note("epoch end", trainer)

        def on_train_end(self, trainer, pl_module):
            self.note("end", trainer)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = Sees()
    trainer = lightning.Trainer(**{**QUIET, "max_epochs": 2, **more}, callbacks=[callback])
    trainer.fit(Module(), loader(batch=4, rows=12))
    callback.note("after", trainer)
    return callback.seen


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2}, {"max_steps": 4, "max_epochs": -1}])
def test_counters_are_those_of_lightning(more):
    real = pytest.importorskip("lightning.pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = _counters(L, **more), _counters(real, **more)
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    different = [(mine, row) for mine, row in zip(ours, theirs, strict=True) if mine != row]
    assert different == []


def test_two_optimizers_count_twice():
    class Manual(Linear):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            for optimizer, net in zip(self.optimizers(), (self.layer, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(net(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.layer, self.other)]

    module = Manual()
    trainer = fit(module)
    assert trainer.global_step == 16
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 8
    assert torch.equal(weights(module.layer), reference())


# ---- validation ----------------------------------------------------------------------------------------------------


class Validates(Linear):
    def validation_step(self, batch, batch_idx):
        self.called.append("val")
        self.log("val_loss", self.loss(batch))


def test_step_without_data_and_data_without_step_are_warned_about():
    with pytest.warns(UserWarning, match="has a `validation_step`, but there is no validation data"):
        fit(Validates())
    with pytest.warns(UserWarning, match="there is validation data, but Linear has no `validation_step`"):
        fit(Linear(), val=loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*training may wait for data.*")
        fit(Validates(), val=loader())
        fit(Linear())


@pytest.mark.parametrize(
    ("more", "runs"),
    [
        ({}, 2),
        ({"val_check_interval": 0.5}, 4),
        ({"val_check_interval": 3}, 4),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 5),
        ({"check_val_every_n_epoch": 2}, 1),
        ({"limit_val_batches": 0}, 0),
    ],
)
def test_number_of_validations(more, runs):
    module = Validates()
    fit(module, val=loader(rows=2), num_sanity_val_steps=0, max_epochs=2, **more)
    assert module.called.count("val") == runs


def test_gradients_and_modes_are_as_before_after_validation():
    class Checks(Validates):
        def __init__(self):
            super().__init__()
            self.frozen = nn.BatchNorm1d(3).eval()

        def validation_step(self, batch, batch_idx):
            assert not self.training
            assert not torch.is_grad_enabled()
            super().validation_step(batch, batch_idx)

        def training_step(self, batch, batch_idx):
            assert self.layer.training
            assert not self.frozen.training
            assert torch.is_grad_enabled()
            return self.loss(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)

    module = Checks()
    with pytest.warns(UserWarning, match="'frozen'"):
        fit(module, val=loader(), val_check_interval=2)
    assert torch.equal(weights(module.layer), reference())


# ---- losses that are not finite ------------------------------------------------------------------------------------


def _bad_at(*places, value=math.nan, skip=()):
    class Bad(Linear):
        def training_step(self, batch, batch_idx):
            if (self.current_epoch, batch_idx) in skip:
                return None
            loss = self.loss(batch)
            return loss * value if (self.current_epoch, batch_idx) in places else loss

        def on_before_optimizer_step(self, optimizer):
            self.zero_grad(set_to_none=False)  # the weights stay good

    return Bad()


@pytest.mark.parametrize(
    ("places", "value", "skip", "named"),
    [
        ([(0, 0)], math.nan, (), "epoch 0, batch 0 is nan"),
        ([(0, 5), (0, 6)], math.inf, (), "epoch 0, batch 5 is inf; 2 of"),
        ([(1, 7)], -math.inf, (), "epoch 1, batch 7 is -inf"),
        ([(0, 4)], math.nan, [(0, 1), (0, 2)], "epoch 0, batch 4 is nan"),
    ],
)
def test_first_loss_that_is_not_finite_is_named_once(places, value, skip, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(_bad_at(*places, value=value, skip=skip), max_epochs=2)
    found = [str(w.message) for w in caught if "the training loss of" in str(w.message)]
    assert len(found) == 1
    assert named in found[0]


def test_watch_looks_in_time_and_at_large_numbers_without_alarm():
    watch = LossWatch()
    watch.start_epoch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in range(LossWatch.LOOK_EVERY + 3):
            watch.losses.append((torch.tensor(3e38), batch))
        watch.look()
        watch.losses.append((torch.tensor(1), 60))
        watch.losses.append((2.0, 61))  # manual optimisation may return anything as "loss"
        watch.losses.append((torch.zeros(3), 62))
        watch.look()
    watch.losses.append((torch.tensor([1.0, math.nan]), 70))
    with pytest.warns(RuntimeWarning, match="epoch 2, batch 70 is nan"):
        watch.look()


def test_manual_optimisation_may_return_a_loss_of_any_kind():
    class Manual(Linear):
        def __init__(self, loss):
            super().__init__()
            self.automatic_optimization = False
            self.returned = loss

        def training_step(self, batch, batch_idx):
            return {"loss": self.returned}

    for value in (1.5, torch.ones(3), "text", None):
        fit(Manual(value))


# ---- signals, agreed by all ranks ----------------------------------------------------------------------------------


def test_stop_watch_of_one_process_asks_at_every_batch():
    requests = iter([Request.NONE, Request.REQUEUE, Request.TERMINATE])
    watch = StopWatch(lambda: next(requests), None)
    assert [watch.requested() for _ in range(3)] == [Request.NONE, Request.REQUEUE, Request.TERMINATE]


@pytest.mark.parametrize("which", [0, 1])
def test_all_ranks_stop_at_the_same_batch(which, monkeypatch):
    clock = threading.local()
    monkeypatch.setattr("leyden.loops.watch.time.monotonic", lambda: clock.now)

    def run(comm):
        clock.now, signalled = 0.0, False
        watch = StopWatch(lambda: Request.TERMINATE if signalled else Request.NONE, comm)
        for batch in range(500):
            clock.now += 0.01 * (1 + comm.rank)  # rank 1 measures another pace than rank 0
            signalled = batch >= 42 and comm.rank == which
            if watch.requested() is Request.TERMINATE:
                return batch
        return None

    first, second = World(2).run(run)
    assert first == second
    assert 42 <= first <= 42 + 100


def test_ranks_exchange_about_once_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("leyden.loops.watch.time.monotonic", lambda: now[0])

    class Alone:
        """One of two ranks, the other of which does the same."""

        host_group = None

        def __init__(self):
            self.exchanges = []

        def all_reduce(self, tensor, op, group=None):
            assert op == "max"
            self.exchanges.append(now[0])
            return tensor

    comm = Alone()
    watch = StopWatch(lambda: Request.NONE, comm)
    for _ in range(2000):  # 20 s of batches of 10 ms
        now[0] += 0.01
        assert watch.requested() is Request.NONE
    assert 18 <= len(comm.exchanges) <= 23
    gaps = [b - a for a, b in zip(comm.exchanges, comm.exchanges[1:], strict=False)]
    assert max(gaps) < 1.2
