"""The same script under Lightning 2.6 and under Leyden must leave the same record."""

from pathlib import Path

import pytest

from differential.compare import report, unexplained
from differential.differences import DIFFERENCES
from differential.harness import OTHER, REFERENCE, SCRIPTS, Script, compare_roots, load_root, run_script
from differential.scripts import load_all

load_all()


@pytest.mark.parametrize("entry", SCRIPTS.values(), ids=SCRIPTS)
def test_script(entry: Script, tmp_path: Path) -> None:
    reference = run_script(entry.function, load_root(REFERENCE), tmp_path / "reference")
    other = run_script(entry.function, load_root(OTHER), tmp_path / "other")
    differences = DIFFERENCES if OTHER != REFERENCE else ()
    mismatches, stale = unexplained(entry.name, compare_roots(reference, other), differences)
    assert not mismatches, report(entry.name, mismatches)
    assert not stale, f"these entries of differences.py no longer cover anything, remove them: {stale}"
