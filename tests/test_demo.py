"""The `leyden` command, and its demo from the first batch to the reloaded checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.__about__ import __version__

# They share one training, so with several test processes they belong into the same.
pytestmark = pytest.mark.xdist_group("demo")

# One thread: small layers gain little from two, and lose a lot when tests run side by side.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def leyden(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = leyden("demo", "--json", "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_demo_learns_and_its_checkpoint_is_the_same_model(demo):
    _, output = demo
    result = json.loads(output.splitlines()[-1])
    assert list(result) == ["test_acc", "reloaded_test_acc", "epochs", "seconds", "checkpoint", "log_dir"]
    assert result["test_acc"] >= 0.97
    assert result["reloaded_test_acc"] == result["test_acc"]
    assert 5 <= result["epochs"] <= 15
    assert 0 < result["seconds"] < 60


def test_demo_leaves_what_it_says(demo):
    folder, output = demo
    result = json.loads(output.splitlines()[-1])
    checkpoint, log_dir = Path(result["checkpoint"]), Path(result["log_dir"])
    assert checkpoint.is_file()
    assert checkpoint.is_relative_to(folder / "out")
    assert list(log_dir.glob("events.out.tfevents.*"))
    assert (log_dir / "hparams.yaml").is_file()
    header, *rows = (folder / "out" / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {"epoch", "step", "train_loss", "val_loss", "val_acc", "test_acc", "lr-AdamW"} <= set(header.split(","))
    assert len(rows) > 15
    for said in (str(checkpoint), str(log_dir), "tensorboard --logdir out"):
        assert said in output
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_demo_tests_a_checkpoint(demo):
    folder, output = demo
    result = json.loads(output.splitlines()[-1])
    done = leyden("demo", "--evaluate", result["checkpoint"], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"test accuracy {result['test_acc']:.4f}"


def test_version():
    done = leyden("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"leyden {__version__}")


def test_help_lists_the_commands():
    for arguments in (["--help"], []):
        done = leyden(*arguments)
        assert done.returncode == 0
        assert "demo" in done.stdout


def test_unknown_command_names_close_ones():
    done = leyden("dmeo")
    assert done.returncode == 2
    assert "'dmeo'" in done.stderr
    assert "did you mean 'demo'" in done.stderr


def test_options_of_a_command_are_its_own():
    done = leyden("demo", "--help")
    assert done.returncode == 0
    assert "--epochs" in done.stdout
