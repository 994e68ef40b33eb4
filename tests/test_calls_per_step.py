"""What a training step and one `self.log` may cost: Python calls, device synchronisations, collectives.

Counts, not seconds, so that a slow or busy machine changes nothing. Run as a script, this file is the two-process
run of its own last test.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

REPO = Path(__file__).resolve().parent.parent
CALLS_PER_STEP = 40

# Ways in which a value of a tensor comes to the host; each makes the host wait for a device.
READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__", "__array__"}


class _SeenInPython(TorchFunctionMode):
    """Notes the methods of `Tensor` by which Python reads a value, also those that run no operator on a CPU."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class _SeenAsOperator(TorchDispatchMode):
    """Notes operators that read a value, and all collectives: both go through the dispatcher."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_local_scalar_dense" in name or func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Watch:
    """Context manager: ``seen`` lists the reads and collectives inside."""

    def __init__(self, seen: list[str] | None = None) -> None:
        self.seen = [] if seen is None else seen
        self._modes = (_SeenInPython(self.seen), _SeenAsOperator(self.seen))

    def __enter__(self) -> list[str]:
        for mode in self._modes:
            mode.__enter__()
        return self.seen

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def make_module(root: str, seen: list[str]) -> Any:
    """A module that logs in many ways; ``seen`` collects what its calls of `log` do."""
    L = importlib.import_module(root)

    class Logs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def log(self, *args: Any, **kwargs: Any) -> None:
            with Watch(seen):
                super().log(*args, **kwargs)

        def log_dict(self, *args: Any, **kwargs: Any) -> None:
            with Watch(seen):
                super().log_dict(*args, **kwargs)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss, prog_bar=True)
            self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("number", 2.0 * batch_idx, batch_size=3)
            self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
            self.log_dict({"a": loss, "b": loss.detach()}, prog_bar=True)
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch[0]).square().mean(), prog_bar=True, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Logs()


def fit(root: str, folder: str, **arguments: Any) -> tuple[list[str], int]:
    """Trains with the logger due at every step; returns what the calls of `log` did, and the rank."""
    L = importlib.import_module(root)
    seen: list[str] = []
    module = make_module(root, seen)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        logger=importlib.import_module(f"{root}.loggers").CSVLogger(folder),
        default_root_dir=folder,
        **arguments,
    )
    data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    trainer.fit(module, data, data)
    return seen, trainer.global_rank


def test_framework_calls_per_step(tmp_path: Path) -> None:
    """Default features with a CSV logger, the bar drawn on a terminal, checkpoints on, one `self.log`."""
    out = tmp_path / "count.json"
    script = REPO / "benchmarks" / "step_overhead.py"
    command = [sys.executable, str(script), "--count", "--where", "--arms", "leyden_bare,leyden_full", "--steps", "600"]
    ended = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = json.loads(out.read_text())["arms"]
    assert 0 < counts["leyden_full"]["framework"] <= CALLS_PER_STEP, ended.stdout
    assert 0 < counts["leyden_bare"]["framework"] <= counts["leyden_full"]["framework"], ended.stdout


def test_log_reads_no_value(tmp_path: Path) -> None:
    seen, _ = fit("leyden", str(tmp_path), devices=1)
    assert seen == []


def test_log_communicates_nothing(tmp_path: Path) -> None:
    """Two processes, ``sync_dist=True``: the reduction belongs to the end of the step, not into `log`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(Path(__file__).resolve()), str(tmp_path)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank*.json")}
    assert seen == {"rank0.json": [], "rank1.json": []}


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy", "__float__", "__bool__"])
def test_watch_sees_a_read(read: str) -> None:
    """The watching itself: each way of reading shows."""
    value = torch.ones(())
    with Watch() as seen:
        value.detach().mul(2)
        assert seen == []
        getattr(value, read)()
    assert f"Tensor.{read}" in seen


def test_watch_sees_a_collective(tmp_path: Path) -> None:
    """The watching itself: a collective shows, also in a group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with Watch() as seen:
            dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()
    assert any(name.startswith("c10d.allreduce_") for name in seen)


if __name__ == "__main__":
    found, rank = fit("leyden", sys.argv[1], devices=2, strategy="ddp")
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(found))
