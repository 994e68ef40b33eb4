"""Proves that the comparison sees differences: a reference that is bent a little must not pass for the real one."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from differential.compare import Mismatch, diff_values, unexplained
from differential.differences import Difference
from differential.harness import REFERENCE, SCRIPTS, compare_roots, load_root, run_script
from differential.record import Record, plain
from differential.scripts import load_all
from differential.tracing import sub

load_all()


@contextlib.contextmanager
def _bent(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original, own = getattr(owner, name), name in owner.__dict__
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _nudged_step(original: Any) -> Any:
    """One unit in the last place of one weight after each update."""

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with torch.no_grad():
            weight = next(self.parameters())
            weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(10.0))
        return result

    return optimizer_step


def _swallowed(original: Any) -> Any:
    return lambda self, *args, **kwargs: None


def _renamed_metric(original: Any) -> Any:
    return lambda self, name, *args, **kwargs: original(self, f"{name}_", *args, **kwargs)


def _nudged_metric(original: Any) -> Any:
    return lambda self, name, value, *args, **kwargs: original(self, name, value * (1 + 1e-6), *args, **kwargs)


def _fixed_step(original: Any) -> Any:
    return lambda self, metrics, step=None: original(self, metrics=metrics, step=5)


def _renamed_file(original: Any) -> Any:
    return lambda self, *args, **kwargs: original(self, *args, **kwargs).replace("epoch", "Epoch")


def _forgetful_checkpoint(original: Any) -> Any:
    def dump(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = original(self, *args, **kwargs)
        checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"] += 1
        return checkpoint

    return dump


def _other_error(original: Any) -> Any:
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as failure:
            raise RuntimeError(str(failure)) from failure

    return log


def _bends() -> dict[str, tuple[str, Any, str, Callable[[Any], Any], str]]:
    """Name: script, class, method, how it is bent, and where that must show."""
    L = load_root(REFERENCE)
    module, trainer = L.LightningModule, L.Trainer
    saver = sub(L, "callbacks").ModelCheckpoint
    connector = sub(L, "trainer.connectors.checkpoint_connector")._CheckpointConnector
    loop = sub(L, "loops.training_epoch_loop")._TrainingEpochLoop
    logger = sub(L, "loggers").CSVLogger
    return {
        "weights": ("hook_order_fit", module, "optimizer_step", _nudged_step, "facts/weights/*"),
        "missing hook": ("hook_order_fit", trainer, "_run_sanity_check", _swallowed, "trace/-/*on_sanity_check_start*"),
        "metric name": ("accumulation", module, "log", _renamed_metric, "facts/*train_loss_*"),
        "metric value": ("accumulation", module, "log", _nudged_metric, "facts/*callback_metrics/train_loss/values/0"),
        "file name": ("checkpoint_default", saver, "format_checkpoint_name", _renamed_file, "facts/files/*"),
        "file content": ("checkpoint_default", connector, "dump_checkpoint", _forgetful_checkpoint, "*completed"),
        "steps": ("accumulation", loop, "_should_accumulate", lambda original: lambda self: False, "*global_step"),
        "rows": ("log_step_axis", logger, "log_metrics", _fixed_step, "facts/csv/*"),
        "error": ("log_misuse", module, "log", _other_error, "facts/both off/raises"),
    }


@pytest.mark.parametrize("bend", list(_bends()))
def test_a_bent_reference_is_caught(bend: str, tmp_path: Path) -> None:
    name, owner, method, make, where = _bends()[bend]
    root, function = load_root(REFERENCE), SCRIPTS[name].function
    straight = run_script(function, root, tmp_path / "straight")
    with _bent(owner, method, make):
        bent = run_script(function, root, tmp_path / "bent")
    mismatches = compare_roots(straight, bent)
    # `unexplained` with an entry for that place tells whether the mismatch is where it belongs.
    entry = Difference(name, where, "made on purpose by this test")
    _, stale = unexplained(name, mismatches, (entry,))
    assert mismatches
    assert not stale, f"nothing at {where}, only {[mismatch.path for mismatch in mismatches][:10]}"


@pytest.mark.parametrize("name", ["hook_order_fit", "checkpoint_content", "resume_mid_epoch", "log_both_flags"])
def test_the_reference_equals_itself(name: str, tmp_path: Path) -> None:
    root, function = load_root(REFERENCE), SCRIPTS[name].function
    first, second = (run_script(function, root, tmp_path / number) for number in ("1", "2"))
    assert compare_roots(first, second) == []


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (True, 1),
        ({"a": 1}, {}),
        ([1], [1, 2]),
        ("nan", 1.0),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.tensor(0.1), torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))),
        ((1, 2), [1, 2]),
        (float("inf"), float("-inf")),
    ],
)
def test_values_that_differ(left: Any, right: Any) -> None:
    assert list(diff_values(plain(left), plain(right)))
    assert not list(diff_values(plain(left), plain(left)))


def test_errors_are_compared_by_family(tmp_path: Path) -> None:
    class Finer(KeyError):
        pass

    def failing(error: BaseException) -> Callable[[], None]:
        def fail() -> None:
            raise error

        return fail

    def recorded(error: BaseException) -> Any:
        record = Record(tmp_path, REFERENCE)
        record.error("x", failing(error), names=("value",))
        return record.facts

    long = KeyError("a long explanation with the value in it")
    assert not list(diff_values(recorded(long), recorded(Finer("another explanation of the value"))))
    assert list(diff_values(recorded(long), recorded(ValueError("another explanation of the value"))))
    assert list(diff_values(recorded(long), recorded(Finer("what is missing here is the word"))))
    assert list(diff_values(recorded(long), recorded(Finer("value"))))


def test_a_difference_must_cover_something() -> None:
    mismatches = [Mismatch("facts/a", 1.0, 1.0 + 1e-9), Mismatch("facts/b", 1, 2)]
    table = (
        Difference("one", "facts/a", "rounding", rtol=1e-6),
        Difference("one", "facts/c", "no longer so"),
        Difference("two", "facts/b", "another script"),
    )
    left_over, stale = unexplained("one", mismatches, table)
    assert left_over == mismatches[1:]
    assert stale == [table[1]]
