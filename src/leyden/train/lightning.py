"""The names that scripts for Ray Train use with Lightning: the same behaviour, under the same names.

None of them is needed: in a worker a plain ``leyden.Trainer(devices="auto", accelerator="auto")`` finds its ranks,
reports and resumes. A script that uses one of them says itself what it reports, by `RayTrainReportCallback` or by its
own calls of `leyden.train.report`, and the Trainer adds nothing to that.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from leyden.base.errors import MisconfigurationException
from leyden.base.tree import to_scalars
from leyden.core.callback import Callback
from leyden.dist.worker import CheckpointNote, TrainWorkerEnvironment, current, fit_number
from leyden.strategies.base import Strategy
from leyden.strategies.ddp import DDPStrategy
from leyden.train.artifacts import Checkpoint, CheckpointUploadMode
from leyden.train.context import report

if TYPE_CHECKING:
    from leyden.core.module import LightningModule

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]


class RayLightningEnvironment(TrainWorkerEnvironment):
    """Ranks and world size of the worker; pass it in ``Trainer(plugins=[...])``."""

    reports_by_script = True


class RayDDPStrategy(DDPStrategy):
    """`DDPStrategy` on the device of the worker; its arguments are the same."""

    reports_by_script = True

    @property
    def root_device(self) -> torch.device:
        """The device that `leyden.train` gave to this worker."""
        worker = current()
        return super().root_device if worker is None else torch.device(worker.device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` of this worker."""
        worker = current()
        if worker is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": worker.info.world_size, "rank": worker.info.global_rank}


def _not_yet(name: str, kind: str) -> NoReturn:
    raise MisconfigurationException(
        f"{name}: sharded training ({kind}) is not in this version of Leyden; use RayDDPStrategy, which keeps a whole "
        "copy of the model on each device"
    )


class RayFSDPStrategy(Strategy):
    """The name of Ray Train's strategy for fully sharded training, which this version has not.

    Raises:
        MisconfigurationException: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_yet("RayFSDPStrategy", "FSDP")


class RayDeepSpeedStrategy(Strategy):
    """The name of Ray Train's strategy for DeepSpeed, which this version has not.

    Raises:
        MisconfigurationException: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_yet("RayDeepSpeedStrategy", "DeepSpeed")


class RayTrainReportCallback(Callback):
    """Reports all logged metrics and a checkpoint at the end of every training epoch.

    The folder of a checkpoint holds ``checkpoint.ckpt`` (`CHECKPOINT_NAME`); the metrics have ``epoch`` and ``step``
    besides what was logged. After a restart of the workers, ``trainer.fit(model)`` goes on from the last of them; an
    explicit ``ckpt_path`` comes first.

    Args:
        checkpoint_upload_mode: SYNC (default) or ASYNC, see `leyden.train.report`.
        validation: Only False: validation of checkpoints in a task of its own is not in this version.

    Raises:
        ValueError: The upload mode is NO_UPLOAD, or ``validation`` is not False.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"
    reports_by_script = True

    def __init__(self, checkpoint_upload_mode: CheckpointUploadMode | None = None, validation: Any = False) -> None:
        super().__init__()
        self.checkpoint_upload_mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        if self.checkpoint_upload_mode == CheckpointUploadMode.NO_UPLOAD:
            raise ValueError(
                "RayTrainReportCallback(checkpoint_upload_mode=NO_UPLOAD) writes to a temporary folder, which has to "
                "be uploaded; use SYNC or ASYNC, or write into the run's folder and call leyden.train.report yourself"
            )
        if validation is not False:
            raise ValueError(
                f"RayTrainReportCallback(validation={validation!r}) is not in this version; validate in the training, "
                "with val_dataloaders"
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        metrics = to_scalars(trainer.callback_metrics)
        metrics.update(epoch=trainer.current_epoch, step=trainer.global_step)
        folder = tempfile.mkdtemp(prefix="leyden-report-")
        background = self.checkpoint_upload_mode == CheckpointUploadMode.ASYNC
        try:
            path = os.path.join(folder, self.CHECKPOINT_NAME)
            trainer.save_checkpoint(path, weights_only=False)  # all ranks together; in DDP rank 0 writes the file
            checkpoint = None
            if os.path.exists(path):
                CheckpointNote(fit_number(), self.CHECKPOINT_NAME).write(folder)
                checkpoint = Checkpoint.from_directory(folder)
            report(
                metrics,
                checkpoint=checkpoint,
                checkpoint_upload_mode=self.checkpoint_upload_mode,
                delete_local_checkpoint_after_upload=background if checkpoint is not None else None,
            )
        except BaseException:
            background = False  # nobody else is going to remove it
            raise
        finally:
            if not background or not os.listdir(folder):
                shutil.rmtree(folder, ignore_errors=True)


def prepare_trainer(trainer: Any) -> Any:
    """Checks that a Trainer fits the worker that it was built in.

    Args:
        trainer: A `leyden.Trainer`.

    Returns:
        The same object.

    Raises:
        TypeError: It is no Trainer of Leyden.
        RuntimeError: Its strategy would not train together with the other workers.
    """
    strategy = getattr(trainer, "strategy", None)
    if not isinstance(strategy, Strategy):
        root = type(trainer).__module__.partition(".")[0]
        advice = f"; it is one of {root}'s: use leyden.Trainer" if root in ("lightning", "pytorch_lightning") else ""
        raise TypeError(f"prepare_trainer takes a leyden.Trainer, but this is a {type(trainer).__qualname__}{advice}")
    worker = current()
    if worker is None:
        return trainer
    environment = strategy.cluster_environment
    if environment is not None and not isinstance(environment, TrainWorkerEnvironment):
        raise RuntimeError(
            f"the Trainer has a {type(environment).__name__}, which does not know the ranks of leyden.train: pass "
            "plugins=[RayLightningEnvironment()], or leave the plugin out"
        )
    if strategy.distributed_sampler_kwargs is None and worker.info.world_size > 1:
        raise RuntimeError(
            f"{type(strategy).__name__} would train a model of its own in each of the {worker.info.world_size} "
            "workers: pass strategy=RayDDPStrategy(), or leave it at 'auto'"
        )
    return trainer


def __getattr__(name: str) -> Any:
    # The deprecated names; most scripts don't need what they import.
    if name in {"LightningConfigBuilder", "LightningTrainer"}:
        from leyden.train import legacy

        return getattr(legacy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
