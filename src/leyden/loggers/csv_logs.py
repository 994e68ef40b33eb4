"""Metrics as rows of ``metrics.csv``, hyperparameters in ``hparams.yaml``."""

import csv
import io
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from torch import Tensor

from leyden.base import files
from leyden.base.log import rank_zero_only, rank_zero_warn
from leyden.loggers.base import SAVE_INTERVAL_S, VersionedLogger, plain_number, rank_zero_experiment
from leyden.loggers.hparams_yaml import convert_params, save_hparams_to_yaml

__all__ = ["CSVLogger", "ExperimentWriter"]

# An object store can't append: the whole file goes up again, so it goes up less often.
_REMOTE_SAVE_INTERVAL_S = 30.0


class ExperimentWriter:
    """Holds rows until `save` appends them to ``metrics.csv``.

    The columns are sorted by name. A row with a new name rewrites the file once with the wider header; the old file
    stays whole until the new one has replaced it.

    Args:
        log_dir: Folder of the run, made if it isn't there; local or URL.

    Attributes:
        metrics: Rows that are not on disk yet, each with its ``"step"``.
        hparams: All hyperparameters logged so far.
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self.metrics_file_path = files.join(log_dir, self.NAME_METRICS_FILE)
        self.hparams: dict[str, Any] = {}
        self._local = files.is_local(log_dir)
        self._file: TextIO | None = None
        self._text = ""  # remote only: what the file holds
        self._rows = 0
        self._move_old_file()
        files.makedirs(log_dir)

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Adds hyperparameters and writes them all to ``hparams.yaml``."""
        self.hparams.update(params)
        save_hparams_to_yaml(files.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Keeps one row; ``step`` defaults to the number of rows logged so far."""
        if step is None:
            step = self._rows
        self._rows += 1
        row = {
            name: value if type(value) is float else plain_number(name, value) for name, value in metrics_dict.items()
        }
        row["step"] = step
        self.metrics.append(row)

    def save(self) -> None:
        """Writes the rows that are not on disk yet, now."""
        if not self.metrics:
            return
        rows, self.metrics = self.metrics, []
        rows = [
            {name: value.item() if isinstance(value, Tensor) else value for name, value in row.items()} for row in rows
        ]
        new = set().union(*rows).difference(self.metrics_keys)
        if new:
            self.metrics_keys = sorted([*self.metrics_keys, *new])
        self._append(rows, wider=bool(new))

    def close(self) -> None:
        """Writes what is left and closes the file; a later `save` opens it again."""
        self.save()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, rows: list[dict[str, Any]], wider: bool) -> None:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, fieldnames=self.metrics_keys)
        if wider:
            writer.writeheader()
            writer.writerows(csv.DictReader(io.StringIO(self._current_text(), newline="")))
        writer.writerows(rows)
        text = buffer.getvalue()
        if not self._local:
            self._text = text if wider else self._text + text
            self._replace(self._text)
        elif wider:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._replace(text)
        else:
            if self._file is None:
                self._file = open(files.local_path(self.metrics_file_path), "a", newline="")  # noqa: SIM115
            self._file.write(text)
            self._file.flush()

    def _current_text(self) -> str:
        if not self._local:
            return self._text
        path = files.local_path(self.metrics_file_path)
        if not os.path.isfile(path):
            return ""
        with open(path, newline="") as file:
            return file.read()

    def _replace(self, text: str) -> None:
        def write(file: Any) -> None:
            file.write(text.encode())

        files.atomic_write(self.metrics_file_path, write)

    def _move_old_file(self) -> None:
        """The metrics of an earlier run in the same folder stay, under another name."""
        if not files.exists(self.metrics_file_path):
            return
        number = 1
        while files.exists(kept := files.join(self.log_dir, f"metrics-{number}.csv")):
            number += 1
        if self._local:
            os.rename(files.local_path(self.metrics_file_path), files.local_path(kept))
        else:
            files.get_filesystem(kept).mv(self.metrics_file_path, kept)
        rank_zero_warn(
            f"{self.log_dir} holds the metrics of an earlier run: they were moved to {os.path.basename(kept)}."
            " Pass another `version` to CSVLogger to keep runs apart."
        )


class CSVLogger(VersionedLogger):
    """Logs to ``save_dir/name/version_N/metrics.csv``, and hyperparameters to ``hparams.yaml`` beside it.

    `log_metrics` only appends to a list in memory. Rows reach the file when a step ``s`` with ``(s + 1) %
    flush_logs_every_n_steps == 0`` is logged, at `save` when the last write is a second or longer ago (the Trainer
    calls it after every logged step), and always at `finalize`, also of a failed run. To write at once, call
    ``logger.experiment.save()``.

    Args:
        save_dir: Local folder or URL. A URL is written at most every 30 seconds, because object stores can't append.
        name: Folder of the experiment; None or ``""`` for none.
        version: Int N for ``version_N``, str for that folder name, None for the next free N.
        prefix: Put before each metric name, with a ``-``.
        flush_logs_every_n_steps: Rows of at most so many steps are held in memory.

    Raises:
        ValueError: If ``flush_logs_every_n_steps`` is below 1.

    Example:
        ``Trainer(logger=CSVLogger("logs", name="digits"))``
    """

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if flush_logs_every_n_steps < 1:
            raise ValueError(
                f"flush_logs_every_n_steps={flush_logs_every_n_steps} must be 1 or more: 1 writes at every step"
            )
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._next_save = 0.0

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer; made, with its folder, when first asked for."""
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir)
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace | None = None) -> None:
        """Adds to ``hparams.yaml``, which is written at once."""
        self.experiment.log_hparams(convert_params(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keeps a row; see the class for when it reaches the file."""
        writer = self._experiment or self.experiment
        writer.log_metrics(self._prefixed(metrics) if self._prefix else metrics, step)
        if (writer.metrics[-1]["step"] + 1) % self._flush_logs_every_n_steps == 0:
            self._save()

    @rank_zero_only
    def save(self) -> None:
        """Writes the rows held in memory if the last write is a second or longer ago."""
        if self._experiment is not None and monotonic() >= self._next_save:
            self._save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes all rows, whatever the status."""
        if self._experiment is not None:
            self._experiment.close()

    def _save(self) -> None:
        self._experiment.save()
        self._next_save = monotonic() + (SAVE_INTERVAL_S if files.is_local(self._save_dir) else _REMOTE_SAVE_INTERVAL_S)
