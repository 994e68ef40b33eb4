"""Runs that don't end by themselves: signals, errors, processes that are killed."""

import os
import signal
import sys
import time

import pytest
import rank_scripts
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leyden as L
from leyden.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from leyden.loggers import Logger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and process groups as on Linux")

SCRIPT = """
    from leyden.callbacks import OnExceptionCheckpoint
    from leyden.loggers import CSVLogger

    case, devices = sys.argv[1], int(sys.argv[2])

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: whole lines from all processes

    class Slow(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                say("training", self.global_rank, os.getpid())
            if case == "validation":
                return self.layer(batch[0]).mean()
            time.sleep(0.02)
            loss = self.layer(batch[0]).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            if batch_idx == 5:
                say("validating", self.global_rank, os.getpid())
            time.sleep(0.02)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Notes(Callback):
        def setup(self, trainer, module, stage):
            say("pid", trainer.global_rank, os.getpid())

        def on_exception(self, trainer, module, error):
            say("exception", trainer.global_rank, type(error).__name__, trainer.interrupted)

        def teardown(self, trainer, module, stage):
            say("teardown", trainer.global_rank)

    class Noted(CSVLogger):
        def finalize(self, status):
            say("finalize", status)
            super().finalize(status)

    callbacks = [Notes(), OnExceptionCheckpoint("saved")]
    strategy = "auto" if devices == 1 else "ddp_fork" if case == "fork" else "ddp"
    options = {**QUIET, "logger": Noted("logs"), "log_every_n_steps": 1, "enable_checkpointing": True}
    trainer = L.Trainer(**options, max_epochs=3, devices=devices, num_sanity_val_steps=0, callbacks=callbacks,
                        strategy=strategy)
    long = DataLoader(TensorDataset(torch.ones(2000, 3)), 1)
    data = DataLoader(TensorDataset(torch.ones(16, 3)), 1) if case == "validation" else long
    trainer.fit(Slow(), data, long if case == "validation" else None)
    say("over", trainer.global_rank)
"""


class Running:
    """A script that has come to its training (or validation)."""

    def __init__(self, folder, case, devices, wait_for="training"):
        self.folder = folder
        self.process = rank_scripts.start(rank_scripts.write_script(folder, SCRIPT), case, devices)
        self.lines = []
        self.pids = {}
        deadline = time.monotonic() + 90
        while len(self.pids) < devices or len([line for line in self.lines if line[0] == wait_for]) < devices:
            line = self.process.stdout.readline().split()
            assert line, f"the script ended: {self.process.communicate()[1]}"
            assert time.monotonic() < deadline
            self.lines.append(line)
            if line[0] == "pid":
                self.pids[int(line[1])] = int(line[2])

    def end(self, seconds=20):
        """Waits for the end; sets ``code``, ``err``, ``said`` and ``took``."""
        began = time.monotonic()
        self.code, out, self.err = rank_scripts.finish(self.process, seconds)
        self.took = time.monotonic() - began
        self.said = [line.split() for line in out.splitlines()]
        assert rank_scripts.none_left(self.pids.values())

    def loggers(self):
        return [line[1] for line in self.said if line[0] == "finalize"]

    def exceptions(self):
        return sorted(line[1:] for line in self.said if line[0] == "exception")


def _whole_checkpoint(folder):
    """The checkpoint that was saved on the way out, and how many steps it and the log file know of."""
    assert [path.name for path in (folder / "saved").iterdir()] == ["on_exception.ckpt"]  # and no half one beside it
    checkpoint = torch.load(folder / "saved" / "on_exception.ckpt", weights_only=True)
    module = nn.ModuleDict({"layer": nn.Linear(3, 1)})
    module.load_state_dict(checkpoint["state_dict"])
    return checkpoint


def _logged_steps(folder):
    rows = (folder / "logs" / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    return len(rows) - 1


@pytest.mark.parametrize("devices", [1, 2])
def test_sigterm_ends_training_in_good_order(tmp_path, devices):
    running = Running(tmp_path, "train", devices)
    os.kill(running.process.pid, signal.SIGTERM)
    running.end()
    assert running.code == 143, running.err
    assert running.took < 10
    assert running.exceptions() == [[str(rank), "SIGTERMException", "True"] for rank in range(devices)]
    assert running.loggers() == ["failed"] * devices
    assert not [line for line in running.said if line[0] in ("teardown", "over")]
    checkpoint = _whole_checkpoint(tmp_path)
    assert checkpoint["global_step"] >= 5
    # Saved at a batch's end: every step that was trained was logged, and none is lost.
    assert _logged_steps(tmp_path) == checkpoint["global_step"]


def test_sigterm_of_the_whole_group_as_a_scheduler_sends_it(tmp_path):
    running = Running(tmp_path, "train", 2)
    os.killpg(running.process.pid, signal.SIGTERM)
    running.end()
    assert running.code == 143, running.err
    assert running.exceptions() == [["0", "SIGTERMException", "True"], ["1", "SIGTERMException", "True"]]
    _whole_checkpoint(tmp_path)


def test_sigterm_during_validation_inside_fit(tmp_path):
    running = Running(tmp_path, "validation", 1, wait_for="validating")
    os.kill(running.process.pid, signal.SIGTERM)
    running.end()
    assert running.code == 143, running.err
    assert running.exceptions() == [["0", "SIGTERMException", "True"]]
    assert _whole_checkpoint(tmp_path)["global_step"] == 16


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c(tmp_path, devices):
    running = Running(tmp_path, "train", devices)
    os.killpg(running.process.pid, signal.SIGINT)  # a terminal sends it to all
    running.end()
    assert running.code == 130, running.err
    assert running.took < 10
    assert ["0", "KeyboardInterrupt", "True"] in running.exceptions()
    assert "failed" in running.loggers()
    assert _whole_checkpoint(tmp_path)["global_step"] >= 5
    assert "Traceback" not in running.err


def test_sigint_for_rank_zero_alone(tmp_path):
    running = Running(tmp_path, "train", 2)
    os.kill(running.process.pid, signal.SIGINT)
    running.end()
    assert running.code == 130, running.err
    assert running.took < 10
    assert ["0", "KeyboardInterrupt", "True"] in running.exceptions()
    _whole_checkpoint(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_for_the_parent_of_worker_processes(tmp_path, number):
    running = Running(tmp_path, "fork", 2)
    os.kill(running.process.pid, number)
    running.end()
    assert running.took < 10
    assert running.code == (130 if number == signal.SIGINT else -number), running.err


def test_killed_child_is_noticed(tmp_path):
    running = Running(tmp_path, "train", 2)
    os.kill(running.pids[1], signal.SIGKILL)
    running.end()
    assert running.code == 137, running.err
    assert running.took < 10
    assert "was killed by SIGKILL (out of memory?)" in running.err
    assert running.exceptions() == [["0", "WorkerFailedError", "True"]]
    _whole_checkpoint(tmp_path)


def test_killed_parent_takes_its_children_along(tmp_path):
    running = Running(tmp_path, "train", 2)
    os.kill(running.process.pid, signal.SIGKILL)
    assert rank_scripts.none_left(running.pids.values())
    running.end()
    assert running.code == -signal.SIGKILL


# ---- errors in this process ----------------------------------------------------------------------------------------


class Notes(Callback):
    def __init__(self):
        self.seen = []

    def on_exception(self, trainer, pl_module, exception):
        self.seen.append((trainer.state.status.value, exception))

    def teardown(self, trainer, pl_module, stage):
        self.seen.append("teardown")


class NotesStatus(Logger):
    def __init__(self):
        super().__init__()
        self.status = []

    name, version = "notes", 0

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params, *args, **kwargs): ...

    def finalize(self, status):
        self.status.append(status)


class Breaks(L.LightningModule):
    def __init__(self, where):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.where = where

    def _maybe(self, place):
        if place == self.where:
            raise ZeroDivisionError(f"in {place}")

    def setup(self, stage):
        self._maybe("setup")

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self._maybe("training_step")
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self._maybe("sanity check" if self.trainer.sanity_checking else "validation_step")

    def on_train_epoch_end(self):
        self._maybe("on_train_epoch_end")

    def configure_optimizers(self):
        self._maybe("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(rows=8):
    return DataLoader(TensorDataset(torch.ones(rows, 3)), 2)


def _trainer(folder, *callbacks, **more):
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **more})


@pytest.mark.parametrize(
    "where",
    ["setup", "configure_optimizers", "sanity check", "training_step", "validation_step", "on_train_epoch_end"],
)
def test_error_in_a_hook(tmp_path, where):
    notes, logger = Notes(), NotesStatus()
    trainer = _trainer(tmp_path, notes, logger=logger, enable_checkpointing=False)
    before = signal.getsignal(signal.SIGTERM)
    module = Breaks(where)
    module.layer.eval()
    with pytest.raises(ZeroDivisionError, match=f"in {where}") as caught:
        trainer.fit(module, _loader(), _loader())
    frames = [entry.name for entry in caught.traceback]
    assert frames[-1] == "_maybe"
    assert where.replace("sanity check", "validation_step") in frames
    assert notes.seen == [("interrupted", caught.value)]  # and no teardown
    assert logger.status == ["failed"]
    assert trainer.interrupted
    assert signal.getsignal(signal.SIGTERM) is before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_trainer_can_be_used_again_after_an_error(tmp_path):
    trainer = _trainer(tmp_path, logger=False, enable_checkpointing=False, max_epochs=1)
    module = Breaks("training_step")
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, _loader())
    module.where = ""
    trainer.validate(module, _loader(), verbose=False)
    assert trainer.state.finished


def test_failing_on_exception_hook_does_not_hide_the_error(tmp_path):
    class Worse(Callback):
        def on_exception(self, trainer, pl_module, exception):
            raise RuntimeError("worse")

    logger = NotesStatus()
    with pytest.raises(ZeroDivisionError):
        _trainer(tmp_path, Worse(), logger=logger).fit(Breaks("training_step"), _loader())
    assert logger.status == ["failed"]


def test_checkpoints_of_an_error_are_whole(tmp_path):
    saved = OnExceptionCheckpoint(tmp_path / "a")
    best = ModelCheckpoint(tmp_path / "b", save_on_exception=True)
    trainer = _trainer(tmp_path, saved, best, logger=False, enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Breaks("training_step"), _loader())
    files = [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]
    assert [path.name for path in files] == ["on_exception.ckpt", "epoch=0-step=2.ckpt"]
    for path in files:
        assert torch.load(path, weights_only=True)["global_step"] == 2


def test_error_in_validate_test_and_predict(tmp_path):
    notes = Notes()
    trainer = _trainer(tmp_path, notes, logger=False, enable_checkpointing=False)
    with pytest.raises(ZeroDivisionError):
        trainer.validate(Breaks("validation_step"), _loader())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert len(notes.seen) == 1


def test_keyboard_interrupt_in_this_process_is_exit_130(tmp_path):
    class Interrupts(Breaks):
        def training_step(self, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGINT)
            return super().training_step(batch, batch_idx)

    notes, logger = Notes(), NotesStatus()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        _trainer(tmp_path, notes, logger=logger, enable_checkpointing=False).fit(Interrupts(""), _loader())
    assert caught.value.code == 130
    assert isinstance(notes.seen[0][1], KeyboardInterrupt)
    assert logger.status == ["failed"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_sigterm_handler_of_the_user_is_called_too(tmp_path):
    class Terminates(Breaks):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        trainer = _trainer(tmp_path, logger=False, enable_checkpointing=False)
        with pytest.raises(SystemExit) as caught:
            trainer.fit(Terminates(""), _loader())
        assert caught.value.code == 143
        assert called == [signal.SIGTERM]
        assert trainer.global_step == 2
        assert trainer.received_sigterm
    finally:
        signal.signal(signal.SIGTERM, before)
