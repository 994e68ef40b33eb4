"""Layer 1: processes. Who am I (`env`), what do I run on (`devices`), how do we talk (`comm`) and start (`launch`)."""

from leyden.base.registry import lazy_exports

_ENV = "leyden.dist.env"
_DEVICES = "leyden.dist.devices"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ClusterEnvironment": _ENV,
        "DistInfo": _ENV,
        "KubeflowEnvironment": _ENV,
        "LSFEnvironment": "leyden.dist.schedulers",
        "LightningEnvironment": _ENV,
        "MPIEnvironment": "leyden.dist.schedulers",
        "SLURMEnvironment": "leyden.dist.schedulers",
        "TorchElasticEnvironment": _ENV,
        "detect_environment": _ENV,
        "dist_info": _ENV,
        "find_free_port": _ENV,
        "Accelerator": _DEVICES,
        "AcceleratorRegistry": _DEVICES,
        "CPUAccelerator": _DEVICES,
        "CUDAAccelerator": _DEVICES,
        "MPSAccelerator": _DEVICES,
        "find_usable_cuda_devices": _DEVICES,
        "resolve_accelerator": _DEVICES,
        "Comm": "leyden.dist.comm",
        "NoComm": "leyden.dist.comm",
        "init_process_group": "leyden.dist.comm",
        "Launcher": "leyden.dist.launch",
        "MultiProcessingLauncher": "leyden.dist.launch",
        "SubprocessScriptLauncher": "leyden.dist.launch",
        "WorkerFailedError": "leyden.dist.launch",
        "PluginRegistry": "leyden.dist.plugins",
    },
    submodules=("comm", "devices", "env", "launch", "plugins", "schedulers"),
)
