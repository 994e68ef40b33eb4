"""What the benchmarks share: interleaved rounds, child processes on a terminal, medians, tables, JSON.

Nothing here imports torch or a framework, so that a child process pays only for what its arm needs.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
SRC = REPO / "src"

# Distributions whose versions belong next to a number.
PACKAGES = ("torch", "leyden", "lightning", "accelerate", "pytorch-ignite", "transformers", "numpy", "rich", "tqdm")


@dataclass(frozen=True)
class ChildResult:
    """How a child process ended.

    Attributes:
        returncode: Exit status; -9 when it ran past its time limit.
        output: The last part of what it wrote to its terminal (stdout and stderr together).
        seconds: Wall time from just before the process was created to its end.
        started: `time.monotonic()` just before the process was created.
    """

    returncode: int
    output: str
    seconds: float
    started: float


def child_environment(**extra: str) -> dict[str, str]:
    """The environment of every child: this checkout's sources importable, one thread, a plain wide terminal."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SRC), env.get("PYTHONPATH", ""))))
    env.update(OMP_NUM_THREADS="1", TERM="xterm-256color", COLUMNS="120", LINES="40", HF_HUB_OFFLINE="1")
    # A launcher's leftovers would make a framework believe that it is one rank of a bigger run.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NO_COLOR", "CI"):
        env.pop(name, None)
    env.update(extra)
    return env


def run_child(argv: Sequence[str], timeout: float = 300.0, cwd: str | None = None, **env: str) -> ChildResult:
    """Runs ``argv`` on a pseudo-terminal and waits for it.

    The terminal matters: progress bars draw less, or nothing, when their output is a pipe, and a benchmark with the
    bar on must pay for the drawing.

    Args:
        argv: Command line.
        timeout: Seconds until the child is killed.
        cwd: Working directory, the present one by default.
        env: Environment variables on top of `child_environment`.
    """
    primary, secondary = os.openpty()
    started = time.monotonic()
    # ``start_new_session`` lets a child that hangs be killed together with the ranks it started.
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=secondary,
        env=child_environment(**env),
        cwd=cwd,
        start_new_session=True,
    )
    os.close(secondary)
    output = bytearray()
    try:
        while True:
            if time.monotonic() - started > timeout:
                os.killpg(process.pid, 9)
                break
            if not select.select([primary], [], [], 0.5)[0]:
                if process.poll() is not None:
                    break
                continue
            try:
                chunk = os.read(primary, 65536)
            except OSError as error:
                # Linux answers EIO, not an empty read, when the last writer has closed its end.
                if error.errno != errno.EIO:
                    raise
                break
            if not chunk:
                break
            output += chunk
            del output[:-20000]
        returncode = process.wait()
    finally:
        os.close(primary)
    return ChildResult(returncode, output.decode(errors="replace"), time.monotonic() - started, started)


def interleave(arms: Sequence[str], rounds: int, seed: int = 0) -> Iterator[tuple[int, str]]:
    """Yields ``(round, arm)``: each round has each arm once, in an order of its own.

    A machine that gets slower or faster while the benchmark runs then changes all arms alike.
    """
    rng = random.Random(seed)
    for number in range(rounds):
        order = list(arms)
        rng.shuffle(order)
        for arm in order:
            yield number, arm


def is_installed(module: str) -> bool:
    """Whether ``module`` can be found (its top package is not imported)."""
    if module.split(".")[0] == "leyden":
        return (SRC / "leyden").is_dir() or importlib.util.find_spec("leyden") is not None
    return importlib.util.find_spec(module.split(".")[0]) is not None


def median(values: Iterable[float]) -> float:
    """Median of ``values``; NaN when there are none."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def spread(values: Iterable[float]) -> float:
    """Half of the distance between the quartiles: how far a typical round lies from the median."""
    values = sorted(values)
    if len(values) < 2:
        return float("nan")
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table that also reads well as plain text; all columns but the first are right-aligned."""
    rows = [list(row) for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def machine() -> dict[str, Any]:
    """Processor, cores, load, versions and date, for the foot of a table."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def describe(info: dict[str, Any]) -> str:
    """`machine()` in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return (
        f"{info['date']}; {info['cpu']}, {info['cores']} cores, load {info['load_average']}; {info['system']}\n"
        f"Python {info['python']}, {versions}"
    )


def add_common_arguments(parser: argparse.ArgumentParser, arms: Sequence[str], rounds: int) -> None:
    """``--rounds``, ``--arms``, ``--seed`` and ``--json``, with the same meaning in every benchmark."""
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--arms", default=",".join(arms), help="comma-separated, default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the order within rounds (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers, each round's included, as JSON")


def choose_arms(chosen: str, needs: dict[str, str]) -> tuple[list[str], list[str]]:
    """Splits the arms asked for into those that can run and those whose package is missing (named on stdout)."""
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    unknown = sorted(set(names) - set(needs))
    if unknown:
        raise SystemExit(f"--arms: unknown {', '.join(unknown)}; known: {', '.join(needs)}")
    present = [name for name in names if not needs[name] or is_installed(needs[name])]
    absent = [name for name in names if name not in present]
    for name in absent:
        say(f"left out: {name} ({needs[name]} is not installed)")
    return present, absent


def say(text: str) -> None:
    """Prints at once: rounds take minutes, and a pipe would hold the lines back."""
    print(text, flush=True)


def progress(text: str) -> None:
    """A line on stderr, so that stdout holds the table alone."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: str | None, payload: dict[str, Any]) -> None:
    """Writes ``payload`` to ``path``; does nothing when ``path`` is None."""
    if path:
        Path(path).write_text(json.dumps(payload, indent=2) + "\n")
