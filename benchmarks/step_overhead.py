"""What a training step costs on top of a raw PyTorch loop, framework by framework.

    python benchmarks/step_overhead.py                  # times, about five minutes
    python benchmarks/step_overhead.py --count          # Python calls per step of Leyden and Lightning
    python benchmarks/step_overhead.py --arms raw,leyden_full --rounds 3 --json out.json

Each round starts one fresh process per arm, in shuffled order, on a pseudo-terminal. In it the raw loop and the arm
take turns, raw first and last, and the arm's overhead is its time minus the mean of its two neighbours. The raw arm
is measured the same way: its overhead shows the noise. Time is taken where the batches are handed out (see
`arms.BatchSource`), from the warm-up's end to the last batch, so set-up, tear-down and the checkpoint at the end of
the last epoch are outside; with ``--epochs 3`` two epoch ends, with their checkpoints, are inside.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

# Arm -> package that it needs ("" for none).
NEEDS = {
    "raw": "",
    "leyden_bare": "leyden",
    "leyden_full": "leyden",
    "lightning_bare": "lightning",
    "lightning_full": "lightning",
    "accelerate": "accelerate",
    "ignite": "ignite",
    "hf_trainer": "transformers",
}
ARMS = tuple(NEEDS)
# Whose calls are the framework's, where that is more than the package itself.
PACKAGES = {"": (), "lightning": ("lightning", "lightning_utilities")}
COUNTED = ("raw", "leyden_bare", "leyden_full", "lightning_bare", "lightning_full")
BUDGET_US = {"leyden_bare": 5.0, "leyden_full": 15.0}
BUDGET_CALLS = {"leyden_bare": 40.0, "leyden_full": 40.0}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_arguments(parser, ARMS, rounds=5)
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps per fit (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs that make up these steps (default: 1)")
    parser.add_argument("--warmup", type=int, default=100, help="steps before the clock starts (default: 100)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the arm in a round's process (default: 3)")
    parser.add_argument("--count", action="store_true", help="count Python calls per step instead of timing")
    parser.add_argument("--where", action="store_true", help="with --count: also list the functions called most")
    parser.add_argument("--child", metavar="ARM", help=argparse.SUPPRESS)
    parser.add_argument("--out", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def child(args: argparse.Namespace) -> None:
    """Measures one arm in this process and leaves the numbers in ``--out``."""
    import arms

    size = (args.steps, args.epochs, args.warmup)
    if args.count:
        package = NEEDS[args.child]
        result = [arms.count_arm(args.child, PACKAGES.get(package, (package,)), *size)]
    else:
        result = arms.time_arm(args.child, *size, args.repeats)
    Path(args.out).write_text(json.dumps(result))


def measure(arm: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """One arm in a fresh process: its numbers, or an empty list and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", arm, "--out", str(out)]
        for name in ("steps", "epochs", "warmup", "repeats"):
            command += [f"--{name}", str(getattr(args, name))]
        ended = common.run_child(command + ["--count"] * args.count, cwd=folder)
        if ended.returncode or not out.exists():
            return [], f"exit code {ended.returncode}\n{ended.output[-1500:]}"
        return json.loads(out.read_text()), ""


def collect(names: list[str], args: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """All rounds: results by arm, and the reason of each arm that failed (it is left out from then on)."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number, arm in common.interleave(names, 1 if args.count else args.rounds, args.seed):
        if arm in failed:
            continue
        found, problem = measure(arm, args)
        if not found:
            failed[arm] = problem
            common.progress(f"{arm}: failed, {problem}")
            continue
        results[arm] += found
        if args.count:
            shown = f"{found[0]['framework']:.1f} calls"
        else:
            shown = f"{common.median(row['us'] - row['raw_us'] for row in found):+.1f} us"
        common.progress(f"round {number + 1}: {arm} {shown}")
    return {name: rows for name, rows in results.items() if rows and name not in failed}, failed


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all runs of one arm; times in microseconds per step."""
    overheads = [row["us"] - row["raw_us"] for row in rows]
    return {
        "us": common.median(row["us"] for row in rows),
        "raw_us": common.median(row["raw_us"] for row in rows),
        "overhead_us": common.median(overheads),
        "overhead_spread_us": common.spread(overheads),
        "overhead_cpu_us": common.median(row["cpu_us"] - row["raw_cpu_us"] for row in rows),
        "ratio": common.median(row["us"] / row["raw_us"] for row in rows),
        "fit_s": common.median(row["fit_s"] for row in rows),
        "checksum": rows[0]["checksum"],
    }


def report_times(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Prints the table of times and how the budgets fare; returns the medians."""
    medians = {arm: summarise(rows) for arm, rows in results.items()}
    header = ("arm", "us/step", "over raw, us", "+/-", "CPU over raw, us", "x raw", "overhead, Leyden full = 1")
    reference = medians.get("leyden_full", {}).get("overhead_us")
    rows = []
    for arm, m in medians.items():
        relative = f"{m['overhead_us'] / reference:.1f}" if reference and reference > 0 and arm != "raw" else "-"
        numbers = (f"{m['us']:.1f}", f"{m['overhead_us']:+.1f}", f"{m['overhead_spread_us']:.1f}")
        rows.append((arm, *numbers, f"{m['overhead_cpu_us']:+.1f}", f"{m['ratio']:.2f}", relative))
    common.say("\n" + common.table(header, rows))
    for arm, limit in BUDGET_US.items():
        if arm in medians:
            got = medians[arm]["overhead_us"]
            verdict = "met" if got <= limit else "MISSED"
            common.say(f"budget of {arm}: {got:+.1f} us of {limit:g} us a step: {verdict}")
    different = [arm for arm, m in medians.items() if "raw" in medians and m["checksum"] != medians["raw"]["checksum"]]
    if different:
        common.say(f"final weights differ from the raw loop's: {', '.join(different)}")
    return medians


def report_counts(results: dict[str, list[dict[str, Any]]], where: bool) -> dict[str, Any]:
    """Prints the table of calls; returns the counts."""
    counts = {arm: rows[0] for arm, rows in results.items()}
    raw = counts.get("raw", {}).get("all")
    header = ("arm", "framework calls/step", "busiest step", "all Python calls/step", "over raw")
    rows = []
    for arm, c in counts.items():
        over = "-" if raw is None else f"{c['all'] - raw:+.1f}"
        rows.append((arm, f"{c['framework']:.1f}", str(c["framework_max"]), f"{c['all']:.1f}", over))
    common.say("\n" + common.table(header, rows))
    for arm, limit in BUDGET_CALLS.items():
        if arm in counts:
            got = counts[arm]["framework"]
            common.say(f"budget of {arm}: {got:.1f} of {limit:g} calls a step: {'met' if got <= limit else 'MISSED'}")
    if where:
        for arm, c in counts.items():
            lines = "".join(f"\n  {n:7.2f}  {name}" for name, n in c["where"].items())
            common.say(f"\n{arm}: calls per step by function{lines}")
    return counts


def main() -> int:
    """Runs the benchmark; 1 when an arm that is installed failed."""
    args = parse()
    if args.child:
        child(args)
        return 0
    if args.count and args.arms == ",".join(ARMS):
        args.arms = ",".join(COUNTED)
    names, absent = common.choose_arms(args.arms, NEEDS)
    info = common.machine()
    results, failed = collect(names, args)
    medians = report_counts(results, args.where) if args.count else report_times(results)
    for arm, problem in failed.items():
        common.say(f"failed: {arm}: {problem.strip().splitlines()[-1]}")
    settings = f"{args.steps} steps, {args.epochs} epoch(s), warm-up {args.warmup}, "
    common.say(
        f"\n{settings}{'1 round' if args.count else f'{args.rounds} rounds of {args.repeats}'}\n{common.describe(info)}"
    )
    payload = {"benchmark": "step_overhead", "mode": "count" if args.count else "time", "machine": info}
    payload |= {"settings": {k: getattr(args, k) for k in ("steps", "epochs", "warmup", "rounds", "repeats", "seed")}}
    payload |= {"arms": medians, "rounds": results, "not_installed": absent, "failed": failed}
    common.write_json(args.json, payload)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
