"""The scripts, grouped by theme; importing a group registers its scripts."""

import importlib

__all__ = ["GROUPS", "load_all"]

GROUPS = ("trace", "optimisers", "schedules", "data", "logs", "checkpoints", "resume", "extras", "loggers", "misuse")


def load_all() -> None:
    """Imports every group."""
    for group in GROUPS:
        importlib.import_module(f"differential.scripts.{group}")
