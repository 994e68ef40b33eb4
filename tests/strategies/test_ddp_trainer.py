"""A whole Trainer under DDP: two forked processes against one that sees the global batch."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import leyden as L

DATA = torch.arange(96, dtype=torch.float32).reshape(24, 4) / 96


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        torch.set_num_threads(1)
        loss = self.layer(batch).pow(2).mean()
        self.log("train", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.generator = nn.Linear(4, 4)
        self.critic = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        torch.set_num_threads(1)
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            fake = self.generator(batch)
            loss = self.critic(fake).pow(2).mean() if number == 0 else self.critic(fake.detach() + batch).abs().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def on_train_end(self):
        for tensor in self.parameters():
            gathered = self.all_gather(tensor.detach())
            assert gathered.dim() == tensor.dim() or torch.equal(gathered[0], gathered[1])

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def _trainer(folder, devices, **kwargs):
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def _fit(module, folder, devices, **kwargs):
    kwargs.setdefault("max_epochs", 2)
    trainer = _trainer(folder, devices, **kwargs)
    # One batch holds all of a rank's rows, so that shuffling changes nothing and both runs see one global batch.
    rows = len(DATA) // devices
    trainer.fit(module, DataLoader(DATA, batch_size=rows), DataLoader(DATA, batch_size=rows))
    return trainer


def test_weights_metrics_and_checkpoint_come_back(tmp_path):
    one, two = Net(), Net()
    alone = _fit(one, tmp_path / "one", 1)
    both = _fit(two, tmp_path / "two", 2)
    torch.testing.assert_close(two.layer.weight, one.layer.weight)
    assert set(both.callback_metrics) == set(alone.callback_metrics) == {"train", "val"}
    for name, value in both.callback_metrics.items():
        torch.testing.assert_close(value, alone.callback_metrics[name])
    assert both.state.finished
    path = both.checkpoint_callback.best_model_path
    assert path.startswith(str(tmp_path / "two"))
    loaded = torch.load(path, weights_only=True)
    assert list(loaded["state_dict"]) == ["layer.weight", "layer.bias"]
    torch.testing.assert_close(loaded["state_dict"]["layer.weight"], one.layer.weight.detach())
    results = both.validate(two, DataLoader(DATA, batch_size=12), verbose=False)
    torch.testing.assert_close(torch.tensor(results[0]["val"]), one.layer(DATA).mean().detach())


def test_gan_in_manual_optimisation(tmp_path):
    one, two = Gan(), Gan()
    _fit(one, tmp_path / "one", 1, enable_checkpointing=False)
    _fit(two, tmp_path / "two", 2, enable_checkpointing=False)
    for (name, expected), tensor in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(tensor, expected, msg=name)


def test_error_of_a_rank_is_raised_here(tmp_path):
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1:
                raise KeyError("the reason")
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match="the reason"):
        _fit(Broken(), tmp_path, 2, enable_checkpointing=False)
