"""What worker processes bring back to the process that started them."""

from typing import Any

import torch

__all__ = ["collect_results", "restore_results"]

# What a checkpoint callback knows after a fit. Its state_dict is for a resumed run, which continues in its own folder.
_CHECKPOINT_ATTRIBUTES = (
    "best_model_path",
    "best_model_score",
    "current_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


def collect_results(trainer: Any) -> dict[str, Any]:
    """Reads, in a worker, what the main process shall know of a finished run. Call it on all ranks.

    Args:
        trainer: The worker's trainer.

    Returns:
        Trainer state, metrics, callbacks' state and, after fit, the weights; tensors on the CPU.
    """
    weights = trainer.lightning_module.state_dict()
    metrics = {name: _on_cpu(value) for name, value in trainer.callback_metrics.items()}
    return {
        "state": trainer.state,
        "callback_metrics": metrics,
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
        "checkpoints": [
            {name: getattr(callback, name) for name in _CHECKPOINT_ATTRIBUTES if hasattr(callback, name)}
            for callback in getattr(trainer, "checkpoint_callbacks", ())
        ],
        "weights": {key: _on_cpu(value) for key, value in weights.items()} if trainer.state.fn == "fit" else None,
    }


def restore_results(trainer: Any, results: dict[str, Any]) -> None:
    """Gives the main process's trainer what `collect_results` found.

    Args:
        trainer: The trainer whose run took place in workers.
        results: Of rank 0.
    """
    trainer.state = results["state"]
    trainer.callback_metrics.update(results["callback_metrics"])
    checkpoints = list(getattr(trainer, "checkpoint_callbacks", ()))
    for callback in trainer.callbacks:
        state = results["callbacks"].get(callback.state_key)
        if state and callback not in checkpoints:
            callback.load_state_dict(state)
    for callback, attributes in zip(checkpoints, results["checkpoints"], strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)
    if results["weights"] is not None:
        # Not strict: setup and configure_model may have added layers in the workers only.
        trainer.lightning_module.load_state_dict(results["weights"], strict=False)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
