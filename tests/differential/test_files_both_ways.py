"""A checkpoint that one root wrote must work in the other: to go on training, to evaluate, to load by hand.

The measure is the writing root's own run, had it never stopped: the other root, going on from the file, has to see the
same batches and to end with the same weights, bit for bit.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from differential.harness import OTHER, REFERENCE, load_root, run_script
from differential.nets import StatefulLoader, loader, net_class, quiet_trainer
from differential.record import Record
from differential.scripts.resume import resumable, saving_callback
from differential.tracing import sub

WAYS = [(REFERENCE, OTHER), (OTHER, REFERENCE)] if OTHER != REFERENCE else [(REFERENCE, REFERENCE)]
# The names of the roots must not get into the names of folders, where the record would take them out.
pytestmark = pytest.mark.parametrize(
    ("writer", "reader"), WAYS, ids=["from the reference", "to the reference"][: len(WAYS)]
)

PLAIN: Callable[[], Any] = lambda: loader(12)  # noqa: E731
STATEFUL: Callable[[], Any] = lambda: StatefulLoader(list(loader(12)))  # noqa: E731


def _plain_adam(L: ModuleType) -> Any:
    return resumable(L)


def _two_optimizers(L: ModuleType) -> Any:
    """Manual mode: two optimizers of different kinds that step at different rates."""

    class Manual(resumable(L)):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(("train", self.current_epoch, batch_idx, self.global_step, float(batch[0].sum())))
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            first.step()
            first.zero_grad()
            if batch_idx % 2:
                second.step()
                second.zero_grad()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            first = torch.optim.Adam(self.layer[0].parameters(), lr=0.05)
            second = torch.optim.SGD(self.layer[2].parameters(), lr=0.05, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)]

    return Manual


def _plateau(L: ModuleType) -> Any:
    """A scheduler whose state depends on validation results."""

    class Plateau(resumable(L)):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.RMSprop(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    return Plateau


@dataclass(frozen=True)
class Place:
    """Where in a run the file is written: in ``hook``, when ``global_step`` is ``step``."""

    hook: str
    step: int
    make: Callable[[], Any] = PLAIN
    module: Callable[[ModuleType], Any] = _plain_adam
    trainer: tuple[tuple[str, Any], ...] = ()
    # Lightning itself does not get back to its unbroken run from here: the measure for it as a reader is what it makes
    # of its own file. Leyden as a reader is measured by the unbroken run all the same.
    lightning_is_inexact: bool = False


PLACES = {
    "epoch end": Place("epoch end", 6),
    "second epoch end": Place("epoch end", 12),
    "validation at the epoch's end": Place("validation end", 6),
    # Lightning forgets the validation that was due.
    "last batch": Place("batch end", 6, lightning_is_inexact=True),
    "mid epoch": Place("batch end", 2, STATEFUL),
    "mid second epoch": Place("batch end", 9, STATEFUL),
    "mid epoch after validation": Place("validation end", 3, STATEFUL, trainer=(("val_check_interval", 3),)),
    "accumulation": Place("epoch end", 3, trainer=(("accumulate_grad_batches", 2),)),
    "accumulation, mid epoch": Place("batch end", 2, STATEFUL, trainer=(("accumulate_grad_batches", 2),)),
    "two optimizers": Place("epoch end", 9, module=_two_optimizers),
    "two optimizers, mid epoch": Place("batch end", 12, STATEFUL, module=_two_optimizers),
    # Not at an epoch's end: there Lightning writes the file before the scheduler's step, whose metric is not in it.
    # Here it leaves out the scheduler's step at the end of the epoch that it went on with.
    "plateau": Place("batch end", 8, STATEFUL, module=_plateau, lightning_is_inexact=True),
    # Lightning starts the data over, with the batches that are left to be counted.
    "mid epoch, ordinary loader": Place("batch end", 2, lightning_is_inexact=True),
    "bf16-mixed": Place("epoch end", 6, trainer=(("precision", "bf16-mixed"),)),
    "clipping": Place("epoch end", 6, trainer=(("gradient_clip_val", 0.1),)),
}


def _write(root: str, place: Place, folder: Path) -> tuple[Path, Any]:
    """Runs three epochs without a break, writes a file on the way, and gives its path and the module at the end."""
    path = folder / "written.ckpt"
    kept: list[Any] = []

    def run(L: Any, tmp: Path, rec: Record) -> None:
        module = place.module(L)()
        saver = saving_callback(L, path, place.hook, place.step)
        trainer = quiet_trainer(L, tmp, max_epochs=3, callbacks=[saver], **dict(place.trainer))
        trainer.fit(module, place.make(), loader(4, seed=2))
        kept.append(module)
        rec.fact("done", True)

    run_script(run, load_root(root), folder / "writing")
    return path, kept[0]


def _continue(root: str, place: Place, path: Path, folder: Path) -> Any:
    """Goes on from a file and gives the module at the end."""
    kept: list[Any] = []

    def run(L: Any, tmp: Path, rec: Record) -> None:
        module = place.module(L)()
        trainer = quiet_trainer(L, tmp, max_epochs=3, **dict(place.trainer))
        trainer.fit(module, place.make(), loader(4, seed=2), ckpt_path=str(path))
        kept.append(module)
        rec.fact("done", True)

    run_script(run, load_root(root), folder / "reading")
    return kept[0]


def _assert_same_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    expected, actual = left.state_dict(), right.state_dict()
    assert list(expected) == list(actual)
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), f"{name}: {value} != {actual[name]}"


@pytest.mark.parametrize("name", PLACES)
def test_training_goes_on(name: str, writer: str, reader: str, tmp_path: Path) -> None:
    place = PLACES[name]
    path, whole = _write(writer, place, tmp_path)
    resumed = _continue(reader, place, path, tmp_path)
    rest = whole.seen[len(whole.seen) - len(resumed.seen) :]
    if place.lightning_is_inexact and reader == REFERENCE:
        own, _ = _write(REFERENCE, place, tmp_path / "own")
        whole = _continue(REFERENCE, place, own, tmp_path / "own")
        rest = whole.seen
    assert resumed.seen
    assert resumed.seen == rest
    assert next(step[3] for step in resumed.seen if step[0] == "train") == place.step, "went on from another step"
    _assert_same_weights(whole, resumed)


def test_a_finished_run_is_prolonged(writer: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "finished.ckpt"
    ends: list[Any] = []

    def write(L: Any, tmp: Path, rec: Record) -> None:
        trainer = quiet_trainer(L, tmp, max_epochs=2)
        trainer.fit(resumable(L)(), loader(8), loader(4))
        trainer.save_checkpoint(path)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(trainer.lightning_module, loader(8), loader(4))
        rec.fact("step", trainer.global_step)

    def read(L: Any, tmp: Path, rec: Record) -> None:
        trainer = quiet_trainer(L, tmp, max_epochs=3)
        module = resumable(L)()
        trainer.fit(module, loader(8), loader(4), ckpt_path=path)
        rec.fact("step", [trainer.global_step, trainer.current_epoch])
        rec.fact("first", module.seen[0][:4])
        ends.append(module)

    run_script(write, load_root(writer), tmp_path / "writing")
    record = run_script(read, load_root(reader), tmp_path / "reading")
    assert record.facts["step"] == [12, 3]
    assert record.facts["first"] == {"tuple": ["train", 2, 0, 8]}
    straight = run_script(read, load_root(writer), tmp_path / "again")
    assert straight.facts == record.facts
    _assert_same_weights(ends[1], ends[0])


def test_evaluation(writer: str, reader: str, tmp_path: Path) -> None:
    """validate, test and predict with ``ckpt_path``, and the same by hand with `load_from_checkpoint`."""
    path = tmp_path / "trained.ckpt"

    def evaluate(L: Any, tmp: Path, rec: Record) -> None:
        data = loader(6, seed=5)
        for stage in ("validate", "test", "predict"):
            trainer = quiet_trainer(L, tmp)
            rec.fact(stage, getattr(trainer, stage)(resumable(L)(), data, ckpt_path=str(path)))
        loaded = resumable(L).load_from_checkpoint(path)
        rec.weights(loaded)
        rec.fact("hparams", dict(loaded.hparams))
        rec.fact("lr", loaded.lr)
        rec.fact("by hand", quiet_trainer(L, tmp).test(loaded, data))
        rec.fact("changed", dict(resumable(L).load_from_checkpoint(path, lr=3.0).hparams))

    def write(L: Any, tmp: Path, rec: Record) -> None:
        trainer = quiet_trainer(L, tmp, max_epochs=2)
        trainer.fit(resumable(L)(lr=0.02, extra={"deep": [1, (2, None)]}), loader(8), loader(4))
        trainer.save_checkpoint(path)
        evaluate(L, tmp, rec)

    written = run_script(write, load_root(writer), tmp_path / "writing")
    read = run_script(evaluate, load_root(reader), tmp_path / "reading")
    assert read.facts == written.facts
    assert written.facts["hparams"]["lr"] == 0.02


def test_callbacks_go_on(writer: str, reader: str, tmp_path: Path) -> None:
    """Early stopping and best checkpoints of the writing root are known to the reading one; "last" finds its file."""
    values = [0.5, 0.4, 0.6, 0.3, 0.7, 0.8, 0.9, 0.9]

    def run(folder: Path, epochs: int, ckpt_path: str | None) -> Callable[[Any, Path, Record], None]:
        def fit(L: Any, tmp: Path, rec: Record) -> None:
            class Scored(net_class(L)):
                def on_train_epoch_end(self) -> None:
                    self.log("score", values[self.current_epoch])

            stop = sub(L, "callbacks").EarlyStopping("score", patience=3)
            saver = sub(L, "callbacks").ModelCheckpoint(folder, monitor="score", save_top_k=2, save_last=True)
            trainer = quiet_trainer(L, tmp, callbacks=[stop, saver], max_epochs=epochs)
            trainer.fit(Scored(), loader(4), ckpt_path=ckpt_path)
            rec.fact("stop", {**stop.state_dict(), "stopping_reason_message": None})
            best = {
                name: getattr(saver, name)
                for name in ("best_model_path", "best_model_score", "kth_value", "best_k_models")
            }
            rec.fact("saver", best)
            rec.files(folder)
            rec.result(trainer)
            # The folder is not the run's own, so its name has to be taken out by hand.
            rec.facts = json.loads(json.dumps(rec.facts).replace(str(folder), "<saved>"))

        return fit

    crossed, straight = tmp_path / "crossed", tmp_path / "straight"
    run_script(run(crossed, 3, None), load_root(writer), tmp_path / "1")
    record = run_script(run(crossed, 8, "last"), load_root(reader), tmp_path / "2")
    expected = run_script(run(straight, 8, None), load_root(writer), tmp_path / "3")
    assert record.facts == expected.facts
    assert record.facts["stop"]["stopped_epoch"] == 6


def test_datamodule_and_weights_only(writer: str, reader: str, tmp_path: Path) -> None:
    """Hyper-parameters and state of a datamodule; a file with weights only."""
    path, weights = tmp_path / "all.ckpt", tmp_path / "weights.ckpt"

    def data_class(L: Any) -> Any:
        class Data(L.LightningDataModule):
            def __init__(self, size: int = 4) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.state: Any = None

            def train_dataloader(self) -> Any:
                return loader(self.hparams.size)

            def state_dict(self) -> dict[str, Any]:
                return {"position": 7}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                self.state = state_dict

        return Data

    def write(L: Any, tmp: Path, rec: Record) -> None:
        trainer = quiet_trainer(L, tmp)
        trainer.fit(resumable(L)(), datamodule=data_class(L)(6))
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(weights, weights_only=True)
        rec.weights(trainer.lightning_module)

    def read(L: Any, tmp: Path, rec: Record) -> None:
        rec.fact("hparams", dict(data_class(L).load_from_checkpoint(path).hparams))
        data = data_class(L)(6)
        trainer = quiet_trainer(L, tmp, max_epochs=2)
        trainer.fit(resumable(L)(), datamodule=data, ckpt_path=str(path))
        rec.fact("state", data.state)
        rec.fact("step", trainer.global_step)
        rec.weights(resumable(L).load_from_checkpoint(weights))

    written = run_script(write, load_root(writer), tmp_path / "writing")
    record = run_script(read, load_root(reader), tmp_path / "reading")
    assert record.facts["hparams"] == {"size": 6}
    assert record.facts["state"] == {"position": 7}
    assert record.facts["step"] == 6
    assert record.facts["weights"] == written.facts["weights"]
