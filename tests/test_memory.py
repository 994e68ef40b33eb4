"""Training takes no more memory than the raw loop: no old gradients, graphs, losses or batches are kept.

Live tensor bytes are counted at every operator, so the peak is the same number in every run; a resident-set
measurement would move by more than the 2 % that is allowed.
"""

from __future__ import annotations

import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

LIMIT = 1.02
STEPS = 4


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all tensor storages that operators create while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class ManyParameters(nn.Module):
    """64 MB of parameters and next to no activations: the peak is in the optimizer."""

    features = 2048

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class ManyActivations(nn.Module):
    """32 MB of parameters and 96 MB of activations: the peak is where the forward pass meets the backward pass.

    Gradients of the last step that are still there during the forward pass show here.
    """

    features = 2048

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x).unsqueeze(-1) * self.scale
        for _ in range(12):
            x = torch.tanh(x)
        return x.mean()


def make_batches(kind: type[nn.Module]) -> DataLoader:
    # A loader: a bare list would be taken for a list of loaders.
    return DataLoader([torch.randn(32, kind.features) for _ in range(STEPS)], batch_size=None)  # type: ignore


def peak_of_raw_loop(kind: type[nn.Module]) -> int:
    with LiveBytes() as live:
        model = kind()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for batch in make_batches(kind):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    return live.peak


def peak_of_trainer(kind: type[nn.Module], root: str, folder: Path) -> int:
    L = importlib.import_module(root)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.model(batch)
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    logger = importlib.import_module(f"{root}.loggers").CSVLogger(folder)
    with LiveBytes() as live:
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, logger=logger, default_root_dir=folder
        )
        trainer.fit(Module(), make_batches(kind))
    return live.peak


@pytest.mark.parametrize("kind", [ManyParameters, ManyActivations])
def test_peak_memory_is_that_of_the_raw_loop(kind: type[nn.Module], tmp_path: Path) -> None:
    raw = peak_of_raw_loop(kind)
    own = peak_of_trainer(kind, "leyden", tmp_path)
    assert raw > 100 * 2**20, "the model is too small to say anything"
    assert own <= LIMIT * raw, f"{own / 2**20:.1f} MB at the peak, the raw loop has {raw / 2**20:.1f} MB"


def test_live_bytes_sees_what_is_kept() -> None:
    """The measuring itself: memory that is kept shows, memory that was freed doesn't."""
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept[:10]
        for _ in range(3):
            torch.zeros(500)
        in_place = kept.add_(1)
    assert (live.now, live.peak) == (4000, 6000)
    assert view is not None
    assert in_place is kept
