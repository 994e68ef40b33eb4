"""What a run is asked to be: workers, storage, checkpoints, failures. Fields and defaults are those of Ray Train 2.60.

Each class checks all its values when it is made, and lists everything that is wrong in one `ConfigError`.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from typing import Any, Literal

from leyden.base import files
from leyden.train.checks import UNSET, ConfigError, gone, is_int, is_number, one_of, refuse
from leyden.train.resources import resource_problems

__all__ = ["CheckpointConfig", "ConfigError", "FailureConfig", "LoggingConfig", "RunConfig", "ScalingConfig"]

DEFAULT_STORAGE_PATH = "~/leyden_results"

_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_RESUMES = ("auto", "never", "must")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass
class ScalingConfig:
    """How many workers, and what each of them needs.

    Attributes:
        num_workers: How many; ``(least, most)`` for a run that goes on with fewer, and grows when there is room again;
            0 runs the function in this process.
        use_gpu: Give each worker a GPU.
        resources_per_worker: ``{"CPU": 4, "GPU": 1, "memory": 8 * 1024**3}`` and names of your own. Default: one CPU,
            or one GPU with ``use_gpu``.
        placement_strategy: "PACK" on few nodes, "SPREAD" over many; STRICT_ forms refuse what can't be so.
        accelerator_type: Only GPUs of this type, as Ray names them (``"A100"``). Doesn't imply ``use_gpu``.
        label_selector: Only nodes with these labels: one dict for all workers, or a list with one for each.
        elastic_resize_monitor_interval_s: Seconds between looks for more room, in an elastic run.
        use_tpu, topology: Not supported; refused when set.
        trainer_resources: Gone; refused when set.

    Raises:
        ConfigError: Listing all wrong values.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: dict[str, str] | list[dict[str, str]] | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    use_tpu: bool = False
    topology: str | None = None
    trainer_resources: dict[str, float] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `ConfigError` for the values of now; called when the object is made, and before a run."""
        problems = self._worker_problems()
        if not isinstance(self.use_gpu, bool):
            problems.append(f"use_gpu={self.use_gpu!r}: pass True or False; how many is num_workers")
        problems += resource_problems(self.resources_per_worker, bool(self.use_gpu))
        problems += one_of("placement_strategy", self.placement_strategy, _PLACEMENTS)
        if self.accelerator_type is not None and (
            not isinstance(self.accelerator_type, str) or not self.accelerator_type
        ):
            problems.append(f"accelerator_type={self.accelerator_type!r}: pass a name such as 'A100', or None")
        problems += self._label_problems()
        if not is_number(self.elastic_resize_monitor_interval_s) or self.elastic_resize_monitor_interval_s < 0:
            problems.append(
                f"elastic_resize_monitor_interval_s={self.elastic_resize_monitor_interval_s!r}: pass seconds, 0 or more"
            )
        if self.use_tpu or self.topology is not None:
            problems.append("use_tpu and topology: TPUs are not supported; use CPUs, or GPUs with use_gpu=True")
        if self.trainer_resources is not None:
            problems.append(
                "trainer_resources is gone: the controller runs in the driver and reserves nothing; remove it"
            )
        refuse(problems, "ScalingConfig(...)")

    def _worker_problems(self) -> list[str]:
        number = self.num_workers
        if isinstance(number, tuple):
            if len(number) != 2 or not all(map(is_int, number)):
                return [f"num_workers={number!r}: an elastic run takes two whole numbers, (least, most)"]
            if not 1 <= number[0] <= number[1]:
                return [f"num_workers={number!r}: pass (least, most) with 1 <= least <= most"]
            return []
        if not is_int(number):
            return [f"num_workers={number!r}: pass a whole number, or (least, most) for an elastic run"]
        if number < 0:
            return [f"num_workers={number}: pass 1 or more, or 0 to run in this process"]
        return []

    def _label_problems(self) -> list[str]:
        labels = self.label_selector
        if labels is None:
            return []
        each = labels if isinstance(labels, list) else [labels]
        if not all(isinstance(one, dict) and all(isinstance(x, str) for kv in one.items() for x in kv) for one in each):
            return [f"label_selector={labels!r}: pass a dict of text to text, or a list of such dicts"]
        if isinstance(labels, list) and not self._worker_problems() and len(labels) != self.max_workers:
            return [f"label_selector has {len(labels)} entries for {self.max_workers} workers: pass one for each"]
        return []

    @property
    def elasticity_enabled(self) -> bool:
        """Whether the number of workers may change during the run."""
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """The run can start, and go on, with this many."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The run never has more."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def worker_resources(self) -> dict[str, float]:
        """What each worker needs, defaults filled in, without zeros: what is asked of Ray for it."""
        given = dict(self.resources_per_worker or {})
        if self.use_gpu:
            given.setdefault("GPU", 1)
        elif not given:
            given["CPU"] = 1
        return {name: amount for name, amount in given.items() if amount}

    @property
    def total_resources(self) -> dict[str, float]:
        """What ``max_workers`` need together."""
        return {name: amount * self.max_workers for name, amount in self.worker_resources.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of each worker."""
        return self.worker_resources.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of each worker."""
        return self.worker_resources.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """Always 0: TPUs are not supported."""
        return 0

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What each worker needs beside CPUs and GPUs."""
        return {name: amount for name, amount in self.worker_resources.items() if name not in ("CPU", "GPU")}


@dataclass
class CheckpointConfig:
    """Which checkpoints to keep.

    Attributes:
        num_to_keep: How many, at least 1; None for all. The newest is kept beside them, because a restart needs it.
        checkpoint_score_attribute: The reported metric that ranks them (``"a/b"`` for ``{"a": {"b": ...}}``); None: the
            newest are kept. One without this metric, or with NaN, ranks last.
        checkpoint_score_order: "max" when high is good, or "min".
        checkpoint_frequency, checkpoint_at_end: Gone; refused when set.

    Raises:
        ConfigError: Listing all wrong values.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: InitVar[Any] = UNSET
    checkpoint_at_end: InitVar[Any] = UNSET

    def __post_init__(self, checkpoint_frequency: Any, checkpoint_at_end: Any) -> None:
        advice = "your function decides when, by calling leyden.train.report(metrics, checkpoint=...)"
        old = {"checkpoint_frequency": checkpoint_frequency, "checkpoint_at_end": checkpoint_at_end}
        self.check(gone(old, dict.fromkeys(old, advice)))

    def check(self, problems: Sequence[str] = ()) -> None:
        """Raises `ConfigError` for the values of now, and for ``problems``."""
        found = list(problems)
        if self.num_to_keep is not None and (not is_int(self.num_to_keep) or self.num_to_keep < 1):
            found.append(f"num_to_keep={self.num_to_keep!r}: pass 1 or more, or None to keep all")
        attribute = self.checkpoint_score_attribute
        if attribute is not None and (not isinstance(attribute, str) or not attribute):
            found.append(f"checkpoint_score_attribute={attribute!r}: pass the name of a reported metric, or None")
        found += one_of("checkpoint_score_order", self.checkpoint_score_order, ("max", "min"))
        refuse(found, "CheckpointConfig(...)")


@dataclass
class FailureConfig:
    """How often to start again.

    Attributes:
        max_failures: Restarts after an error in the function, or the death of a worker or node; -1: no limit.
        controller_failure_limit: Restarts after workers that could not start, with growing waits; -1: no limit.
        max_preemption_failures: Restarts after the platform took a node away; -1: no limit.
        relax_collectives_on_preemption, preemption_grace_s: Not supported; refused unless left at their defaults.
        hang_timeout_s: A rank that shows no sign of progress (a report, output) for so long has failed; None: never.
        fail_fast: Gone; refused when set.

    Raises:
        ConfigError: Listing all wrong values.
    """

    max_failures: int = 0
    controller_failure_limit: int = 3
    max_preemption_failures: int = -1
    relax_collectives_on_preemption: bool = False
    preemption_grace_s: float = 0.0
    hang_timeout_s: float | None = None
    fail_fast: InitVar[Any] = UNSET

    def __post_init__(self, fail_fast: Any) -> None:
        self.check(gone({"fail_fast": fail_fast}, {"fail_fast": "max_failures=0 ends the run at the first failure"}))

    def check(self, problems: Sequence[str] = ()) -> None:
        """Raises `ConfigError` for the values of now, and for ``problems``."""
        found = list(problems)
        for name in ("max_failures", "controller_failure_limit", "max_preemption_failures"):
            value = getattr(self, name)
            if not is_int(value) or value < -1:
                found.append(f"{name}={value!r}: pass 0 or more, or -1 for no limit")
        if self.relax_collectives_on_preemption is not False or self.preemption_grace_s != 0:
            found.append(
                "relax_collectives_on_preemption and preemption_grace_s are not supported: after a preemption the run "
                "starts again from the last committed checkpoint; remove them"
            )
        hang = self.hang_timeout_s
        if hang is not None and (not is_number(hang) or hang <= 0):
            found.append(f"hang_timeout_s={hang!r}: pass seconds, more than 0, or None")
        refuse(found, "FailureConfig(...)")


@dataclass
class LoggingConfig:
    """How much the orchestrator itself says.

    Attributes:
        log_level: "DEBUG" to "CRITICAL".

    Raises:
        ConfigError: For an unknown level.
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        refuse(one_of("log_level", self.log_level, _LEVELS), "LoggingConfig(...)")


def _new_name() -> str:
    return f"leyden_run-{datetime.now():%Y-%m-%d_%H-%M-%S}-{uuid.uuid4().hex[:6]}"


_RUN_GONE = {
    "sync_config": "the run folder is written in place; storage_options has the settings of the store",
    "verbose": "use logging_config=LoggingConfig(log_level=...)",
    "stop": "return from your function when it is done",
    "progress_reporter": "rank 0's output is shown live, and callbacks get each report",
    "log_to_file": "each rank's output is in the run folder, logs/rank-N.log",
}


@dataclass
class RunConfig:
    """Where a run lives, and how it is kept going.

    Attributes:
        name: The folder of the run under ``storage_path``. A new name is made up when it is None.
        storage_path: A folder that all nodes reach, or a URL such as ``s3://bucket/path``. Default: ~/leyden_results.
        storage_filesystem: An fsspec or pyarrow file system to use for ``storage_path``.
        failure_config, checkpoint_config: See these classes.
        callbacks: `UserCallback` objects, called in the driver.
        worker_runtime_env: Ray's ``runtime_env`` for the workers; ``{"env_vars": {...}}`` works on every back end.
        logging_config: See this class.
        storage_options: For the file system: credentials, ``endpoint_url``, ... ``"retry"``: a `RetryPolicy`.
        resume: For a name that exists. "auto": go on with an unfinished run, refuse a finished one; "never": refuse
            both; "must": go on with either, and refuse a name that does not exist.
        sync_config, verbose, stop, progress_reporter, log_to_file: Gone; refused when set.

    Raises:
        ConfigError: Listing all wrong values.
    """

    name: str | None = None
    storage_path: files.PathLike | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[Any] | None = None
    worker_runtime_env: dict[str, Any] | None = None
    logging_config: LoggingConfig | None = None
    storage_options: dict[str, Any] | None = None
    resume: Literal["auto", "never", "must"] = "auto"
    sync_config: InitVar[Any] = UNSET
    verbose: InitVar[Any] = UNSET
    stop: InitVar[Any] = UNSET
    progress_reporter: InitVar[Any] = UNSET
    log_to_file: InitVar[Any] = UNSET
    generated_name: bool = field(default=False, init=False, repr=False)

    def __post_init__(
        self, sync_config: Any, verbose: Any, stop: Any, progress_reporter: Any, log_to_file: Any
    ) -> None:
        values = (sync_config, verbose, stop, progress_reporter, log_to_file)
        if self.name is None:
            self.name, self.generated_name = _new_name(), True
        if self.storage_path is None:
            self.storage_path = DEFAULT_STORAGE_PATH
        self.failure_config = FailureConfig() if self.failure_config is None else self.failure_config
        self.checkpoint_config = CheckpointConfig() if self.checkpoint_config is None else self.checkpoint_config
        self.logging_config = LoggingConfig() if self.logging_config is None else self.logging_config
        self.callbacks = [] if self.callbacks is None else self.callbacks
        self.worker_runtime_env = {} if self.worker_runtime_env is None else self.worker_runtime_env
        self.storage_options = {} if self.storage_options is None else self.storage_options
        self.check(gone(dict(zip(_RUN_GONE, values, strict=True)), _RUN_GONE))

    def check(self, problems: Sequence[str] = ()) -> None:
        """Raises `ConfigError` for the values of now, and for ``problems``."""
        found = [*problems, *_name_problems(self.name)]
        if not isinstance(self.storage_path, (str, os.PathLike)) or not os.fspath(self.storage_path):
            found.append(f"storage_path={self.storage_path!r}: pass a folder, or a URL such as 's3://bucket/path'")
        kinds = {
            "failure_config": FailureConfig,
            "checkpoint_config": CheckpointConfig,
            "logging_config": LoggingConfig,
            "callbacks": list,
            "worker_runtime_env": dict,
            "storage_options": dict,
        }
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                found.append(f"{name}={getattr(self, name)!r}: pass a {kind.__name__}")
        classes = [each.__name__ for each in self.callbacks or () if isinstance(each, type)]
        if classes:
            found.append(f"callbacks has the class {classes[0]}: pass an object, {classes[0]}()")
        found += one_of("resume", self.resume, _RESUMES)
        refuse(found, "RunConfig(...)")

    @property
    def run_url(self) -> str:
        """The folder or URL of the run, ``storage_path/name``; a local one is absolute."""
        path = os.fspath(self.storage_path or DEFAULT_STORAGE_PATH)
        if self.storage_filesystem is None and files.is_local(path):
            path = os.path.abspath(os.path.expanduser(files.local_path(path)))
            return os.path.join(path, *str(self.name).split("/"))
        return f"{path.rstrip('/')}/{self.name}"

    @property
    def run_options(self) -> dict[str, Any]:
        """The ``options`` of the run's `Storage`: ``storage_options``, with ``storage_filesystem`` where one is set."""
        given = {} if self.storage_filesystem is None else {"filesystem": self.storage_filesystem}
        return {**(self.storage_options or {}), **given}

    def rename(self) -> None:
        """Makes up a new name; only for a name that was made up, when one object is used for a second run."""
        if not self.generated_name:
            raise ValueError(f"name={self.name!r} was given by the user")
        self.name = _new_name()


def _name_problems(name: Any) -> list[str]:
    advice = "pass a folder name such as 'digits-1', or None for one that is made up"
    if not isinstance(name, str) or not name.strip():
        return [f"name={name!r}: {advice}"]
    parts = name.split("/")
    if name != name.strip() or any(part in ("", ".", "..") for part in parts) or "\0" in name or "\\" in name:
        return [f"name={name!r} is no relative folder name: {advice}"]
    if max(map(len, parts)) > 200:
        return [f"name has {max(map(len, parts))} characters, at most 200 are possible: pass a shorter one"]
    return []
