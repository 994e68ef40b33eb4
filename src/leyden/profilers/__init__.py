"""Profilers: how long each part of a run takes.

The Trainer brackets its hooks and steps with ``start`` and ``stop`` only if it has a profiler other than
`PassThroughProfiler`; without one there is nothing to pay. Actions are named ``[Callback]STATE_KEY.HOOK``,
``[LightningModule]CLASS.HOOK``, ``[Strategy]CLASS.HOOK``, ``run_training_batch``, ``save_checkpoint``.
"""

from leyden.base.registry import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "AdvancedProfiler": "leyden.profilers.advanced",
        "PassThroughProfiler": "leyden.profilers.profiler",
        "Profiler": "leyden.profilers.profiler",
        "PyTorchProfiler": "leyden.profilers.pytorch",
        "SimpleProfiler": "leyden.profilers.simple",
    },
    submodules=("advanced", "profiler", "pytorch", "simple"),
)
