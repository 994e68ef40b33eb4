"""How long `import leyden` takes, next to torch alone and to Lightning.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --rounds 21 --json out.json

Each arm is one fresh interpreter per round, in shuffled order, timed from its creation to its end. A first round,
not counted, writes the byte code and warms the file cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from typing import Any

import common

# Arm -> (package that it needs, what the fresh interpreter runs).
CODE = {
    "python": ("", "pass"),
    "torch": ("torch", "import torch"),
    "leyden": ("leyden", "import leyden"),
    "leyden_torch": ("leyden", "import torch, leyden"),
    "leyden_trainer": ("leyden", "import leyden as L; L.Trainer; L.LightningModule"),
    "lightning": ("lightning", "import lightning.pytorch as L; L.Trainer; L.LightningModule"),
}
BUDGET_OVER_TORCH_S = {"leyden": 0.1, "leyden_torch": 0.1, "leyden_trainer": 0.1}


def measure(arm: str, folder: str) -> float:
    """Seconds that one fresh interpreter takes to import the arm."""
    code = CODE[arm][1]
    ended = common.run_child([sys.executable, "-c", code], timeout=120, cwd=folder)
    if ended.returncode:
        raise RuntimeError(f"{code!r} ended with exit code {ended.returncode}\n{ended.output[-1500:]}")
    return ended.seconds


def count_modules(arm: str, folder: str) -> int:
    """Modules in `sys.modules` after the arm's import."""
    code = f"{CODE[arm][1]}\nimport sys\nprint(len(sys.modules))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, env=common.child_environment(), cwd=folder, capture_output=True, text=True, check=True
    )
    return int(ended.stdout.split()[-1])


def report(seconds: dict[str, list[float]], modules: dict[str, int]) -> dict[str, dict[str, float]]:
    """Prints the table and how the budget fares; returns the medians."""
    medians = {arm: common.median(values) for arm, values in seconds.items()}
    torch_s = medians.get("torch", float("nan"))
    header = ("arm", "code", "seconds", "+/-", "over torch, s", "x torch", "modules")
    rows = []
    for arm, value in medians.items():
        numbers = (f"{value:.3f}", f"{common.spread(seconds[arm]):.3f}", f"{value - torch_s:+.3f}")
        rows.append((arm, CODE[arm][1], *numbers, f"{value / torch_s:.2f}", str(modules[arm])))
    common.say("\n" + common.table(header, rows))
    for arm, limit in BUDGET_OVER_TORCH_S.items():
        if arm in medians and "torch" in medians:
            over = medians[arm] - torch_s
            common.say(
                f"budget of {arm}: {over:+.3f} s of {limit:g} s over torch: {'met' if over <= limit else 'MISSED'}"
            )
    return {
        arm: {
            "seconds": value,
            "spread_s": common.spread(seconds[arm]),
            "over_torch_s": value - torch_s,
            "ratio_to_torch": value / torch_s,
            "modules": modules[arm],
        }
        for arm, value in medians.items()
    }


def main() -> int:
    """Runs the benchmark; 1 when an arm that is installed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_arguments(parser, tuple(CODE), rounds=11)
    args = parser.parse_args()
    names, absent = common.choose_arms(args.arms, {arm: needs for arm, (needs, _) in CODE.items()})
    info = common.machine()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    modules: dict[str, int] = {}
    # An empty working directory, or a file there could be imported in a package's place.
    with tempfile.TemporaryDirectory() as folder:
        for number, arm in common.interleave(names, args.rounds + 1, args.seed):
            if arm in failed:
                continue
            try:
                value = measure(arm, folder)
            except RuntimeError as error:
                failed[arm] = str(error)
                common.progress(f"{arm}: failed, {error}")
                continue
            if number:
                seconds[arm].append(value)
                common.progress(f"round {number}: {arm} {value:.3f} s")
            else:
                modules[arm] = count_modules(arm, folder)
    measured = {arm: values for arm, values in seconds.items() if values and arm not in failed}
    medians = report(measured, modules)
    for arm, problem in failed.items():
        common.say(f"failed: {arm}: {problem.strip().splitlines()[-1]}")
    common.say(f"\n{args.rounds} rounds\n{common.describe(info)}")
    payload: dict[str, Any] = {"benchmark": "import_time", "machine": info, "arms": medians, "rounds": measured}
    payload |= {"settings": {"rounds": args.rounds, "seed": args.seed}, "not_installed": absent, "failed": failed}
    common.write_json(args.json, payload)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
