"""`TrainerSpec`: the arguments of ``Trainer(...)``, checked and in one form each. Nothing else reads "auto" or None."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch

from leyden.base.errors import MisconfigurationException
from leyden.base.files import is_local, local_path
from leyden.base.log import rank_zero_info, rank_zero_warn
from leyden.base.registry import did_you_mean
from leyden.core.callback import Callback, Checkpoint
from leyden.trainer import parse
from leyden.trainer.hardware import Hardware, resolve_hardware
from leyden.trainer.parse import Problems, loop_limits

if TYPE_CHECKING:
    from leyden.dist.devices import Accelerator
    from leyden.dist.env import ClusterEnvironment
    from leyden.strategies.base import Strategy
    from leyden.strategies.precision import Precision

__all__ = ["DEFAULTS", "TrainerSpec", "loop_limits"]

DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
    "logger": None,
    "callbacks": None,
    "fast_dev_run": False,
    "max_epochs": None,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": None,
    "limit_test_batches": None,
    "limit_predict_batches": None,
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": None,
    "log_every_n_steps": None,
    "enable_checkpointing": None,
    "enable_progress_bar": None,
    "enable_model_summary": None,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "deterministic": None,
    "benchmark": None,
    "inference_mode": True,
    "use_distributed_sampler": True,
    "profiler": None,
    "detect_anomaly": False,
    "barebones": False,
    "plugins": None,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "default_root_dir": None,
    "enable_autolog_hparams": True,
    "model_registry": None,
}

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
_PROFILERS = ("simple", "advanced", "pytorch")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The arguments of a Trainer after `resolve`: each has one type, and together they make sense.

    Attributes:
        accelerator: The kind of hardware.
        strategy: Connected to accelerator, precision, devices, nodes, environment and plugins; its launcher is made.
        precision_plugin: The strategy's.
        cluster_environment: Who started this process.
        devices: One device per process of this node.
        logger: ``"default"`` stands for the one that the Trainer makes; else the loggers.
        callbacks: The user's, in their order, in a list of the Trainer's own.
        fast_dev_run: False, or the number of batches (True for one).
        max_epochs: -1 is no bound, None not set; see `loop_limits`.
        max_steps: -1 is no bound.
        limit_train_batches: An int counts batches, a float is a fraction, as in all limits.
        val_check_interval: An int counts batches, a float is a fraction of the epoch; 1.0 when there is a
            ``val_check_time``.
        val_check_time: Time between validations; None when batches decide.
        num_sanity_val_steps: Batches per loader; infinity for all.
        gradient_clip_algorithm: ``"norm"``, ``"value"`` or None.
        profiler: A name, an instance, or None.
        default_root_dir: A local path without ``~``, or a URL.
    """

    accelerator: "Accelerator"
    strategy: "Strategy"
    precision_plugin: "Precision"
    cluster_environment: "ClusterEnvironment"
    devices: list[torch.device]
    num_nodes: int
    logger: Literal["default"] | list[Any]
    callbacks: list[Callback]
    fast_dev_run: int | bool
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: timedelta | None
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    overfit_batches: int | float
    val_check_interval: int | float
    val_check_time: timedelta | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float
    log_every_n_steps: int
    enable_checkpointing: bool
    enable_progress_bar: bool
    enable_model_summary: bool
    accumulate_grad_batches: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: str | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    profiler: Any
    detect_anomaly: bool
    barebones: bool
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: str
    enable_autolog_hparams: bool
    model_registry: str | None

    @classmethod
    def resolve(cls, **arguments: Any) -> "TrainerSpec":
        """Reads the Trainer's arguments; those that are left out have their defaults.

        Raises:
            TypeError, ValueError, MisconfigurationException: One or more arguments are wrong. All of them are listed.
                The type is that of the problems where they agree, else `MisconfigurationException`.
        """
        unknown = [name for name in arguments if name not in DEFAULTS]
        if unknown:
            hints = "; ".join(f"{name!r}: {did_you_mean(name, DEFAULTS)}" for name in unknown)
            raise TypeError(f"Trainer got an unexpected keyword argument {hints}")
        given = {**DEFAULTS, **arguments}
        problems = Problems()
        values = _read_switches(given, problems)
        values |= _read_bounds(given, problems)
        values |= _read_validation(given, problems)
        values |= _read_optimisation(given, problems)
        values |= _read_plugins(given, values, problems)
        hardware = resolve_hardware(
            **{
                name: given[name]
                for name in ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins")
            },
            sync_batchnorm=values["sync_batchnorm"],
            problems=problems,
        )
        problems.raise_found("Trainer(...)")
        assert isinstance(hardware, Hardware)  # None comes with problems
        parts = ("accelerator", "strategy", "precision_plugin", "cluster_environment", "devices", "num_nodes")
        values |= {name: getattr(hardware, name) for name in parts}
        _shorten(values)
        _announce(given, values)
        return cls(**values)

    def apply_torch_flags(self) -> None:
        """Sets torch's global switches for ``deterministic`` and ``benchmark``; unset ones stay as they are."""
        benchmark = self.benchmark
        if self.deterministic:
            if benchmark is None:
                benchmark = False
            elif benchmark:
                rank_zero_warn(
                    "deterministic=True and benchmark=True: cuDNN may choose other algorithms in each run, so results"
                    " will not be deterministic; leave benchmark out."
                )
            # cuBLAS is deterministic only with a workspace of its own size
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if benchmark is not None:
            torch.backends.cudnn.benchmark = benchmark
        if self.deterministic is not None:
            torch.use_deterministic_algorithms(bool(self.deterministic), warn_only=self.deterministic == "warn")


def _read_switches(given: dict[str, Any], problems: Problems) -> dict[str, Any]:
    names = (
        "inference_mode",
        "use_distributed_sampler",
        "detect_anomaly",
        "barebones",
        "sync_batchnorm",
        "enable_autolog_hparams",
    )
    values: dict[str, Any] = {name: bool(given[name]) for name in names}
    if values["barebones"]:
        for conflict in parse.barebones_conflicts(given):
            problems.add(ValueError, conflict)
    for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        values[name] = bool(given[name]) if given[name] is not None else not values["barebones"]
    values["benchmark"] = None if given["benchmark"] is None else bool(given["benchmark"])
    deterministic = given["deterministic"]
    if deterministic not in (None, True, False, "warn"):
        problems.add(MisconfigurationException, f"deterministic={deterministic!r} must be True, False or 'warn'.")
    values["deterministic"] = deterministic
    registry = given["model_registry"]
    values["model_registry"] = registry.split(":")[0] if registry else None
    return values


def _read_bounds(given: dict[str, Any], problems: Problems) -> dict[str, Any]:
    values: dict[str, Any] = {}
    endless = "-1 is no limit."
    with problems.caught():
        values["max_epochs"] = parse.integer(given["max_epochs"], "max_epochs", -1, endless)
    with problems.caught():
        values["min_epochs"] = parse.integer(given["min_epochs"], "min_epochs", -1)
    with problems.caught():
        values["max_steps"] = parse.integer(given["max_steps"], "max_steps", -1, endless, unset=False)
    with problems.caught():
        values["min_steps"] = parse.integer(given["min_steps"], "min_steps", -1)
    with problems.caught():
        values["max_time"] = parse.duration(given["max_time"], "max_time")
    for name in _LIMITS:
        with problems.caught():
            values[name] = parse.batch_limit(given[name], name)
    with problems.caught():
        run = parse.integer(given["fast_dev_run"], "fast_dev_run", 0, "It counts batches.", ValueError) or 0
        values["fast_dev_run"] = bool(run) if run < 2 else run
    return values


def _read_validation(given: dict[str, Any], problems: Problems) -> dict[str, Any]:
    values: dict[str, Any] = {}
    every = given["check_val_every_n_epoch"]
    with problems.caught():
        values["check_val_every_n_epoch"] = parse.integer(
            every,
            "check_val_every_n_epoch",
            1,
            "None counts batches across epochs.",
            MisconfigurationException,
        )
    with problems.caught():
        interval, time = parse.validation_interval(given["val_check_interval"], every)
        values["val_check_interval"], values["val_check_time"] = interval, time
    quiet = bool(given["barebones"])
    with problems.caught():
        steps = parse.integer(given["num_sanity_val_steps"], "num_sanity_val_steps", -1, "-1 takes all batches.")
        steps = (0 if quiet else 2) if steps is None else steps
        values["num_sanity_val_steps"] = float("inf") if steps == -1 else steps
    with problems.caught():
        steps = parse.integer(given["log_every_n_steps"], "log_every_n_steps", 0, "0 is never.")
        values["log_every_n_steps"] = (0 if quiet else 50) if steps is None else steps
    with problems.caught():
        values["reload_dataloaders_every_n_epochs"] = parse.integer(
            given["reload_dataloaders_every_n_epochs"],
            "reload_dataloaders_every_n_epochs",
            0,
            wrong_type=MisconfigurationException,
            unset=False,
        )
    return values


def _read_optimisation(given: dict[str, Any], problems: Problems) -> dict[str, Any]:
    values: dict[str, Any] = {}
    with problems.caught():
        values["accumulate_grad_batches"] = parse.integer(
            given["accumulate_grad_batches"],
            "accumulate_grad_batches",
            1,
            "For a factor that changes with the epoch use the callback GradientAccumulationScheduler.",
            unset=False,
        )
    clip = given["gradient_clip_val"]
    if clip is not None and not isinstance(clip, (int, float)):
        problems.add(TypeError, f"gradient_clip_val={clip!r} must be an int or a float.")
    values["gradient_clip_val"] = clip
    with problems.caught():
        values["gradient_clip_algorithm"] = parse.clip_algorithm(given["gradient_clip_algorithm"])
    return values


def _read_plugins(given: dict[str, Any], switches: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Callbacks, loggers, profiler and the folder that they write to."""
    values: dict[str, Any] = {}
    with problems.caught():
        values["callbacks"] = parse.as_list(given["callbacks"], Callback, "callbacks")
        _check_callbacks(values["callbacks"], switches, problems)
    with problems.caught():
        values["logger"] = _loggers(given["logger"], switches["barebones"])
    with problems.caught():
        values["profiler"] = _profiler(given["profiler"])
    with problems.caught():
        values["default_root_dir"] = _root(given["default_root_dir"])
    return values


def _root(path: Any) -> str:
    if path is None:
        return os.getcwd()
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"default_root_dir={path!r} must be a path or a URL.")
    root = os.fspath(path)
    return os.path.normpath(os.path.expanduser(local_path(root))) if is_local(root) else root


def _check_callbacks(callbacks: list[Callback], switches: dict[str, Any], problems: Problems) -> None:
    if not callbacks:
        return
    from leyden.callbacks.progress_bar import ProgressBar  # on use: most runs have no callback of the user's

    kinds = {"enable_checkpointing": Checkpoint, "enable_progress_bar": ProgressBar}
    for flag, kind in kinds.items():
        found = [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]
        if found and not switches[flag]:
            reason = "barebones=True turns it off" if switches["barebones"] else f"{flag}=False"
            problems.add(
                MisconfigurationException,
                f"callbacks holds {', '.join(found)}, but {reason}; leave out one of the two.",
            )
        if kind is ProgressBar and len(found) > 1:
            problems.add(
                MisconfigurationException, f"callbacks holds {len(found)} progress bars ({', '.join(found)}); pass one."
            )


def _loggers(logger: Any, barebones: bool) -> Any:
    if logger is None:
        return [] if barebones else "default"
    if isinstance(logger, bool):
        return "default" if logger else []
    loggers = [logger] if hasattr(logger, "log_metrics") or isinstance(logger, str) else logger
    try:
        loggers = list(loggers)
    except TypeError:
        loggers = [logger]
    for item in loggers:
        if not hasattr(item, "log_metrics"):
            raise TypeError(f"logger={item!r} is no Logger; pass True, False, a Logger, or a list of them.")
    return loggers


def _profiler(profiler: Any) -> Any:
    if profiler is None:
        return None
    if isinstance(profiler, str):
        name = profiler.lower()
        if name not in _PROFILERS:
            raise MisconfigurationException(f"profiler={profiler!r} is unknown; {did_you_mean(name, _PROFILERS)}")
        return name
    from leyden.profilers import Profiler

    if not isinstance(profiler, Profiler):
        raise MisconfigurationException(
            f"profiler={profiler!r} must be a name ({', '.join(map(repr, _PROFILERS))}) or a Profiler instance."
        )
    return profiler


def _shorten(values: dict[str, Any]) -> None:
    """Applies ``overfit_batches`` and ``fast_dev_run``, which stand for other arguments."""
    if values["fast_dev_run"]:
        batches = int(values["fast_dev_run"])
        values |= dict.fromkeys(_LIMITS[:4], batches)
        values |= {
            "max_steps": batches,
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "val_check_interval": 1.0,
            "val_check_time": None,
            "check_val_every_n_epoch": 1,
        }
    if values["overfit_batches"] > 0:
        values["limit_train_batches"] = values["limit_val_batches"] = values["overfit_batches"]


def _announce(given: dict[str, Any], values: dict[str, Any]) -> None:
    if values["fast_dev_run"]:
        rank_zero_info(
            "fast_dev_run: the requested loop runs %d batch(es), without logging and checkpoints.",
            int(values["fast_dev_run"]),
        )
    else:
        for name in (*_LIMITS, "val_check_interval"):
            parse.explain_limit(given[name], name)
    if values["detect_anomaly"]:
        rank_zero_info("detect_anomaly=True makes training much slower; use it to find an error, then turn it off.")
    if values["barebones"]:
        rank_zero_info(
            "barebones=True: no checkpoints, progress bar, model summary, logging (`self.log` does nothing) and sanity"
            " checking, to measure raw speed."
        )
