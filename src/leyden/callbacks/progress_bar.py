"""The base class of progress bars, which knows totals, descriptions and metrics, and draws nothing."""

import sys
from typing import TYPE_CHECKING, Any

from leyden.base.log import rank_zero_warn
from leyden.core.callback import Callback

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["ProgressBar", "get_standard_metrics", "in_notebook"]


class ProgressBar(Callback):
    """Base class of progress bars, also of your own.

    The Trainer takes at most one callback of this type. A subclass implements `enable` and `disable`; this class knows
    the totals, the descriptions and the metrics to show.

    Example:
        ```
        class Percent(ProgressBar):
            def __init__(self):
                super().__init__()
                self.on = True

            def enable(self):
                self.on = True

            def disable(self):
                self.on = False

            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if self.on:
                    print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %", end="\\r")
        ```
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> "Trainer":
        """The trainer that the bar belongs to.

        Raises:
            TypeError: Before `setup` was called.
        """
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no trainer yet: it gets one when a run starts, in `setup`")
        return self._trainer

    @property
    def sanity_check_description(self) -> str:
        """What the bar of the sanity check is called."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """What the training bar is called before the first epoch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """What the validation bar is called."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """What the test bar is called."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """What the prediction bar is called."""
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """Batches of this epoch; ``inf`` when the loader has no length."""
        trainer = self.trainer
        batches = trainer.num_training_batches
        if trainer.max_epochs == -1 and trainer.max_steps is not None and trainer.max_steps > 0:
            return min(batches, trainer.max_steps - trainer.global_step)
        return batches

    @property
    def total_val_batches(self) -> int | float:
        """Batches of one validation over all its loaders; 0 in an epoch that isn't followed by one."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every != 0):
            return 0
        batches = trainer.num_val_batches
        return sum(batches) if isinstance(batches, list) else batches

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the validation (or sanity check) loader that is running."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of the test loader that is running."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of the prediction loader that is running."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, batches: Any) -> int | float:
        return batches[self._current_eval_dataloader_idx or 0] if isinstance(batches, list) else batches

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether this loader is another than at the last call."""
        changed = self._current_eval_dataloader_idx != dataloader_idx
        self._current_eval_dataloader_idx = dataloader_idx
        return changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Makes the next loader count as changed, whichever it is."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Shows nothing from here on; called on every rank but zero."""
        raise NotImplementedError(f"{type(self).__name__} must implement `disable`: it is called on ranks above zero")

    def enable(self) -> None:
        """Shows the bar again."""
        raise NotImplementedError(f"{type(self).__name__} must implement `enable`")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints without damage to the bar; arguments of the builtin ``print``."""
        print(*args, **kwargs)

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Takes the trainer, and disables the bar on ranks above zero."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(
        self, trainer: "Trainer", pl_module: "LightningModule"
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What the bar shows behind the numbers; override to add, drop or rename.

        Returns:
            ``v_num``, the version of the logger if there is one, and what was logged with ``prog_bar=True``.
        """
        standard: dict[str, Any] = get_standard_metrics(trainer)
        logged = trainer.progress_bar_metrics
        twice = standard.keys() & logged.keys()
        if twice:
            rank_zero_warn(
                f"the progress bar shows {', '.join(sorted(twice))} by itself; the metric that was logged under this"
                " name hides it. Log it under another name, or override `get_metrics` of the bar."
            )
        return {**standard, **logged}


def get_standard_metrics(trainer: "Trainer") -> dict[str, int | str]:
    """``v_num``: the loggers' version, joined by ``_`` if they differ; of a text the last four characters."""
    loggers = trainer.loggers
    if not loggers:
        return {}
    if len(loggers) == 1:
        version = loggers[0].version
    else:
        version = "_".join(dict.fromkeys(str(logger.version) for logger in loggers))
    if version in ("", None):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


def in_notebook() -> bool:
    """Whether the output goes to a notebook's page."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
