"""The code in the guides runs as it stands there, as a script of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"


def code_of(name: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    return "\n\n".join(blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.md", "migration-from-ray-train.md"])
def test_guide(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where results go that have no storage_path
    script = tmp_path / "guide.py"
    script.write_text(code_of(name))
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "train.md":
        assert "done ['" in done.stdout
        assert re.search(r"^12 \[\d+", done.stdout, re.MULTILINE)  # the steps of a run without the failure
        assert (tmp_path / "failed").exists()
