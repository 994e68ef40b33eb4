import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import leyden
from leyden.dist.command import script_command

CODE = "import json; from leyden.dist.command import script_command; print(json.dumps(script_command(1)))"


def _command_seen_by(arguments, folder):
    source = str(Path(leyden.__file__).parents[1])  # the folder changes, so a relative PYTHONPATH would not do
    variables = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=variables, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_script_with_flags_and_arguments(tmp_path):
    (tmp_path / "train.py").write_text(CODE, encoding="utf-8")
    command, folder = _command_seen_by(["-W", "ignore", "-O", "train.py", "--lr", "0.1"], tmp_path)
    assert command[0] == sys.executable
    assert "-O" in command
    assert "-Wignore" in command
    assert command[-3:] == [str(tmp_path / "train.py"), "--lr", "0.1"]
    assert folder is None


def test_module(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "__main__.py").write_text(CODE, encoding="utf-8")
    command, _ = _command_seen_by(["-m", "pack", "x"], tmp_path)
    assert command[-3:] == ["-m", "pack.__main__", "x"]


def test_code(tmp_path):
    command, _ = _command_seen_by(["-c", CODE, "x"], tmp_path)
    assert command[1:] == ["-c", CODE, "x"]


def test_program_from_stdin_can_not_be_started_again(monkeypatch):
    import __main__

    monkeypatch.setattr(__main__, "__spec__", None, raising=False)
    monkeypatch.setattr(sys, "argv", ["-"])
    with pytest.raises(RuntimeError, match=r"sys.argv\[0\]='-' is no file: put the code into a script, or pass"):
        script_command(1)


def test_under_hydra(monkeypatch):
    import __main__

    config = types.SimpleNamespace(run=types.SimpleNamespace(dir="outputs/1"))
    names = {
        "hydra": types.ModuleType("hydra"),
        "hydra.core": types.ModuleType("hydra.core"),
        "hydra.core.hydra_config": types.ModuleType("hydra.core.hydra_config"),
        "hydra.utils": types.ModuleType("hydra.utils"),
    }
    names["hydra.core.hydra_config"].HydraConfig = types.SimpleNamespace(initialized=lambda: True, get=lambda: config)
    names["hydra.utils"].get_original_cwd = lambda: "/start"
    names["hydra.utils"].to_absolute_path = lambda path: f"/start/{path}"
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(__main__, "__spec__", None, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "lr=1"])
    command, folder = script_command(2)
    assert folder == "/start"
    assert command[-5:] == [
        "/start/train.py",
        "lr=1",
        'hydra.run.dir="outputs/1"',
        "hydra.job.name=train_ddp_process_2",
        "hydra.output_subdir=null",
    ]
