"""The names of ``Trainer(strategy=...)``."""

from typing import Any

from leyden.dist.plugins import PluginRegistry

__all__ = ["StrategyRegistry"]


class _StrategyRegistry(PluginRegistry):
    """A `PluginRegistry` with the method name that users of ``StrategyRegistry`` know."""

    def available_strategies(self) -> list[str]:
        """All names, sorted."""
        return self.names()


StrategyRegistry = _StrategyRegistry("strategy")


def _register_built_in() -> None:
    StrategyRegistry.register("single_device", "leyden.strategies.base:SingleDeviceStrategy", "one process, one device")
    ways = {
        "ddp": ("popen", "DistributedDataParallel; the script is started once per process"),
        "ddp_spawn": ("spawn", "DistributedDataParallel; fresh processes, the model is sent to them"),
        "ddp_fork": ("fork", "DistributedDataParallel; forked processes"),
        "ddp_notebook": ("fork", "DistributedDataParallel; forked processes, for notebooks"),
    }
    for name, (start_method, description) in ways.items():
        options: list[tuple[str, str, dict[str, Any]]] = [
            ("", "", {}),
            ("_find_unused_parameters_true", ", parameters may go unused", {"find_unused_parameters": True}),
            ("_find_unused_parameters_false", ", all parameters are used", {"find_unused_parameters": False}),
        ]
        for suffix, detail, params in options:
            StrategyRegistry.register(
                name + suffix,
                "leyden.strategies.ddp:DDPStrategy",
                description + detail,
                start_method=start_method,
                **params,
            )


def _mark_absent() -> None:
    sharded = "fsdp, fsdp_cpu_offload, deepspeed, deepspeed_stage_1, deepspeed_stage_2, deepspeed_stage_3"
    offload = "deepspeed_stage_2_offload, deepspeed_stage_3_offload, deepspeed_stage_3_offload_nvme"
    for name in f"{sharded}, {offload}".split(", "):
        StrategyRegistry.mark_absent(
            name, "is not in this version of Leyden yet; 'ddp' trains models that fit on one device"
        )
    for name in ("xla", "xla_debug", "single_xla", "single_tpu"):
        StrategyRegistry.mark_absent(name, "needs torch_xla, which this version of Leyden does not support yet")


_register_built_in()
_mark_absent()
