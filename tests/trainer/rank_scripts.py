"""Runs scripts as users do, `python train.py`, and looks at the processes that they are."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import leyden

SOURCE = str(Path(leyden.__file__).resolve().parent.parent)
# What a launcher, or a test before, may have left in the environment.
LAUNCHED = re.compile(r"(LOCAL_|GROUP_|NODE_|MASTER_|WORLD_|ROLE_)?(RANK|ADDR|PORT|SIZE|WORLD_SIZE)|TORCHELASTIC_.*")

HEAD = """
    import faulthandler, os, signal, sys, time
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_AFTER", 100)))  # who hangs says where
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
    import leyden as L
    from leyden.callbacks import Callback, ModelCheckpoint

    QUIET = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False)
    CASE = sys.argv[1] if len(sys.argv) > 1 else ""
"""


def write_script(folder, body, head=HEAD):
    """Writes ``head`` and ``body`` as one script."""
    path = Path(folder) / "train.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body), encoding="utf-8")
    return path


def environment(**more):
    """The variables that a script gets: those of this process, but for what makes it a rank."""
    kept = {key: value for key, value in os.environ.items() if not LAUNCHED.fullmatch(key)}
    kept.pop("OMP_NUM_THREADS", None)
    return {**kept, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", **more}


def start(path, *arguments, **more):
    """Starts a script in a session of its own, so that a signal can go to all of its processes as from a terminal."""
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        cwd=path.parent,
        start_new_session=True,
    )


def run(path, *arguments, timeout=120, **more):
    """Runs a script to its end and returns (exit code, stdout, stderr)."""
    return finish(start(path, *arguments, **more), timeout)


def finish(process, timeout=60):
    """Waits for the end of a started script; it has hung when that takes longer than ``timeout`` seconds."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"the script hung\n--- stdout\n{out}\n--- stderr\n{err}") from None
    return process.returncode, out, err


def is_alive(pid):
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=60, what="it"):
    """Waits until ``condition()`` is true and returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return found


def none_left(pids, seconds=8):
    """Waits until all of these processes have ended."""
    wait_for(lambda: not any(map(is_alive, pids)), seconds, f"the end of {[p for p in pids if is_alive(p)]}")
    return True
