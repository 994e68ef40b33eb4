"""The example scripts run as they stand, in a folder of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme(tmp_path):
    """The script in the README runs as it stands there; so do the commands that it names."""
    text = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    run(str(tmp_path / "script.py"), cwd=tmp_path)
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/epoch=4-*.ckpt"))
    targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)


def test_links_in_the_docs_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.slow
def test_digits(tmp_path):
    output = run("digits.py", cwd=tmp_path)
    accuracy = float(re.search(r"test_acc\D+([\d.]+)", output)[1])
    assert accuracy >= 0.97
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt"))


def test_digits_is_short():
    assert 40 <= len((EXAMPLES / "digits.py").read_text().splitlines()) <= 60


@pytest.mark.slow
def test_char_gpt(tmp_path):
    output = run("char_gpt.py", "--steps", "8", "--megabytes", "0.2", "--write", "40", cwd=tmp_path)
    assert "def " in output
    assert list(tmp_path.glob("lightning_logs/version_0/checkpoints/*step=8.ckpt"))


@pytest.mark.slow
def test_gan_draws(tmp_path):
    output = run("gan.py", "--epochs", "2", cwd=tmp_path)
    drawn = output.splitlines()[-8:]
    assert all(set(line) <= set(" .:-=+*#%@") for line in drawn), output
    assert list(tmp_path.glob("lightning_logs/version_0/events.out.tfevents.*"))


@pytest.mark.slow
def test_migration_changes_imports_only_and_gives_the_same_numbers(tmp_path):
    before = (EXAMPLES / "migration_before.py").read_text().splitlines()
    after = (EXAMPLES / "migration_after.py").read_text().splitlines()
    renamed = [line.replace("lightning.pytorch", "leyden") for line in before]
    # Everything behind the docstring, in any order: a sorter of imports moves the renamed ones.
    assert sorted(filter(None, renamed[1:])) == sorted(filter(None, after[1:]))
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    accuracies = [
        re.search(r"^val_acc=([\d.]+)$", run(f"migration_{side}.py", "2", cwd=tmp_path / side), re.MULTILINE)[1]
        for side in ("before", "after")
    ]
    assert accuracies[0] == accuracies[1]
    logs = [(tmp_path / side / "logs/lightning_logs/version_0/metrics.csv").read_text() for side in ("before", "after")]
    assert logs[0] == logs[1]
