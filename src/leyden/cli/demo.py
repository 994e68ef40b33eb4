"""``leyden demo``: trains `leyden.demos.digits`, tests the best checkpoint, and reloads it in a new process."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def evaluate_in_new_process(checkpoint: str) -> float:
    """The accuracy that a process which knows only the file finds."""
    command = [sys.executable, "-m", "leyden.cli.main", "demo", "--evaluate", checkpoint, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the new process ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])["test_acc"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``leyden demo``; returns 0, or 1 when the reloaded checkpoint does not give the same accuracy."""
    arguments = _parser().parse_args(argv)
    import torch  # not needed for `--help`, so not at the top

    from leyden.demos.digits import evaluate, train

    # Layers this small gain nothing from more threads; on a machine with other work, waiting threads cost a lot.
    torch.set_num_threads(1)
    if arguments.evaluate:
        accuracy = evaluate(arguments.evaluate)
        print(json.dumps({"test_acc": accuracy}) if arguments.json else f"test accuracy {accuracy:.4f}")
        return 0
    result = train(arguments.out, arguments.epochs, arguments.seed)
    csv = result.pop("csv")
    result["reloaded_test_acc"] = evaluate_in_new_process(result["checkpoint"])
    same = result["reloaded_test_acc"] == result["test_acc"]
    print(
        f"\ntrained for       {result['epochs']} epochs, {result['seconds']:.1f} s"
        f"\ntest accuracy     {result['test_acc']:.4f}  (best checkpoint, 360 images it has not seen)"
        f"\nreloaded          {result['reloaded_test_acc']:.4f}  (a new process, from the checkpoint alone"
        f"{')' if same else '): NOT THE SAME'}"
        f"\nbest checkpoint   {result['checkpoint']}"
        f"\nlogs, TensorBoard {result['log_dir']}"
        f"\nlogs, CSV         {csv}"
        f"\nlook at them      tensorboard --logdir {arguments.out}"
    )
    if arguments.json:
        keys = ("test_acc", "reloaded_test_acc", "epochs", "seconds", "checkpoint", "log_dir")
        print(json.dumps({key: result[key] for key in keys}))
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leyden demo", description="Trains a small residual network on handwritten digits, tests it, reloads it."
    )
    parser.add_argument("--out", type=Path, default=Path("leyden-demo"), help="folder for logs and checkpoints")
    parser.add_argument("--epochs", type=int, default=15, help="epochs at most (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and augmentation (default: 0)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--evaluate", metavar="CHECKPOINT", help="do not train: test this checkpoint of the demo")
    return parser
