"""run.json: what was asked for, by which driver, and how the run stands."""

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from leyden.__about__ import __version__
from leyden.base.log import log
from leyden.train.documents import write_document
from leyden.train.storage import Storage, StorageError

__all__ = ["RUN", "STATUSES", "RunExistsError", "check_resume", "check_shared", "driver", "is_plain", "save_run"]

RUN = "run.json"
STATUSES = ("running", "finished", "errored", "aborted")


class RunExistsError(StorageError):
    """The name is that of another run, or of none, and `RunConfig.resume` says that it must not be."""


def check_shared(storage: Storage, attempts: int = 20, sleep: Callable[[float], None] = time.sleep) -> None:
    """For a process on another node than the driver's, before step 0: is this the folder that the driver wrote to?

    Args:
        storage: The run folder, as seen from here.
        attempts: How often to look, half a second apart: a network file system may show new files late.
        sleep: Waits.

    Raises:
        StorageError: If it is a folder of this machine only.
    """
    for attempt in range(attempts):
        if storage.exists(RUN) or storage.exists(f"{RUN}.bak"):
            return
        if attempt + 1 < attempts:
            sleep(0.5)
    raise StorageError(
        f"{storage.url} on {socket.gethostname()} is not the folder that the driver writes to (no {RUN} in it): with "
        "several nodes RunConfig(storage_path=...) has to be a network folder that all of them mount, or a URL such as "
        "s3://bucket/path"
    )


def check_resume(storage: Storage, resume: str, status: str | None) -> None:
    """Refuses what `RunConfig.resume` forbids. ``status``: of the run in that folder; None where there is none.

    Raises:
        RunExistsError: With the ways out.
    """
    if status is None:
        if resume == "must":
            raise RunExistsError(f"{storage.url} holds no run, and resume='must': check the name, or pass 'auto'")
    elif resume == "never" or (resume == "auto" and status == "finished"):
        way = "resume='must'" if status == "finished" else "resume='auto'"
        raise RunExistsError(
            f"{storage.url} holds a run that is {status}, and resume={resume!r}: pass another RunConfig(name=...), "
            f"or {way} to go on with it"
        )


def driver() -> dict[str, Any]:
    """Who runs it."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "leyden": __version__,
        "python": platform.python_version(),
        "command": sys.argv,
    }


def save_run(storage: Storage, run: Mapping[str, Any]) -> None:
    """Writes run.json. On a full disk it stays as it was, which is a warning: nothing depends on it being the last."""
    try:
        write_document(storage, RUN, run)
    except OSError as error:
        log.warning("%s can't be written now: %s", storage.url_of(RUN), error)


def is_plain(value: Any) -> bool:
    """Whether JSON gives the same value back."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False
