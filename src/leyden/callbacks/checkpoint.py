"""ModelCheckpoint: when a checkpoint is saved, under which name, and which ones are kept."""

import os
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import proxy

import torch
from torch import Tensor

from leyden.base import files
from leyden.base.errors import MisconfigurationException, raise_all
from leyden.base.log import log, rank_zero_info, rank_zero_warn, warn_once
from leyden.base.states import TrainerFn
from leyden.callbacks.checkpoint_names import NamedCheckpoint
from leyden.callbacks.checkpoint_timing import validation_follows
from leyden.callbacks.shared_clock import SharedClock
from leyden.checkpoint.retain import Entry, Mode, best, qualifies, rankable, retain, worst

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(NamedCheckpoint):
    """Saves checkpoints while training: the best ones by a logged metric, or the newest, and a ``last`` one.

    A new file is complete before an old one is removed, and a failed save leaves the old ones in place. Never removed
    are the file that training was resumed from, and files outside ``dirpath``.

    Args:
        dirpath: Folder or URL. Default: ``<logger folder>/checkpoints``, or ``<default_root_dir>/checkpoints`` without
            a logger.
        filename: Template without extension, e.g. ``"{epoch}-{val_loss:.2f}"``; filled from what was logged, ``epoch``
            (from 0) and ``step`` (optimizer steps). Default: ``"{epoch}-{step}"``.
        monitor: The logged metric to rank by. None: the newest is the best.
        verbose: Say what is saved and what is not.
        save_last: True: also write ``last.ckpt`` at each save. ``"link"``: make it a symbolic link to the newest file.
        save_top_k: How many to keep; -1 all, 0 none. More than 1 needs ``monitor``.
        save_on_exception: Also save when the training fails or is interrupted.
        save_weights_only: Leave out optimizers, schedulers and callbacks; a training can't go on from such a file.
        mode: ``"min"`` when low values of ``monitor`` are good, ``"max"`` when high ones are.
        auto_insert_metric_name: Write ``epoch=3`` rather than ``3``. Set it to False for metrics with ``/`` in their
            name, which would become folders.
        every_n_train_steps: Save after every so many optimizer steps; 0 never.
        train_time_interval: Save when so much time has passed since the last such save.
        every_n_epochs: Save after every so many epochs; 0 never. The default, with 1, when none of the three is given;
            they exclude each other.
        save_on_train_epoch_end: True: save at the end of an epoch; False: at the end of validation; None: the former
            if validation runs once in every epoch, or never.
        enable_version_counter: Add ``-v1``, ``-v2``, ... to a name that is taken, instead of overwriting the file.

    Attributes:
        best_model_path: The best file saved so far; ``""`` before the first.
        best_model_score: Its value of ``monitor``.
        best_k_models: Path -> value of ``monitor``, of all that are kept.
        kth_best_model_path: The one that goes next; with ``kth_value``, once ``save_top_k`` are there.
        last_model_path: The ``last`` file.
        current_score: The value of ``monitor`` at the newest save.

    Raises:
        MisconfigurationException: If arguments are out of range or exclude each other; all problems at once.
    """

    def __init__(
        self,
        dirpath: files.PathLike | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.filename = filename
        self.dirpath = None
        if dirpath:
            local = files.is_local(dirpath)
            self.dirpath = os.path.realpath(os.path.expanduser(files.local_path(dirpath))) if local else str(dirpath)
        if every_n_train_steps is None and train_time_interval is None and every_n_epochs is None:
            every_n_epochs = 1
        self._every_n_train_steps = every_n_train_steps or 0
        self._every_n_epochs = every_n_epochs or 0
        self._train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        raise_all(self._problems(), "ModelCheckpoint(...)")

        self.current_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_score: Tensor | None = None
        self.best_model_path = ""
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)
        self.last_model_path = ""

        self._last_global_step_saved = 0  # before the first step there is nothing to save
        self._last_checkpoint_saved = ""
        self._next_step = 0
        self._clock: SharedClock | None = None
        self._save_after_validation = False
        self._validation_has_run = False
        # The only thing that is looked at after each batch when saves are due per epoch.
        self._saves_between_batches = self._every_n_train_steps > 0 or train_time_interval is not None

    def _problems(self) -> list[str]:
        problems = []
        if self.mode not in ("min", "max"):
            problems.append(f"mode={self.mode!r} is not known: pass 'min' or 'max'")
        if self.save_top_k < -1:
            problems.append(f"save_top_k={self.save_top_k} must be >= -1 (-1 keeps all)")
        elif self.monitor is None and self.save_top_k > 1:
            problems.append(
                f"save_top_k={self.save_top_k} needs a metric to rank by: pass monitor='...', or save_top_k -1, 0 or 1"
            )
        counts = {"every_n_train_steps": self._every_n_train_steps, "every_n_epochs": self._every_n_epochs}
        problems += [f"{name}={n} must be >= 0 (0 switches it off)" for name, n in counts.items() if n < 0]
        triggers = {
            "every_n_train_steps": self._every_n_train_steps > 0,
            "every_n_epochs": self._every_n_epochs > 0,
            "train_time_interval": self._train_time_interval is not None,
        }
        if sum(triggers.values()) > 1:
            given = " and ".join(name for name, on in triggers.items() if on)
            problems.append(f"{given} are mutually exclusive: use one ModelCheckpoint for each")
        if self.save_last not in (None, True, False, "link"):
            problems.append(f"save_last={self.save_last!r} is not known: pass True, False or 'link'")
        return problems

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    @property
    def every_n_epochs(self) -> int | None:
        """Epochs between two saves; 0 when they are due by steps or by time."""
        return self._every_n_epochs

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        self.dirpath = dirpath = trainer.strategy.broadcast(self._resolve_dirpath(trainer))
        if self.save_last == "link" and not files.is_local(dirpath):
            raise ValueError(
                f"ModelCheckpoint(save_last='link', dirpath={dirpath!r}): only a local folder can hold a link; "
                "pass save_last=True"
            )
        if stage == TrainerFn.FITTING and trainer.is_global_zero:
            swept = files.sweep_unfinished(dirpath)
            if swept:
                log.info("removed %d unfinished checkpoints that an earlier run left in %s", len(swept), dirpath)
            if self.save_top_k != 0 and files.list_dir(dirpath):
                rank_zero_warn(f"ModelCheckpoint: the folder {dirpath} already has files in it")

    @property
    def _idle_hooks(self) -> frozenset[str]:
        """See `Callback._idle_hooks`: without a trigger between batches there is nothing to do after one."""
        untouched = type(self).on_train_batch_end is ModelCheckpoint.on_train_batch_end
        return frozenset() if self._saves_between_batches or not untouched else frozenset({"on_train_batch_end"})

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if self._every_n_train_steps > 0:
            self._next_step = (trainer.global_step // self._every_n_train_steps + 1) * self._every_n_train_steps
        if self._train_time_interval is not None:
            self._clock = SharedClock(self._train_time_interval.total_seconds(), trainer.strategy, time.monotonic)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._saves_between_batches:
            return
        if self._clock is not None:
            if not self._clock.due():
                return
        elif trainer.global_step < self._next_step:
            return
        else:
            # Several optimizers may step over a multiple; it counts all the same.
            self._next_step = (trainer.global_step // self._every_n_train_steps + 1) * self._every_n_train_steps
        self._save_between_batches(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if not self._nothing_to_save(trainer) and self._should_save_on_train_epoch_end(trainer):
            self._save_per_epoch(trainer)

    def on_validation_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validation_has_run = True
        if self._save_after_validation:
            self._save_after_validation = False
            if not self._nothing_to_save(trainer):
                self._save_now(trainer)
        elif not self._nothing_to_save(trainer) and not self._should_save_on_train_epoch_end(trainer):
            self._save_per_epoch(trainer)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if self.save_last and not self._last_checkpoint_saved and not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        if not self.save_on_exception or self._nothing_to_save(trainer):
            return
        metrics = self._monitor_candidates(trainer)
        path = self.format_checkpoint_name(metrics)
        try:
            self._save_checkpoint(trainer, path)
            self._save_last_checkpoint(trainer, metrics)
        except Exception as error:  # the first error is the one to be seen
            rank_zero_warn(f"could not save a checkpoint after {type(exception).__name__}: {error}")
            return
        rank_zero_info(f"{type(exception).__name__} ({exception}): saved a checkpoint to {path}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": self.best_k_models,
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved_dirpath = state_dict.get("dirpath", self.dirpath)
        self.best_model_path = state_dict["best_model_path"]
        if saved_dirpath != self.dirpath:
            warnings.warn(
                f"ModelCheckpoint saves to {self.dirpath!r}, the resumed run saved to {saved_dirpath!r}: of that run's "
                "record of saved files only `best_model_path` is taken over",
                stacklevel=2,
            )
            return
        self.best_model_score = state_dict["best_model_score"]
        for name in ("kth_best_model_path", "kth_value", "best_k_models", "last_model_path"):
            setattr(self, name, state_dict.get(name, getattr(self, name)))

    def _nothing_to_save(self, trainer: "Trainer") -> bool:
        return (
            bool(trainer.fast_dev_run)
            or trainer.state.fn != TrainerFn.FITTING
            or trainer.sanity_checking
            or self._last_global_step_saved == trainer.global_step
        )

    def _should_save_on_train_epoch_end(self, trainer: "Trainer") -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.val_check_time is not None or trainer.check_val_every_n_epoch != 1:
            return False
        return sum(trainer.num_val_batches) == 0 or trainer.val_check_interval == 1.0

    def _save_between_batches(self, trainer: "Trainer", batch_idx: int) -> None:
        if self._nothing_to_save(trainer):
            return
        # A metric that validation logs is missing, or is an old one, until the validation that follows is over.
        if self.monitor is not None and (
            self.monitor not in trainer.callback_metrics or validation_follows(trainer, batch_idx)
        ):
            self._save_after_validation = True
            return
        self._save_now(trainer)

    def _save_now(self, trainer: "Trainer") -> None:
        metrics = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, metrics)
        self._save_last_checkpoint(trainer, metrics)

    def _save_per_epoch(self, trainer: "Trainer") -> None:
        metrics = self._monitor_candidates(trainer)
        if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save_topk_checkpoint(trainer, metrics)
        saved_now = self._last_global_step_saved == trainer.global_step
        if saved_now or (self.save_last == "link" and self._last_checkpoint_saved):
            self._save_last_checkpoint(trainer, metrics)

    def check_monitor_top_k(self, trainer: "Trainer", current: Tensor | None = None) -> bool:
        """Whether a checkpoint with this value of ``monitor`` would be kept; the same answer on all ranks."""
        if current is None:
            return False
        chosen = qualifies(float(current), self._entries(), self.save_top_k, cast(Mode, self.mode))
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return chosen
        # A metric that isn't synchronised may differ between ranks; a save needs all of them.
        return trainer.strategy.reduce_boolean_decision(chosen)

    def _entries(self) -> list[Entry]:
        return [Entry(path, float(score)) for path, score in self.best_k_models.items()]

    def _monitor_candidates(self, trainer: "Trainer") -> dict[str, Tensor]:
        """The logged metrics as they are now, with ``epoch`` and ``step`` as whole numbers."""
        logged = trainer.callback_metrics
        metrics: dict[str, Any] = {
            name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in logged.items()
        }
        for name, value in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            own: Any = metrics.get(name)  # a user may log them; anything but a tensor is a mistake
            metrics[name] = own.int() if isinstance(own, Tensor) else torch.tensor(value)
        return metrics

    def _save_topk_checkpoint(self, trainer: "Trainer", metrics: dict[str, Tensor]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_newest(trainer, metrics)
            return
        current = metrics.get(self.monitor)
        if current is None:
            message = (
                f"ModelCheckpoint(monitor={self.monitor!r}) finds no such metric; there are {sorted(metrics)}. "
                f"Call `self.log({self.monitor!r}, value)` in the module, or monitor one of these"
            )
            if self._validation_has_run:
                raise MisconfigurationException(message)
            warn_once(message)  # the first validation may still log it
        elif self.check_monitor_top_k(trainer, current):
            self._save_ranked(trainer, current, metrics)
        elif self.verbose:
            rank_zero_info(
                f"epoch {int(metrics['epoch'])}, step {int(metrics['step'])}: {self.monitor}={float(current):.5f} is "
                f"not among the {self.save_top_k} best, nothing is saved"
            )

    def _save_newest(self, trainer: "Trainer", metrics: dict[str, Tensor]) -> None:
        previous = self.best_model_path
        path = self._unused_path(trainer, metrics, overwrite=previous)
        self._save_checkpoint(trainer, path, best_model_path=path)
        if self.save_top_k == 1:
            self._remove(trainer, previous, path)

    def _save_ranked(self, trainer: "Trainer", current: Tensor, metrics: dict[str, Tensor]) -> None:
        mode = cast(Mode, self.mode)
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        score = torch.as_tensor(current)
        if torch.isnan(score):
            score = torch.full_like(score, rankable(float("nan"), mode))
        entries = self._entries()
        # Room is made before the new file gets its name, which may then be that of the one that goes.
        keep, drop = retain(entries, k - 1, mode)
        gone = drop[0].path if drop else ""
        path = self._unused_path(trainer, metrics, overwrite=gone)
        models = {each.path: self.best_k_models[each.path] for each in keep}
        models[path] = score
        entries = [Entry(each, float(value)) for each, value in models.items()]
        top = best(entries, mode).path
        changes: dict[str, Any] = {
            "best_k_models": models,
            "current_score": score,
            "best_model_path": top,
            "best_model_score": models[top],
        }
        if len(models) == k:
            changes["kth_best_model_path"] = worst(entries, mode).path
            changes["kth_value"] = models[changes["kth_best_model_path"]]
        if self.verbose:
            rank_zero_info(
                f"epoch {int(metrics['epoch'])}, step {int(metrics['step'])}: {self.monitor}={float(score):.5f} is "
                f"among the {k} best (the best is {float(models[top]):.5f}); saving to {path!r}"
            )
        self._save_checkpoint(trainer, path, **changes)
        for each in drop:
            self._remove(trainer, each.path, path)

    def _save_last_checkpoint(self, trainer: "Trainer", metrics: dict[str, Tensor]) -> None:
        if not self.save_last:
            return
        previous = self.last_model_path
        path = self._last_path(trainer, metrics)
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            self.last_model_path = path
            if trainer.is_global_zero:
                files.replace_link(self._last_checkpoint_saved, path)
            trainer.strategy.barrier()
        else:
            self._save_checkpoint(trainer, path, last_model_path=path)
        self._remove(trainer, previous, path)

    def _save_checkpoint(self, trainer: "Trainer", filepath: str, **changes: Any) -> None:
        """Saves with ``changes`` made to this object, which are part of the file; takes them back if that fails."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            trainer.save_checkpoint(filepath, self.save_weights_only)
        except BaseException:
            vars(self).update(before)
            raise
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _remove(self, trainer: "Trainer", previous: str, current: str) -> None:
        if previous and self._should_remove_checkpoint(trainer, previous, current):
            try:
                trainer.strategy.remove_checkpoint(previous)
            except OSError as error:  # a file too many is no reason to end a training
                rank_zero_warn(f"could not remove the old checkpoint {previous!r}: {error}")
