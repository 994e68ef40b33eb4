"""The order of one short fit, written down: the contract that users, callbacks and plug-ins build on.

One epoch, two training batches, one validation batch, clipping, a scheduler per epoch. ``C`` is a callback, ``M`` the
module, ``D`` the datamodule, ``S`` the strategy, ``P`` the precision plug-in, ``L`` the logger. The order is the one
that Lightning 2.6 has; `tests/differential` compares many more runs with Lightning itself, this file says what it is.
"""

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import leyden as L
from leyden.core.hooks import HOOKS
from leyden.loggers import CSVLogger
from leyden.plugins.precision import Precision
from leyden.strategies import SingleDeviceStrategy

BATCH = """
    M.on_before_batch_transfer M.transfer_batch_to_device M.on_after_batch_transfer
    C.on_train_batch_start M.on_train_batch_start S.on_train_batch_start
    M.optimizer_step S.optimizer_step P.optimizer_step
    M.training_step M.forward
    C.on_before_zero_grad M.on_before_zero_grad M.optimizer_zero_grad
    S.pre_backward P.pre_backward C.on_before_backward M.on_before_backward
    M.backward C.on_after_backward M.on_after_backward S.post_backward
    C.on_before_optimizer_step M.on_before_optimizer_step
    M.configure_gradient_clipping M.clip_gradients P.clip_gradients
"""
VALIDATION = """
    M.on_validation_model_eval
    C.on_validation_start M.on_validation_start S.on_validation_start
    C.on_validation_epoch_start M.on_validation_epoch_start
    M.on_before_batch_transfer M.transfer_batch_to_device M.on_after_batch_transfer
    C.on_validation_batch_start M.on_validation_batch_start
    M.validation_step M.forward
    C.on_validation_batch_end M.on_validation_batch_end
    C.on_validation_epoch_end M.on_validation_epoch_end
"""
EXPECTED = f"""
    M.configure_callbacks S.setup_environment D.prepare_data
    D.setup C.setup M.setup
    M.configure_model
    S.setup P.convert_module S.model_to_device S.setup_optimizers M.configure_optimizers P.connect
    C.on_fit_start M.on_fit_start
    L.log_hyperparams
    C.on_sanity_check_start D.val_dataloader
    {VALIDATION}
    C.on_validation_end M.on_validation_end S.on_validation_end M.on_validation_model_train
    C.on_sanity_check_end
    D.train_dataloader
    C.on_train_start M.on_train_start S.on_train_start
    C.on_train_epoch_start M.on_train_epoch_start
    {BATCH}
    C.on_train_batch_end M.on_train_batch_end L.log_metrics
    {BATCH}
    M.lr_scheduler_step
    C.on_train_batch_end M.on_train_batch_end L.log_metrics
    M.on_validation_model_zero_grad
    {VALIDATION}
    L.log_metrics
    C.on_validation_end M.on_validation_end S.on_validation_end M.on_validation_model_train
    C.on_train_epoch_end M.on_train_epoch_end
    S.lightning_module_state_dict C.state_dict S.optimizer_state P.state_dict D.state_dict
    C.on_save_checkpoint M.on_save_checkpoint S.save_checkpoint
    L.log_metrics
    C.on_train_end M.on_train_end S.on_train_end
    S.teardown
    C.on_fit_end M.on_fit_end
    D.teardown C.teardown M.teardown
    L.finalize
""".split()


def record(cls: type, letter: str, names: list[str], events: list[str]) -> type:
    """A subclass of ``cls`` that notes each call of these methods before it runs them."""

    def noting(name: str) -> Any:
        inherited = getattr(cls, name)

        @functools.wraps(inherited)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(f"{letter}.{name}")
            return inherited(self, *args, **kwargs)

        del method.__wrapped__  # else it counts as not overridden
        return method

    return type(f"Recorded{cls.__name__}", (cls,), {name: noting(name) for name in names})


class Net(L.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2)


STRATEGY = [
    "setup_environment",
    "setup",
    "model_to_device",
    "setup_optimizers",
    "on_train_start",
    "on_train_end",
    "on_train_batch_start",
    "on_validation_start",
    "on_validation_end",
    "optimizer_step",
    "pre_backward",
    "post_backward",
    "lightning_module_state_dict",
    "optimizer_state",
    "save_checkpoint",
    "teardown",
]
PRECISION = ["convert_module", "connect", "pre_backward", "optimizer_step", "clip_gradients", "state_dict"]


@pytest.fixture
def events(tmp_path: Any) -> list[str]:
    noted: list[str] = []
    hooks = list(HOOKS.values())
    steps = ["forward", "clip_gradients"]
    skip = ("configure_sharded_model", "prepare_data", "state_dict", "load_state_dict", "on_load_checkpoint")
    of_module = [h.name for h in hooks if h.module and not h.name.endswith("_dataloader") and h.name not in skip]
    of_module = [name for name in dict.fromkeys([*of_module, *steps]) if hasattr(Net, name)]
    of_callback = [h.name for h in hooks if h.callback and h.name not in ("load_state_dict", "on_exception")]
    of_data = ["prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "state_dict"]
    strategy = record(SingleDeviceStrategy, "S", STRATEGY, noted)()
    strategy.precision_plugin = record(Precision, "P", PRECISION, noted)()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=strategy,
        callbacks=[record(L.Callback, "C", of_callback, noted)()],
        logger=record(CSVLogger, "L", ["log_hyperparams", "log_metrics", "finalize"], noted)(tmp_path),
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(record(Net, "M", of_module, noted)(), datamodule=record(Data, "D", of_data, noted)())
    return noted


def test_order_of_one_epoch(events: list[str]) -> None:
    assert events == EXPECTED
