"""`TorchTrainer`: from the user's arguments to a controller, and from the run folder to a `Result`."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leyden.base.log import log
from leyden.train.artifacts import Result
from leyden.train.callbacks import CallbackObserver, TrainRunContext
from leyden.train.config import ConfigError, RunConfig, ScalingConfig
from leyden.train.controller import Controller
from leyden.train.datasets import DataConfig, dataset_sources
from leyden.train.failure import Budgets
from leyden.train.groups import WorkerGroup
from leyden.train.inline import InlineGroup
from leyden.train.ledger import Ledger
from leyden.train.node import cpu_count
from leyden.train.payload import load_value, pack_payload
from leyden.train.plans import RunSpec
from leyden.train.scaling import Workers
from leyden.train.storage import Storage

__all__ = ["TorchConfig", "TorchTrainer"]


@dataclass
class TorchConfig:
    """The process group of the workers.

    Attributes:
        backend: ``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"``; None: ``"nccl"`` with GPUs, else ``"gloo"``.
        init_method: ``"env"`` or ``"tcp"``, which mean the same here: ranks and address are in the environment of the
            workers, and they meet by TCP.
        timeout_s: How long a collective may take.

    Raises:
        ConfigError: A value is out of range.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.init_method not in ("env", "tcp"):
            raise ConfigError(f"TorchConfig(init_method={self.init_method!r}) is unknown; use 'env' or 'tcp'")
        if isinstance(self.timeout_s, bool) or not self.timeout_s > 0:
            raise ConfigError(f"TorchConfig(timeout_s={self.timeout_s!r}) must be more than 0 seconds")


class TorchTrainer:
    """Runs a training function in several workers, and starts them again after failures.

    Args:
        train_loop_per_worker: The function. It takes no argument, or one: ``train_loop_config``.
        train_loop_config: For the function. It is sent to every worker: pass paths and numbers, and load big objects in
            the function.
        torch_config: The process group.
        scaling_config: How many workers, and what each of them needs.
        run_config: Name, storage, which checkpoints are kept, failures.
        datasets: Name -> a dataset, or a function that makes it, for `leyden.train.get_dataset_shard`.
        dataset_config: Which of them are dealt out; default: all.
        validation_config: Not supported; only None.
        metadata: As in Ray Train, only None: write to ``Checkpoint.set_metadata``.
        resume_from_checkpoint: As in Ray Train, only None: a run with the same name goes on by itself.
        backend: ``"local"``: on this machine; ``"ray"``: on a Ray cluster. Default: Ray if it is initialised.

    Raises:
        ConfigError: Arguments are wrong.
        ValueError: The function needs more than one argument.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: Any = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        backend: Literal["local", "ray"] | None = None,
    ) -> None:
        _check_function(train_loop_per_worker)
        for name, given, kind in (
            ("torch_config", torch_config, TorchConfig),
            ("scaling_config", scaling_config, ScalingConfig),
            ("run_config", run_config, RunConfig),
            ("dataset_config", dataset_config, DataConfig),
        ):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(
                    f"TorchTrainer({name}=...) takes a {kind.__module__}.{kind.__name__}, but this is a "
                    f"{type(given).__module__}.{type(given).__qualname__}"
                )
        for name, given, way_out in (
            ("validation_config", validation_config, "validate in the training function"),
            ("metadata", metadata, "use Checkpoint.set_metadata"),
            ("resume_from_checkpoint", resume_from_checkpoint, _RESUME),
        ):
            if given is not None:
                raise ConfigError(f"TorchTrainer({name}=...) is not supported: {way_out}")
        if backend not in (None, "local", "ray"):
            raise ConfigError(f"TorchTrainer(backend={backend!r}) is unknown; use 'local' or 'ray'")
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.torch_config = torch_config or TorchConfig()
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.datasets = dataset_sources(datasets, dataset_config)
        self.backend = backend
        self._ran = False

    def fit(self) -> Result:
        """Trains, and returns when all workers are gone.

        Returns:
            What the run left, all of which is in its folder too: `Result.from_path`.

        Raises:
            TrainingFailedError: The run failed, also after the restarts that `FailureConfig` allows. What was reported
                is in the run's folder.
            KeyboardInterrupt: Ctrl-C; all workers are gone.
        """
        self.scaling_config.check()
        self.run_config.check()
        assert self.run_config.logging_config is not None
        if self._ran and self.run_config.generated_name:
            self.run_config.rename()  # the user asked for no name, so a second run is not a continuation of the first
        self._ran = True
        self._check_for_this_machine()
        storage = Storage(self.run_config.run_url, self.run_config.run_options)
        # Before the run folder is touched: what can't be sent is no run.
        inline = self.scaling_config.max_workers == 0
        payload = b"" if inline else pack_payload(self.train_loop_per_worker, self.train_loop_config, self.datasets)
        group = InlineGroup(self.scaling_config.use_gpu) if inline else self._group()
        ledger = Ledger.open(
            storage,
            name=str(self.run_config.name),
            resume=self.run_config.resume,
            config=self.run_config.checkpoint_config,
            info={"num_workers": self.scaling_config.num_workers, "resources": self.scaling_config.worker_resources},
        )
        level = log.level
        try:
            log.setLevel(self.run_config.logging_config.log_level)
            controller = Controller(self._spec(storage, payload), group, ledger, self._observer(storage))
            if isinstance(group, InlineGroup):
                self._run_inline(controller, group)
            else:
                self._announce(storage)
                controller.run()
            result = ledger.finish(controller.error, load_value(controller.value))
        finally:
            log.setLevel(level)
            ledger.close()
        if controller.error is not None:
            raise controller.error from group.error if isinstance(group, InlineGroup) else controller.error.__cause__
        return result

    @property
    def _on_ray(self) -> bool:
        return self.backend == "ray" or (self.backend is None and _ray_is_initialised())

    def _check_for_this_machine(self) -> None:
        """Refuses what can't work, and names what has no meaning where there is no cluster."""
        scaling = self.scaling_config
        gpus, group = scaling.num_gpus_per_worker, self.torch_config.backend
        if 0 < gpus < 1 and scaling.max_workers > 1 and (group is None or "nccl" in group):
            raise ConfigError(
                f"resources_per_worker['GPU']={gpus:g}: NCCL needs a GPU of its own for each of {scaling.max_workers} "
                "workers; pass 1, or TorchConfig(backend='gloo')"
            )
        if self._on_ray and scaling.max_workers > 0:
            return
        beside = set(self.run_config.worker_runtime_env or ()) - {"env_vars"}
        for name, value in (
            ("ScalingConfig(accelerator_type=...)", scaling.accelerator_type),
            ("ScalingConfig(label_selector=...)", scaling.label_selector),
            ("ScalingConfig(resources_per_worker=...) beside CPU and GPU", scaling.additional_resources_per_worker),
            ("RunConfig(worker_runtime_env=...) beside env_vars", beside),
        ):
            if value:
                log.warning("%s is for clusters, and has no effect on this machine", name)

    def _announce(self, storage: Storage) -> None:
        count = self.scaling_config.max_workers
        if self._on_ray:
            log.info("%s: %d workers; results in %s", self.run_config.name, count, storage.url)
            return
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, cpu_count() // count)
        text = "%s: %d workers on this machine, with %s CPU threads each; results in %s"
        log.info(text, self.run_config.name, count, threads, storage.url)

    def _group(self) -> WorkerGroup:
        if self._on_ray:
            try:
                from leyden.train.ray import RayGroup  # pyright: ignore[reportMissingImports]
            except ModuleNotFoundError as error:
                raise ConfigError(
                    "TorchTrainer(backend='ray'): running on Ray is not in this version"
                    + ("; " if self.backend == "ray" else ", though Ray is initialised here; ")
                    + "pass backend='local' to run on this machine"
                ) from error
            return RayGroup(self.scaling_config)
        from leyden.train.local import LocalGroup

        return LocalGroup(self.scaling_config.use_gpu, self.scaling_config.num_gpus_per_worker or 1.0)

    def _spec(self, storage: Storage, payload: bytes) -> RunSpec:
        scaling, run, group = self.scaling_config, self.run_config, self.torch_config
        failures = run.failure_config
        assert failures is not None
        return RunSpec(
            name=str(run.name),
            url=storage.url,
            payload=payload,
            workers=Workers(max(1, scaling.min_workers), max(1, scaling.max_workers)),
            budgets=Budgets(
                failures=failures.max_failures,
                starts=failures.controller_failure_limit,
                nodes=failures.max_preemption_failures,
                elastic=scaling.elasticity_enabled,
            ),
            storage_options=storage.options,
            use_gpu=scaling.use_gpu,
            gpus_per_worker=scaling.num_gpus_per_worker or 1.0,
            backend=group.backend,
            timeout_s=group.timeout_s,
            environment={name: str(value) for name, value in self._environment().items()},
            log_folder=storage.url_of("logs") if storage.is_local else "",
            resize_interval_s=scaling.elastic_resize_monitor_interval_s,
            hang_timeout_s=failures.hang_timeout_s or 0.0,
        )

    def _environment(self) -> Mapping[str, Any]:
        """What `RunConfig.worker_runtime_env` sets on every back end; the rest of it is Ray's to read."""
        return (self.run_config.worker_runtime_env or {}).get("env_vars") or {}

    def _observer(self, storage: Storage) -> CallbackObserver | None:
        callbacks = self.run_config.callbacks or []
        if not callbacks:
            return None
        context = TrainRunContext(self.run_config, self.scaling_config, self.train_loop_config)
        return CallbackObserver(callbacks, context, storage)

    def _run_inline(self, controller: Controller, group: InlineGroup) -> None:
        """The controller turns in a thread, so that the function has the one that the user's debugger is in."""
        interrupts: list[KeyboardInterrupt] = []

        def turn() -> None:
            try:
                controller.run()
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)

        thread = threading.Thread(target=turn, name="leyden-controller")
        thread.start()
        group.serve(self.train_loop_per_worker, self.train_loop_config, self.datasets)
        thread.join()
        if interrupts:
            raise interrupts[0]


_RESUME = (
    "a run with the same RunConfig(name=..., storage_path=...) goes on by itself; or load the file in the function"
)


def _check_function(function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"TorchTrainer takes a function, but this is {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable of C has no signature
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        raise ConfigError(
            f"the training function needs {len(needed)} arguments ({', '.join(needed)}), at most one is passed: put "
            "all into the dictionary train_loop_config"
        )


def _ray_is_initialised() -> bool:
    ray = sys.modules.get("ray")  # a process that never imported it has not initialised it either
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())
