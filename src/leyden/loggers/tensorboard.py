"""Metrics, hyperparameters and graphs as TensorBoard event files."""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from leyden.base import files
from leyden.base.log import rank_zero_only, rank_zero_warn
from leyden.loggers.base import SAVE_INTERVAL_S, VersionedLogger, plain_number, rank_zero_experiment
from leyden.loggers.hparams_yaml import convert_params, flatten_dict, sanitize_params, save_hparams_to_yaml

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]

# Rows held in memory when nobody calls `save`.
_MOST_ROWS_HELD = 1000


class TensorBoardLogger(VersionedLogger):
    """Logs to ``save_dir/name/version_N[/sub_dir]`` in TensorBoard's format: the default logger.

    `log_metrics` only appends to a list in memory. The values reach the event file at `save` when the last write is a
    second or longer ago (the Trainer calls it after every logged step), whenever `experiment` is used, and always at
    `finalize`, also of a failed run. They carry the time at which they were logged.

    Args:
        save_dir: Local folder or URL.
        name: Folder of the experiment; None or ``""`` for none.
        version: Int N for ``version_N``, str for that folder name, None for the next free N.
        log_graph: Whether to record the model's graph; needs ``example_input_array`` on the module.
        default_hp_metric: Whether hyperparameters logged without metrics get the metric ``hp_metric=-1``, without
            which TensorBoard shows no hyperparameters.
        prefix: Put before each metric name, with a ``-``.
        sub_dir: Folder below the version's for the event file.
        **kwargs: For `torch.utils.tensorboard.SummaryWriter`.

    Example:
        ``Trainer(logger=TensorBoardLogger("logs", name="digits"))``, then ``tensorboard --logdir logs``.
    """

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs
        self.hparams: dict[str, Any] = {}
        self._rows: list[tuple[int | None, float, dict[str, Any]]] = []
        self._next_save = 0.0

    @property
    def sub_dir(self) -> str | None:
        """Folder below the version's for the event file, if one was given."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        """``save_dir/name/version[/sub_dir]`` with ``~`` and variables expanded."""
        folder = super().log_dir
        if self._sub_dir is not None:
            folder = files.join(folder, self._sub_dir)
        return os.path.expanduser(os.path.expandvars(folder))

    @property
    @rank_zero_experiment
    def experiment(self) -> "SummaryWriter":
        """The `SummaryWriter`, for images, text, histograms; holds all that was logged before it was asked for."""
        writer = self._writer()
        if self._rows:
            self._write_rows()
        return writer

    def _writer(self) -> "SummaryWriter":
        if self._experiment is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ModuleNotFoundError(
                    "TensorBoardLogger needs the package tensorboard: `pip install tensorboard`,"
                    " or use CSVLogger, which needs nothing"
                ) from error
            files.makedirs(self.root_dir)
            self._experiment = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keeps scalars; see the class for when they reach the file.

        Args:
            metrics: Name -> number, one-element tensor, or a dict of them (curves of one chart).
            step: Position on the x axis.

        Raises:
            ValueError: For a value that is none of these.
        """
        row: dict[str, Any] = {}
        for name, value in (self._prefixed(metrics) if self._prefix else metrics).items():
            if type(value) is float or type(value) is int:
                row[name] = value
            elif isinstance(value, dict):
                self.experiment.add_scalars(name, value, step)
            else:
                row[name] = _scalar(name, value)
        if row:
            self._rows.append((step, time(), row))
            if len(self._rows) >= _MOST_ROWS_HELD:
                self._write_rows()

    def _write_rows(self) -> None:
        """One event per row: the tensorboard package spends far more on an event than on a value in it."""
        rows, self._rows = self._rows, []
        writer = self._writer()
        file_writer = getattr(writer, "_get_file_writer", None)
        if file_writer is None:  # a writer of another package, put there by a subclass
            for step, when, row in rows:
                for name, value in row.items():
                    writer.add_scalar(name, float(value), step, when)
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        add_summary = file_writer().add_summary
        for step, when, row in rows:
            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in row.items()]
            add_summary(Summary(value=values), step, when)

    @rank_zero_only
    def log_hyperparams(
        self,
        params: Mapping[str, Any] | Namespace,
        metrics: dict[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Records hyperparameters, nested ones under ``a/b`` names; `save` writes them to ``hparams.yaml``.

        Args:
            params: Mapping or `Namespace`.
            metrics: Metrics to show with them; one number is named ``hp_metric``.
            step: Position on the x axis of ``metrics``.
        """
        params = plain = convert_params(params)
        if type(params).__module__.partition(".")[0] == "omegaconf":
            from omegaconf import OmegaConf

            self.hparams = OmegaConf.merge(self.hparams, params)  # pyright: ignore[reportAttributeAccessIssue]
            plain = OmegaConf.to_container(params, resolve=True)
        else:
            self.hparams.update(params)
        if metrics is None and self._default_hp_metric:
            metrics = {"hp_metric": -1}
        elif metrics is not None and not isinstance(metrics, dict):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        self.log_metrics(metrics, step)
        from torch.utils.tensorboard.summary import hparams

        file_writer = self.experiment._get_file_writer()
        for summary in hparams(_for_tensorboard(plain), metrics):
            file_writer.add_summary(summary, step)

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Any = None) -> None:
        """Records the graph of ``model`` if the logger was made with ``log_graph=True``.

        Args:
            model: Run once, under tracing.
            input_array: Tensor, or tuple of positional arguments; default ``model.example_input_array``.
        """
        if not self._log_graph:
            return
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if not isinstance(input_array, (Tensor, tuple)):
            got = "is not set" if input_array is None else f"is a {type(input_array).__name__}"
            rank_zero_warn(
                f"TensorBoardLogger(log_graph=True) records no graph: `example_input_array` {got};"
                " make it a tensor or a tuple of the arguments of `forward`"
            )
            return
        with _traced(model):
            self.experiment.add_graph(model, _on_device_of(model, input_array))

    @rank_zero_only
    def save(self) -> None:
        """Makes what was logged visible to readers if the last write is a second or longer ago."""
        now = monotonic()
        if now >= self._next_save:
            self._save()
            self._next_save = monotonic() + SAVE_INTERVAL_S

    def _save(self) -> None:
        self.experiment.flush()
        folder = self.log_dir
        path = files.join(folder, self.NAME_HPARAMS_FILE)
        if not files.exists(path) and files.is_dir(folder):
            save_hparams_to_yaml(path, self.hparams)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes everything and closes the event file, whatever the status; more logging opens another."""
        if self._experiment is None and not self._rows:
            return
        self._save()
        self._writer().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rows": []}


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return plain_number(name, value)
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):
        value = repr(value)
    raise ValueError(
        f"can't log {name}={value!r} to TensorBoard: give a number, a tensor of one element, or a dict of them"
    )


def _for_tensorboard(params: Mapping[str, Any]) -> dict[str, Any]:
    """Flat and of types that the hyperparameter plugin takes; arrays with more than one dimension as text."""
    clean = sanitize_params(flatten_dict(params))
    return {name: str(value) if getattr(value, "ndim", 0) > 1 else value for name, value in clean.items()}


@contextmanager
def _traced(model: Module) -> Iterator[None]:
    """Tracing looks at every attribute, and a module that has no trainer refuses to show one unless it is told."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_jit_is_scripting")]
    for module in modules:
        module._jit_is_scripting = True
    try:
        yield
    finally:
        for module in modules:
            del module._jit_is_scripting


def _on_device_of(model: Module, batch: Any) -> Any:
    """The example batch through the module's transfer hooks, if it has them, else on the device of its parameters."""
    transfer = getattr(model, "transfer_batch_to_device", None)
    device = getattr(model, "device", None) or next((p.device for p in model.parameters()), None)
    if callable(transfer):
        batch = model.on_before_batch_transfer(batch, 0)  # pyright: ignore[reportCallIssue]
        return model.on_after_batch_transfer(transfer(batch, device, 0), 0)  # pyright: ignore[reportCallIssue]
    from leyden.base.tree import move_to_device

    return batch if device is None else move_to_device(batch, device)
