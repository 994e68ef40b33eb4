"""Runs one script under two roots and lists where their records differ.

A *root* is the module that a user imports as ``L``: ``lightning.pytorch`` or ``leyden``. A script is a function
``script(L, tmp, rec)`` that uses only names that both roots have. It runs once per root, in the same process, from the
same random state, in a folder of its own; what it puts into ``rec`` is reduced to plain data, then compared.
"""

import contextlib
import importlib
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from differential.compare import Mismatch, diff_records
from differential.record import Record

__all__ = ["OTHER", "REFERENCE", "SCRIPTS", "Script", "compare_roots", "load_root", "run_script", "script"]

REFERENCE = "lightning.pytorch"
# The root under test. `LEYDEN_DIFFERENTIAL_OTHER=lightning.pytorch` compares the reference with itself.
OTHER = os.environ.get("LEYDEN_DIFFERENTIAL_OTHER", "leyden")
SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")

ScriptFunction = Callable[[Any, Path, Record], None]


@dataclass(frozen=True)
class Script:
    """One registered script; ``name`` is how tests and `differences.py` speak of it."""

    name: str
    function: ScriptFunction = field(repr=False)


SCRIPTS: dict[str, Script] = {}


def script(function: ScriptFunction) -> ScriptFunction:
    """Registers a script under its function's name."""
    name = function.__name__
    if name in SCRIPTS:
        raise ValueError(f"two differential scripts are called {name!r}: rename one")
    if not (function.__doc__ or "").strip():
        raise ValueError(f"differential script {name!r} needs a docstring that says what it covers")
    SCRIPTS[name] = Script(name, function)
    return function


def load_root(name: str) -> ModuleType:
    """Imports a root and keeps its console messages out of the test output."""
    root = importlib.import_module(name)
    for logger in ("lightning.pytorch", "lightning.fabric", "leyden"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return root


@contextlib.contextmanager
def _clean_process(folder: Path) -> Iterator[None]:
    """The same random state, working folder and environment for every run, whatever ran before."""
    before = Path.cwd()
    saved = {name: os.environ.pop(name, None) for name in SEED_VARIABLES}
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # The layout of an array in memory can change the last bit of a sum over several threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def run_script(function: ScriptFunction, root: ModuleType, folder: Path) -> Record:
    """Runs a script under one root.

    Args:
        function: The script.
        root: The module that the script gets as ``L``.
        folder: An empty folder for the run; its path is written as ``<tmp>`` in the record.

    Raises:
        Exception: Whatever the script did not expect.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder, root.__name__)
    with _clean_process(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(root, folder, record)
    if not record.trace and not record.facts:
        raise AssertionError(f"script {function.__name__!r} recorded nothing, so it proves nothing")
    return record


def compare_roots(left: Record, right: Record) -> Sequence[Mismatch]:
    """All mismatches of two records of the same script; ``left`` is the reference's."""
    return diff_records(left, right)
