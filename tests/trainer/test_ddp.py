"""Two processes, as `python train.py` starts them, against what mathematics or one process says."""

import json
import subprocess
import sys
import time

import pytest
import rank_scripts
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import leyden as L

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
X = torch.arange(96, dtype=torch.float32).reshape(32, 3).sin()
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1

# ---- what one process has to find on the whole batch ---------------------------------------------------------------


def _linear():
    torch.manual_seed(7)
    return nn.Linear(3, 1)


def _reference(epochs=2, batch=4, accumulate=1, rows=32):
    """Plain torch on the global batches."""
    layer = _linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    starts = range(0, rows, batch)
    for _ in range(epochs):
        for index, first in enumerate(starts):
            if index % accumulate == 0:
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(layer(X[first : first + batch]), Y[first : first + batch])
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(starts):
                optimizer.step()
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def _gan_reference(steps=8, batch=4):
    torch.manual_seed(7)
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    first = torch.optim.Adam(generator.parameters(), lr=0.05)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    for step in range(steps):
        x = X[batch * step : batch * (step + 1)]
        loss = -critic(generator(x)).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        loss = critic(generator(x).detach()).mean() - critic(x).mean() + critic.weight.square().mean()
        second.zero_grad()
        loss.backward()
        second.step()
    return torch.cat([p.detach().flatten() for net in (generator, critic) for p in net.parameters()])


GOOD = """
    import json, warnings
    import torchmetrics

    folder, rank = os.environ["FOLDER"], int(os.environ.get("LOCAL_RANK", 0))
    results = {}
    X = torch.arange(96, dtype=torch.float32).reshape(32, 3).sin()
    Y = X @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1
    TWO = dict(QUIET, devices=2, strategy="ddp")

    def weights(module):
        return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()

    class Linear(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.layer = nn.Linear(3, 1)
            self.batches = 0

        def training_step(self, batch, batch_idx):
            self.batches += 1
            loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def shares(batch=2, rows=32):
        # rank r reads rows r, r + 2, ...: its batch of 2 and the other rank's are one stretch of 4 rows
        data = TensorDataset(X[:rows], Y[:rows])
        return DataLoader(data, batch, sampler=DistributedSampler(data, 2, rank, shuffle=False))

    # ---- the same weights as one process on the global batch

    module = Linear()
    trainer = L.Trainer(max_epochs=2, **TWO)
    trainer.fit(module, shares())
    results["plain"] = weights(module)
    results["steps"] = [trainer.global_step, trainer.current_epoch, trainer.world_size, trainer.num_training_batches]
    results["loss"] = [float(trainer.callback_metrics[name]) for name in ("loss_step", "loss_epoch", "loss")]

    module = Linear()
    L.Trainer(max_epochs=2, accumulate_grad_batches=3, **TWO).fit(module, shares())
    results["accumulate"] = weights(module)

    class Gan(L.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(7)
            self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            x = batch[0]
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            loss = -self.critic(self.generator(x)).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            loss = self.critic(self.generator(x).detach()).mean() - self.critic(x).mean()
            loss = loss + self.critic.weight.square().mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            self.untoggle_optimizer(second)

        def configure_optimizers(self):
            return [torch.optim.Adam(self.generator.parameters(), lr=0.05),
                    torch.optim.SGD(self.critic.parameters(), lr=0.1)]

    module = Gan()
    trainer = L.Trainer(max_epochs=1, **TWO)
    trainer.fit(module, shares())
    results["gan"] = weights(module)
    results["gan steps"] = trainer.global_step

    # ---- evaluation counts each sample once

    class Measures(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.mean_metric = torchmetrics.MeanMetric()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
            self.seen = []

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            value = batch[0].flatten()
            self.seen.extend(value.tolist())
            self.log("mean", value.mean(), sync_dist=True)
            self.log("unsynced", value.mean())
            self.log("largest", value.max(), reduce_fx="max", sync_dist=True)
            self.log("smallest", value.min(), reduce_fx="min", sync_dist=True)
            self.log("total", value.sum(), reduce_fx="sum", sync_dist=True)
            self.log("count", float(len(value)), reduce_fx="sum")
            self.log("step", value.sum(), reduce_fx="sum", on_step=True, on_epoch=False, sync_dist=True)
            self.mean_metric.update(value)
            self.log("metric", self.mean_metric)
            self.accuracy(value.long() % 3, torch.zeros_like(value).long())
            self.log("accuracy", self.accuracy)

        test_step = validation_step

        def on_validation_epoch_end(self):
            self.log("late", float(self.global_rank), sync_dist=True)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def numbers(n, batch=2):
        return DataLoader(TensorDataset(torch.arange(n, dtype=torch.float32).square().reshape(n, 1)), batch)

    for n in (11, 8, 1):
        module = Measures()
        (found,) = L.Trainer(**TWO).validate(module, numbers(n), verbose=False)
        results[f"validate {n}"] = found
        results[f"seen {n}"] = module.seen
    results["validate loaders"] = L.Trainer(**TWO).test(Measures(), [numbers(7, 3), numbers(1), numbers(2, 1)],
                                                         verbose=False)

    class Endless(IterableDataset):
        # rank 0 has 3 items, rank 1 has 5
        def __iter__(self):
            for i in range(3 if rank == 0 else 5):
                yield (torch.tensor([float(10 * rank + i)]),)

    (found,) = L.Trainer(**TWO).validate(Measures(), DataLoader(Endless(), batch_size=2), verbose=False)
    results["validate iterable"] = found

    # ---- one validation sample, so rank 1 has none: in the sanity check, inside fit, and for a checkpoint's monitor

    class One(Measures):
        def on_train_epoch_end(self):
            self.log("train_late", 1.0 + self.global_rank, sync_dist=True)

    best = ModelCheckpoint(dirpath=os.path.join(folder, "best"), monitor="mean", save_top_k=2, filename="{epoch}")
    trainer = L.Trainer(**{**TWO, "enable_checkpointing": True}, max_epochs=2, callbacks=[best])
    trainer.fit(One(), numbers(8), numbers(1))
    results["fit with one"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    results["best"] = sorted(os.path.basename(path) for path in best.best_k_models)

    # ---- uneven training data

    class Own(torch.utils.data.Sampler):
        def __len__(self):
            return 10 if rank == 0 else 6

        def __iter__(self):
            return iter(range(len(self)))

    module = Linear()
    trainer = L.Trainer(max_epochs=2, use_distributed_sampler=False, **TWO)
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=2, sampler=Own()))
    results["uneven sampler"] = [module.batches, trainer.global_step, trainer.num_training_batches, weights(module)]

    class Stream(IterableDataset):
        def __iter__(self):
            for i in range(4 if rank == 0 else 9):
                yield X[i], Y[i]

    module = Linear()
    trainer = L.Trainer(max_epochs=2, **TWO)
    trainer.fit(module, DataLoader(Stream(), batch_size=2))
    results["uneven stream"] = [module.batches, trainer.global_step, trainer.current_epoch, weights(module)]

    class SaysLength(Stream):
        def __len__(self):
            return 9

    module = Linear()
    trainer = L.Trainer(max_epochs=2, **TWO)
    trainer.fit(module, DataLoader(SaysLength(), batch_size=2))
    results["uneven with length"] = [module.batches, trainer.global_step, trainer.current_epoch, weights(module)]

    # ---- what ranks can ask each other, and what they need not ask

    class Asks(Linear):
        def on_train_start(self):
            gathered = self.all_gather({"rank": torch.tensor([self.global_rank]), "x": torch.ones(2, 3)})
            results["gathered"] = [gathered["rank"].tolist(), list(gathered["x"].shape)]
            mine = torch.tensor([1.0 + self.global_rank], requires_grad=True)
            (self.all_gather(mine, sync_grads=True).flatten() * torch.tensor([2.0, 3.0])).sum().backward()
            results["gathered grad"] = mine.grad.tolist()
            if self.global_rank == 0:  # alone
                results["log_dir"] = self.trainer.log_dir

    from leyden.loggers import CSVLogger
    trainer = L.Trainer(**{**TWO, "logger": CSVLogger(folder), "log_every_n_steps": 1}, max_epochs=1)
    trainer.fit(Asks(), shares())
    results["versions"] = trainer.strategy.comm.all_gather_object(trainer.logger.log_dir)
    found = trainer.predict(Predicts := type("P", (Linear,), {"predict_step": lambda self, b, i: b[0][:, 0]})(),
                            DataLoader(TensorDataset(X[:7], Y[:7]), 2))
    results["predicted"] = torch.cat(found).tolist()

    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(results, file)
    os.write(1, f"end of {rank}\\n".encode())  # whole lines, whoever writes at the same time
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What rank 0 and rank 1 found in one run of everything that goes well."""
    folder = tmp_path_factory.mktemp("good")
    path = rank_scripts.write_script(folder, GOOD)
    code, out, err = rank_scripts.run(path, FOLDER=str(folder))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["end of 0", "end of 1"]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def _close(found, expected):
    torch.testing.assert_close(torch.as_tensor(found), expected)


@pytest.mark.parametrize(("case", "accumulate"), [("plain", 1), ("accumulate", 3)])
def test_weights_are_those_of_one_process_on_the_global_batch(ranks, case, accumulate):
    assert ranks[0][case] == ranks[1][case]
    _close(ranks[0][case], _reference(accumulate=accumulate))


def test_gan_with_two_optimizers_trains_as_in_one_process(ranks):
    assert ranks[0]["gan"] == ranks[1]["gan"]
    _close(ranks[0]["gan"], _gan_reference())
    assert ranks[0]["gan steps"] == 16


def test_counters(ranks):
    assert ranks[0]["steps"] == ranks[1]["steps"] == [16, 2, 2, 8]


def test_training_loss_is_the_mean_over_ranks(ranks):
    # The second epoch again, in one process: the loss of each global batch before its step.
    layer = _linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        losses = []
        for first in range(0, 32, 4):
            loss = nn.functional.mse_loss(layer(X[first : first + 4]), Y[first : first + 4])
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    mean = torch.stack(losses).mean()
    assert ranks[0]["loss"] == ranks[1]["loss"]
    _close(ranks[0]["loss"], torch.stack([losses[-1], mean, mean]))


@pytest.mark.parametrize("n", [11, 8, 1])
def test_evaluation_counts_each_sample_once(ranks, n):
    values = torch.arange(n, dtype=torch.float32).square()
    for found in (rank[f"validate {n}"] for rank in ranks):
        correct = (values.long() % 3 == 0).float().mean()
        exact = {
            "mean": values.mean(),
            "unsynced": values.mean(),
            "largest": values.max(),
            "smallest": values.min(),
            "total": values.sum(),
            "count": torch.tensor(float(n)),
            "metric": values.mean(),
            "accuracy": correct,
        }
        for name, value in exact.items():
            assert found[name] == pytest.approx(float(value), rel=1e-6), name
        assert found["late"] == 0.5
        assert "step" not in found
    seen = sorted(ranks[0][f"seen {n}"] + ranks[1][f"seen {n}"])
    assert seen == values.tolist()


def test_several_loaders_are_exact_each(ranks):
    assert ranks[0]["validate loaders"] == ranks[1]["validate loaders"]
    for index, n in enumerate((7, 1, 2)):
        values = torch.arange(n, dtype=torch.float32).square()
        found = ranks[0]["validate loaders"][index]
        assert found[f"mean/dataloader_idx_{index}"] == pytest.approx(float(values.mean()))
        assert found[f"total/dataloader_idx_{index}"] == float(values.sum())
        assert found[f"largest/dataloader_idx_{index}"] == float(values.max())
        assert found[f"smallest/dataloader_idx_{index}"] == float(values.min())


def test_evaluation_of_streams_of_different_lengths(ranks):
    values = torch.tensor([0.0, 1, 2, 10, 11, 12, 13, 14])
    for rank in ranks:
        assert rank["validate iterable"]["mean"] == pytest.approx(float(values.mean()))
        assert rank["validate iterable"]["total"] == float(values.sum())


def test_rank_without_validation_data_inside_fit(ranks):
    for rank in ranks:
        found = rank["fit with one"]
        assert {name: found[name] for name in ("mean", "total", "count", "late", "train_late")} == {
            "mean": 0.0,
            "total": 0.0,
            "count": 1.0,
            "late": 0.5,
            "train_late": 1.5,
        }
        assert rank["best"] == ["epoch=0.ckpt", "epoch=1.ckpt"]


def test_uneven_training_data_ends_with_the_shortest(ranks):
    for case, batches in (("uneven sampler", 3), ("uneven stream", 2)):
        assert ranks[0][case][:2] == ranks[1][case][:2] == [2 * batches, 2 * batches]
        assert ranks[0][case][-1] == ranks[1][case][-1]
    assert ranks[0]["uneven sampler"][2] == 3
    assert ranks[0]["uneven stream"][2] == 2


def test_stream_that_is_shorter_than_it_says(ranks):
    assert ranks[0]["uneven with length"] == ranks[1]["uneven with length"]
    assert ranks[0]["uneven with length"][:3] == [4, 4, 2]


def test_all_gather_and_log_dir(ranks):
    assert ranks[0]["gathered"] == ranks[1]["gathered"] == [[[0], [1]], [2, 2, 3]]
    # d/dx of the sum over both ranks' losses 2 x0 + 3 x1
    assert [rank["gathered grad"] for rank in ranks] == [[4.0], [6.0]]
    assert ranks[0]["log_dir"].endswith("version_0")
    assert len(set(ranks[0]["versions"])) == 1


def test_predictions_are_this_ranks_share(ranks):
    assert ranks[0]["predicted"] == pytest.approx(X[:7:2, 0].tolist())
    assert ranks[1]["predicted"] == pytest.approx(X[1:7:2, 0].tolist())


# ---- other ways to start -------------------------------------------------------------------------------------------


class Linear(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_start(self):
        torch.set_num_threads(1)  # a pool of threads that this process used can't be used again after a fork

    def train_dataloader(self):
        data = TensorDataset(X, Y)
        return DataLoader(data, 2, sampler=DistributedSampler(data, 2, self.global_rank, shuffle=False))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_weights_come_back_from_worker_processes(method, tmp_path):
    module = Linear()
    trainer = L.Trainer(devices=2, strategy=f"ddp_{method}", max_epochs=2, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module)
    _close(torch.cat([p.detach().flatten() for p in module.parameters()]), _reference())
    assert trainer.state.finished
    assert set(trainer.callback_metrics) == {"loss", "loss_step", "loss_epoch"}


TORCHRUN = """
    class Linear(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(max_epochs=1, devices="auto", strategy="ddp", **QUIET)
    module = Linear()
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 3)), 2))
    weights = trainer.strategy.comm.all_gather_object(module.layer.weight.tolist())
    found = f"world {trainer.world_size} {trainer.num_training_batches} {weights[0] == weights[1]}\\n"
    os.write(1, found.encode())
    if CASE == "fail" and trainer.global_rank == 1:
        raise ValueError("the reason")
"""


def _torchrun(path, *arguments):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path.name, *arguments]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=rank_scripts.environment(),
        cwd=path.parent,
        check=False,
    )


def test_torchrun_starts_the_processes(tmp_path):
    done = _torchrun(rank_scripts.write_script(tmp_path, TORCHRUN))
    assert done.stdout.count("world 2 2 True") == 2
    # torch 2.13 itself: one in five runs of a script with nothing but init_process_group aborts at exit in this way.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr


# ---- ranks that log different names --------------------------------------------------------------------------------


class LogsApart(Linear):
    """Rank 0 or rank 1 logs something that the other does not; ``case`` says where and when."""

    def __init__(self, case):
        super().__init__()
        self.case = case

    def training_step(self, batch, batch_idx):
        loss = (
            super().training_step(batch, batch_idx) if self.case != "first ever, late" else self.layer(batch[0]).mean()
        )
        first, late = self.global_rank == 0, batch_idx >= 3
        if (
            (self.case == "from the start" and first)
            or (self.case == "more, later" and not first and late)
            or (self.case == "first ever, late" and first and late)
        ):
            self.log("apart", 1.0, sync_dist=True)
        if self.case == "less, later" and not (late and first):
            self.log("apart", 1.0, sync_dist=True, reduce_fx="max")
        if self.case == "of the epoch" and first:
            self.log("apart", 1.0, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.case == "in a hook" and self.global_rank == 1 and batch_idx == 2:
            self.log("apart", 1.0, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        if self.case == "in validation" and self.global_rank == 1:
            self.log("apart", 1.0, sync_dist=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(X), 4)


@pytest.mark.parametrize(
    ("case", "having", "lacking"),
    [
        ("from the start", 0, 1),
        ("more, later", 1, 0),
        ("less, later", 1, 0),
        ("first ever, late", 0, 1),
        ("in a hook", 1, 0),
        ("of the epoch", 0, 1),
        ("in validation", 1, 0),
    ],
)
def test_ranks_that_log_different_names_are_told(case, having, lacking, monkeypatch):
    from datetime import timedelta

    from leyden.loops.step_sync import StepSync

    monkeypatch.setattr(StepSync, "PATIENCE", timedelta(seconds=1))
    trainer = L.Trainer(devices=2, strategy="ddp_fork", max_epochs=1, num_sanity_val_steps=0, **QUIET)
    began = time.monotonic()
    with pytest.raises(Exception, match="ranks logged different names with sync_dist=True") as caught:
        trainer.fit(LogsApart(case))
    assert f"logged on ranks [{having}], not on ranks [{lacking}]" in str(caught.value)
    assert "'apart'" in str(caught.value)
    assert time.monotonic() - began < 40


class LogsTogether(Linear):
    """Names that change from step to step, but on all ranks alike, in all reductions."""

    def training_step(self, batch, batch_idx):
        mine = 1.0 + self.global_rank + 10 * batch_idx
        for kind in ("sum", "min", "max", "mean"):
            self.log(kind, mine, reduce_fx=kind, sync_dist=True)
        if batch_idx % 3 == 2:
            self.log("sometimes", torch.tensor(mine, dtype=torch.float64), sync_dist=True)
        return self.layer(batch[0]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        base = 10 * batch_idx
        found = {name: float(self.trainer.callback_metrics[name]) for name in ("sum", "min", "max", "mean")}
        assert found == {"sum": 3 + 2 * base, "min": 1 + base, "max": 2 + base, "mean": 1.5 + base}
        last = base - 10 * ((batch_idx + 1) % 3)
        if last >= 0:
            assert float(self.trainer.callback_metrics["sometimes"]) == 1.5 + last
            assert self.trainer.callback_metrics["sometimes"].dtype == torch.float64
        if batch_idx > 4:
            self.log("of a hook", float(self.global_rank), sync_dist=True)

    def on_train_end(self):
        assert float(self.trainer.callback_metrics["of a hook"]) == 0.5


def test_step_values_are_reduced_at_each_step():
    L.Trainer(devices=2, strategy="ddp_fork", max_epochs=2, **QUIET).fit(LogsTogether())


# ---- processes that fail -------------------------------------------------------------------------------------------

FAIL = """
    from leyden.callbacks import OnExceptionCheckpoint

    class Fails(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                if CASE == "child fails" and self.global_rank == 1:
                    raise ValueError("the reason")
                if CASE == "parent fails" and self.global_rank == 0:
                    raise ValueError("the reason")
                if CASE == "child exits" and self.global_rank == 1:
                    os._exit(7)
            return self.layer(batch[0]).mean()

        def setup(self, stage):
            if CASE == "child fails in setup" and self.global_rank == 1:
                raise ValueError("the reason")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Notes(Callback):
        def on_exception(self, trainer, module, error):
            os.write(1, f"noted {trainer.global_rank} {type(error).__name__}\\n".encode())

    os.write(1, f"pid {os.getpid()}\\n".encode())
    callbacks = [Notes(), OnExceptionCheckpoint("saved"),
                 ModelCheckpoint(dirpath="best", save_on_exception=True, save_last=True)]
    quiet = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(max_epochs=1, devices=2, strategy="ddp", callbacks=callbacks, **quiet)
    trainer.fit(Fails(), DataLoader(TensorDataset(torch.ones(24, 3)), 2))
"""


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("child fails", 1, "ValueError: the reason"),
        ("parent fails", 1, "ValueError: the reason"),
        ("child exits", 7, "failed with exit code 7"),
        ("child fails in setup", 1, "ValueError: the reason"),
    ],
)
def test_failing_rank_ends_all_soon(tmp_path, case, code, message):
    process = rank_scripts.start(rank_scripts.write_script(tmp_path, FAIL), case)
    found, out, err = rank_scripts.finish(process, 60)
    assert found == code, err
    assert message in err
    lines = out.splitlines()
    pids = [int(line.split()[1]) for line in lines if line.startswith("pid")]
    assert len(pids) == 2
    assert rank_scripts.none_left(pids)
    if case == "child fails":  # each rank was told, and saved what it could
        assert {"noted 0 WorkerFailedError", "noted 1 ValueError"} <= set(lines)
    if case == "parent fails":
        assert "noted 0 ValueError" in lines
    if "setup" not in case:
        saved = torch.load(tmp_path / "saved" / "on_exception.ckpt", weights_only=True)
        assert saved["global_step"] == 2
