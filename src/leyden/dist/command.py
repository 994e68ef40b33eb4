"""The command line that starts the user's script once more."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["script_command"]


def script_command(local_rank: int) -> tuple[list[str], str | None]:
    """How to start this script again for another local rank.

    Args:
        local_rank: Of the new process.

    Returns:
        The command, and the folder to start it in (None: the current one).

    Raises:
        RuntimeError: There is no script: an interactive session, or a program from stdin.
    """
    import __main__  # here: the module that __main__ is may change until the call

    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # pyright: ignore[reportAttributeAccessIssue]
    spec = getattr(__main__, "__spec__", None)
    hydra = _hydra_config()
    if spec is not None:
        command = [*python, "-m", spec.name, *sys.argv[1:]]
    elif sys.argv[0] == "-c":
        command = [sys.executable, *sys.orig_argv[1:]]
    elif Path(sys.argv[0]).exists() or hydra is not None:
        command = [*python, _script_path(hydra), *sys.argv[1:]]
    else:
        raise RuntimeError(
            f"strategy='ddp' starts the script again for each device, but sys.argv[0]={sys.argv[0]!r} is no file: put "
            "the code into a script, or pass strategy='ddp_spawn' (in a notebook: 'ddp_notebook')"
        )
    if hydra is None:
        return command, None
    from hydra.utils import get_original_cwd

    overrides = [
        f'hydra.run.dir="{hydra.run.dir}"',
        f"hydra.job.name=train_ddp_process_{local_rank}",
        "hydra.output_subdir=null",  # two processes must not write one config.yaml
    ]
    return command + overrides, get_original_cwd()


def _hydra_config() -> Any:
    """Hydra's settings when the script runs under Hydra, which has changed the folder and the arguments."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None


def _script_path(hydra: Any) -> str:
    if hydra is None:
        return os.path.abspath(sys.argv[0])
    from hydra.utils import to_absolute_path

    return to_absolute_path(sys.argv[0])
