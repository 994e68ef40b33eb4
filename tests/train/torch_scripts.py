"""Training functions of plain PyTorch, for real workers."""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import train
from leyden.train import Checkpoint, collective
from leyden.train.torch import enable_reproducibility, get_device, get_devices, prepare_data_loader, prepare_model


def line(config: dict[str, Any]) -> dict[str, Any]:
    """A linear model, with every helper there is; goes on from the last checkpoint."""
    enable_reproducibility(3)
    context = train.get_context()
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=8, shuffle=True)
    loader = prepare_data_loader(loader)
    model = prepare_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raw = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "model.pt"))
        raw.load_state_dict(state["model"])
        start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for batch, target in loader:
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if config.get("fail_at") == epoch and checkpoint is None and context.get_world_rank() == 0:
            raise ValueError("as planned")
        folder = os.path.join(config["folder"], f"rank{context.get_world_rank()}-epoch{epoch}")
        os.makedirs(folder, exist_ok=True)
        if context.get_world_rank() == 0:
            torch.save({"model": raw.state_dict(), "epoch": epoch}, os.path.join(folder, "model.pt"))
        train.report({"loss": loss.detach(), "epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))
    shard = train.get_dataset_shard("numbers") if config.get("datasets") else []
    return {
        "bias": float(raw.bias.detach()),
        "started_at": start,
        "device": str(get_device()),
        "devices": [str(each) for each in get_devices()],
        "ranks": (
            context.get_world_rank(),
            context.get_world_size(),
            context.get_local_rank(),
            context.get_local_world_size(),
            context.get_node_rank(),
        ),
        "from_rank_zero": collective.broadcast_from_rank_zero(context.get_world_rank()),
        "name": context.get_experiment_name(),
        "shard": list(shard),
        "variable": os.environ.get("LEYDEN_TEST_VARIABLE"),
    }
