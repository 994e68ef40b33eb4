"""OnExceptionCheckpoint: one checkpoint when a run fails, to go on from."""

import os
from typing import TYPE_CHECKING

from leyden.base import files
from leyden.base.log import rank_zero_info, rank_zero_warn
from leyden.base.states import TrainerFn
from leyden.core.callback import Checkpoint

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["OnExceptionCheckpoint"]


class OnExceptionCheckpoint(Checkpoint):
    """Saves a checkpoint when training fails or is interrupted, and removes it when a training ends well.

    With this callback, ``trainer.fit(model)`` without ``ckpt_path`` goes on from that checkpoint if there is one.

    Args:
        dirpath: Folder or URL of the file; needed, because a failure may come before any logger has a folder.
        filename: Its name without extension; an older file of this name is overwritten.

    Raises:
        ValueError: If ``filename`` is empty.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: files.PathLike, filename: str = "on_exception") -> None:
        super().__init__()
        if not filename:
            raise ValueError("filename='' can't name a file: pass e.g. filename='on_exception'")
        self.dirpath = dirpath
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """Where the file is, or would be."""
        return files.join(os.fspath(self.dirpath), self.filename + self.FILE_EXTENSION)

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return  # nothing was trained, and a file from a failed training may be there
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except Exception as error:  # the first error is the one to be seen
            rank_zero_warn(f"could not save {self.ckpt_path!r} after {type(exception).__name__}: {error}")
        else:
            rank_zero_info(f"{type(exception).__name__} ({exception}): saved a checkpoint to {self.ckpt_path}")

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        if stage == TrainerFn.FITTING:
            trainer.strategy.remove_checkpoint(self.ckpt_path)
