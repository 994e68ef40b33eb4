"""Where checkpoint files are, and their names: a template, the metrics that fill it, a version if a name is taken."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.base import files
from leyden.base.log import warn_once
from leyden.core.callback import Checkpoint

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer

__all__ = ["NamedCheckpoint", "matches_template", "missing_names", "render", "unused_name"]

# "{name}" or "{name:format}"; a name may hold dots, slashes and spaces
_FIELD = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")


def missing_names(template: str, metrics: Mapping[str, Any]) -> list[str]:
    """The names that ``template`` asks for and ``metrics`` does not have, in order."""
    return [name for name, _ in _FIELD.findall(template) if name not in metrics]


def render(template: str, metrics: Mapping[str, Any], equals: str | None) -> str:
    """Fills ``template`` from ``metrics``; a missing metric is 0.

    Args:
        template: Text with ``{name}`` or ``{name:format}``, the format as in ``str.format``.
        metrics: Numbers or tensors of one element.
        equals: What to write between a metric's name and its value (``epoch=3``); None writes the value alone.

    Raises:
        ValueError: If a format does not suit its value; names both.
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match[1], (match[2] or "")[1:]
        value = metrics.get(name, 0)
        try:
            text = format(value, spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"checkpoint name {template!r}: format {spec!r} does not suit {name}={value!r}") from error
        return text if equals is None else f"{name}{equals}{text}"

    return _FIELD.sub(fill, template)


def unused_name(name: Callable[[int | None], str], taken: Callable[[str], bool], first_version: int) -> str:
    """The first of ``name(None)``, ``name(first_version)``, ``name(first_version + 1)``, ... that isn't taken."""
    path, version = name(None), first_version
    while taken(path):
        path, version = name(version), version + 1
    return path


def matches_template(stem: str, template: str, join: str) -> bool:
    """Whether a file name without extension can come from ``template``, with a version behind it or not."""
    pattern, end = "", 0
    for field in _FIELD.finditer(template):
        pattern += re.escape(template[end : field.start()]) + ".+?"
        end = field.end()
    pattern += re.escape(template[end:])
    return re.fullmatch(rf"{pattern}({re.escape(join)}v?\d+)?", stem) is not None


class NamedCheckpoint(Checkpoint):
    """The part of `ModelCheckpoint` that knows the folder and the names; it saves nothing by itself.

    Class attributes can be set on an instance or a subclass; ``CHECKPOINT_NAME_LAST`` is a template as well.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    dirpath: str | None
    filename: str | None
    auto_insert_metric_name: bool
    last_model_path: str
    best_k_models: dict[str, Tensor]
    _enable_version_counter: bool

    def _resolve_dirpath(self, trainer: "Trainer") -> str:
        if self.dirpath is not None:
            return self.dirpath
        if not trainer.loggers:
            return files.join(trainer.default_root_dir, "checkpoints")
        logger = trainer.loggers[0]
        root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return files.join(root, str(logger.name), version, "checkpoints")

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """The path of a checkpoint: ``dirpath``, the filled template, a version, the extension.

        Args:
            metrics: What fills the template; a missing one is 0.
            filename: The template; default: that of this callback.
            ver: Written as ``-v<ver>``.
            prefix: Written before the name, joined by ``-``.

        Example:
            >>> ModelCheckpoint(filename="{epoch}-{loss:.2f}").format_checkpoint_name({"epoch": 2, "loss": 0.123})
            'epoch=2-loss=0.12.ckpt'
        """
        join = self.CHECKPOINT_JOIN_CHAR
        template = filename or self.filename or f"{{epoch}}{join}{{step}}"
        name = render(template, metrics, self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None)
        parts = [part for part in (prefix, name, None if ver is None else f"v{ver}") if part is not None]
        file = join.join(parts) + self.FILE_EXTENSION
        return files.join(self.dirpath, file) if self.dirpath else file

    def file_exists(self, filepath: files.PathLike, trainer: "Trainer") -> bool:
        """Whether rank 0 sees the file; the same answer on all ranks."""
        found = files.exists(filepath) if trainer.is_global_zero else False
        return trainer.strategy.reduce_boolean_decision(found, all=False)

    def _unused_path(self, trainer: "Trainer", metrics: dict[str, Tensor], overwrite: str) -> str:
        for name in missing_names(self.filename or "", metrics):
            warn_once(
                f"ModelCheckpoint(filename={self.filename!r}): {name!r} was not logged, 0 is written for it; there are "
                f"{sorted(metrics)}"
            )
        if not self._enable_version_counter:
            return self.format_checkpoint_name(metrics)
        return unused_name(
            lambda version: self.format_checkpoint_name(metrics, ver=version),
            lambda path: path != overwrite and self.file_exists(path, trainer),
            self.STARTING_VERSION,
        )

    def _last_path(self, trainer: "Trainer", metrics: dict[str, Tensor]) -> str:
        def name(version: int | None) -> str:
            return self.format_checkpoint_name(metrics, self.CHECKPOINT_NAME_LAST, ver=version)

        if not self._enable_version_counter or self._resumed_from_here(trainer):
            return name(None)
        return unused_name(
            name, lambda path: path != self.last_model_path and self.file_exists(path, trainer), self.STARTING_VERSION
        )

    def _resumed_from_here(self, trainer: "Trainer") -> bool:
        """Whether this run goes on from a file in ``dirpath``; the ``last`` file there is then its own."""
        if trainer.ckpt_path is None or self.dirpath is None:
            return False
        folder = files.parent(trainer.ckpt_path)
        if files.is_local(folder) and files.is_local(self.dirpath):
            return os.path.realpath(files.local_path(folder)) == os.path.realpath(files.local_path(self.dirpath))
        return folder == self.dirpath.rstrip("/")

    def _find_last_checkpoints(self, trainer: "Trainer") -> set[str]:
        """The ``last`` files in the folder: candidates for ``ckpt_path="last"``."""
        found = set()
        for path in files.list_dir(self._resolve_dirpath(trainer)):
            stem, extension = os.path.splitext(os.path.basename(path))
            if extension == self.FILE_EXTENSION and matches_template(
                stem, self.CHECKPOINT_NAME_LAST, self.CHECKPOINT_JOIN_CHAR
            ):
                found.add(path)
        return found

    def to_yaml(self, filepath: files.PathLike | None = None) -> None:
        """Writes ``best_k_models`` as YAML, path: score; by default to ``best_k_models.yaml`` in ``dirpath``."""
        import yaml

        if filepath is None:
            filepath = files.join(self.dirpath or "", "best_k_models.yaml")
        text = yaml.safe_dump({path: float(score) for path, score in self.best_k_models.items()})
        files.atomic_write(filepath, lambda file: file.write(text.encode()))

    def _should_remove_checkpoint(self, trainer: "Trainer", previous: str, current: str) -> bool:
        """Not when it was overwritten, is outside ``dirpath``, or is the file that training was resumed from."""
        resumed_from = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        if previous in (current, resumed_from):
            return False
        folder = self.dirpath or ""
        if not files.is_local(previous):
            return previous.startswith(folder.rstrip("/") + "/")
        old = Path(files.local_path(previous)).absolute()
        if resumed_from is not None and old == Path(files.local_path(resumed_from)).absolute():
            return False
        return Path(files.local_path(folder)).absolute() in old.parents
