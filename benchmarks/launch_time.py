"""How long two CPU processes take from nothing to the end of their first training step.

    python benchmarks/launch_time.py
    python benchmarks/launch_time.py --arms torchrun,leyden --rounds 11 --json out.json

- torchrun: `torchrun --nproc-per-node 2` on a plain script with gloo and DistributedDataParallel
- leyden, lightning: a plain script, started by `python`, with `Trainer(devices=2, strategy="ddp")`, which starts
  the second process itself

The clock (system-wide, monotonic) starts just before the first process is created. Each rank notes the time when
its first step is done: after `optimizer.step()`, or in `on_train_batch_end`; the later of the two counts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

NEEDS = {"torchrun": "", "leyden": "leyden", "lightning": "lightning"}
IMPORT_ROOTS = {"leyden": "leyden", "lightning": "lightning.pytorch"}
BUDGET_X_TORCHRUN = {"leyden": 1.2}
WORLD_SIZE = 2
STEPS = 3


def note_first_step(rank: int) -> None:
    """Leaves the present time in the folder that the parent reads."""
    Path(os.environ["LAUNCH_TIME_FOLDER"], f"rank{rank}").write_text(repr(time.monotonic()))


def train_raw() -> None:
    """What a script for torchrun looks like without a framework."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(32 * STEPS * WORLD_SIZE, 784), torch.randint(10, (32 * STEPS * WORLD_SIZE,)))
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    )
    optimizer = torch.optim.Adam(model.parameters())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 0:
            note_first_step(dist.get_rank())
    # Without these two, torch 2.13 sometimes aborts rank 1 at interpreter exit ("terminate called ...").
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


def train_framework(root: str) -> None:
    """The same for Leyden and Lightning: one script, two import roots."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    L = importlib.import_module(root)

    class Perceptron(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                note_first_step(self.global_rank)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    dataset = TensorDataset(torch.randn(32 * STEPS * WORLD_SIZE, 784), torch.randint(10, (32 * STEPS * WORLD_SIZE,)))
    off = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp",
        max_epochs=1,
        default_root_dir=os.environ["LAUNCH_TIME_FOLDER"],
        **dict.fromkeys(off, False),
    )
    trainer.fit(Perceptron(), DataLoader(dataset, batch_size=32, shuffle=True))


def command(arm: str) -> list[str]:
    """The command line that a user would type."""
    script = [str(Path(__file__).resolve()), "--child", arm]
    if arm != "torchrun":
        return [sys.executable, *script]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The `torchrun` script is this module; a fixed port of its own would collide with other runs on the machine.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD_SIZE)]
    return [*launcher, "--master-port", str(port), *script]


def measure(arm: str) -> dict[str, float]:
    """One run of the arm.

    Returns:
        ``first_step_s``: seconds from before process creation until the first step is done on both ranks;
        ``whole_run_s``: until the end of the run; ``returncode``: its exit code. A run that trained and then failed
        at exit still counts, and the table shows how many did.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = common.run_child(command(arm), timeout=180, cwd=folder, LAUNCH_TIME_FOLDER=folder)
        marks = [Path(folder, f"rank{rank}") for rank in range(WORLD_SIZE)]
        missing = [mark.name for mark in marks if not mark.exists()]
        if missing:
            raise RuntimeError(
                f"exit code {ended.returncode}, no first step from {', '.join(missing)}\n{ended.output[-1500:]}"
            )
        last = max(float(mark.read_text()) for mark in marks)
    return {"first_step_s": last - ended.started, "whole_run_s": ended.seconds, "returncode": ended.returncode}


def report(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Prints the table and how the budget fares; returns the medians."""
    first = {arm: [row["first_step_s"] for row in rows] for arm, rows in results.items()}
    medians = {
        arm: {
            "first_step_s": common.median(values),
            "spread_s": common.spread(values),
            "whole_run_s": common.median(row["whole_run_s"] for row in results[arm]),
            "bad_exits": sum(row["returncode"] != 0 for row in results[arm]),
        }
        for arm, values in first.items()
    }
    base = medians.get("torchrun", {}).get("first_step_s", float("nan"))
    rows = []
    for arm, m in medians.items():
        m["ratio_to_torchrun"] = m["first_step_s"] / base
        numbers = (f"{m['first_step_s']:.2f}", f"{m['spread_s']:.2f}", f"{m['ratio_to_torchrun']:.2f}")
        rows.append((arm, *numbers, f"{m['whole_run_s']:.2f}", str(m["bad_exits"])))
    common.say("\n" + common.table(("arm", "first step, s", "+/-", "x torchrun", "whole run, s", "bad exits"), rows))
    for arm, limit in BUDGET_X_TORCHRUN.items():
        if arm in medians and "torchrun" in medians:
            ratio = medians[arm]["ratio_to_torchrun"]
            common.say(f"budget of {arm}: {ratio:.2f} of {limit:g} x torchrun: {'met' if ratio <= limit else 'MISSED'}")
    return medians


def main() -> int:
    """Runs the benchmark; 1 when an arm that is installed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_common_arguments(parser, tuple(NEEDS), rounds=7)
    parser.add_argument("--child", metavar="ARM", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train_raw() if args.child == "torchrun" else train_framework(IMPORT_ROOTS[args.child])
        return 0
    names, absent = common.choose_arms(args.arms, NEEDS)
    info = common.machine()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    # As with imports, a first round that is not counted warms the caches.
    for number, arm in common.interleave(names, args.rounds + 1, args.seed):
        if arm in failed:
            continue
        try:
            row = measure(arm)
        except RuntimeError as error:
            failed[arm] = str(error)
            common.progress(f"{arm}: failed, {error}")
            continue
        if number:
            results[arm].append(row)
            common.progress(f"round {number}: {arm} {row['first_step_s']:.2f} s")
    measured = {arm: rows for arm, rows in results.items() if rows and arm not in failed}
    medians = report(measured)
    for arm, problem in failed.items():
        common.say(f"failed: {arm}: {problem.strip().splitlines()[-1]}")
    common.say(f"\n{args.rounds} rounds\n{common.describe(info)}")
    payload: dict[str, Any] = {"benchmark": "launch_time", "machine": info, "arms": medians, "rounds": measured}
    payload |= {"settings": {"rounds": args.rounds, "seed": args.seed}, "not_installed": absent, "failed": failed}
    common.write_json(args.json, payload)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
