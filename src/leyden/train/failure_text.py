"""The text of an error: the first failure on top, then its output, what to do, and the other ranks in a few lines."""

import re
import signal
from collections.abc import Sequence

from leyden.train.failure import Decision, Failure, Kind, WorkerGroupError, as_exceptions, is_collateral
from leyden.train.records import Record

__all__ = ["advice", "describe", "exit_text", "group_error", "headline", "ranks_text", "summary"]

MAX_TRACEBACK_CHARS = 8000
MAX_LOG_LINES = 20
MAX_LINE_CHARS = 300


def describe(
    failures: Sequence[Failure],
    world_size: int,
    *,
    why: str,
    budget: str,
    log_place: str,
    checkpoint: str | None,
) -> str:
    """The message of a `WorkerGroupError`.

    Args:
        failures: One a rank, the cause first, as `failure.in_order` returns them.
        world_size: Ranks in the group.
        why: Why the run was not started again, e.g. "failure 1, and 0 are allowed".
        budget: What the failure was charged to: "failures", "starts" or "nodes".
        log_place: Where the logs of all ranks are.
        checkpoint: Where the last committed checkpoint is; None where there is none.
    """
    cause, others = failures[0], failures[1:]
    parts = [headline(cause, world_size, first=bool(others))]
    if cause.traceback:
        what = "Stack" if cause.kind is Kind.HANG else "Traceback"
        parts.append(f"{what} of rank {cause.rank}:\n{_indent(_shorten(cause.traceback))}")
    if cause.log_tail:
        parts.append(f"Last output of rank {cause.rank}:\n{_indent(_tail(cause.log_tail))}")
    parts.append("What to do: " + " ".join([*advice(cause), *_next_time(budget, why, checkpoint)]))
    if others:
        parts.append("Other ranks, after it:\n" + _indent("\n".join(_grouped(others))))
    parts.append(f"Logs of all ranks: {log_place}")
    return "\n\n".join(parts)


def group_error(
    failures: Sequence[Failure], world_size: int, decision: Decision, url: str, latest: Record | None
) -> WorkerGroupError:
    """The error of a run that is not started again.

    Args:
        failures: One a rank, the cause first.
        world_size: Ranks in the group.
        decision: Not to start again.
        url: Of the run folder.
        latest: The last committed checkpoint.
    """
    text = describe(
        failures,
        world_size,
        why=decision.why,
        budget=decision.budget,
        log_place=f"{url}/logs",
        checkpoint=None if latest is None else f"{url}/{latest.folder}",
    )
    return WorkerGroupError(text, as_exceptions(failures))


def headline(cause: Failure, world_size: int, first: bool = True) -> str:
    """One line: which rank failed, where and how; ``first``: where others may have failed too."""
    where = f" on {cause.node}" if cause.node else ""
    when = "" if cause.ready else " while starting"
    order = " first" if first and world_size > 1 else ""
    return f"Rank {cause.rank} of {world_size}{where} failed{order}{when}: {summary(cause)}"


def summary(failure: Failure) -> str:
    """One line: ``ValueError: bad batch``, ``killed by SIGKILL (out of memory)``, ..."""
    lines = failure.text.strip().splitlines() or [""]
    text = lines[0][:MAX_LINE_CHARS] + (" ..." if len(lines) > 1 or len(lines[0]) > MAX_LINE_CHARS else "")
    if failure.kind is Kind.ERROR:
        return f"{failure.type}: {text}" if text else failure.type
    return text or failure.kind.value


def exit_text(exit_code: int, reason: str) -> str:
    """How a process ended, in words."""
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        text = f"killed by {name}"
    elif exit_code == 0:
        text = "the process ended with exit code 0 before the training function returned"
    else:
        text = f"the process ended with exit code {exit_code}"
    return f"{text} ({reason})" if reason else text


def advice(cause: Failure) -> list[str]:
    """Sentences: what most often helps against this failure."""
    text = f"{cause.type} {cause.text}"
    if cause.kind is Kind.NODE:
        return ["Its node, or the agent on it, is gone: see whether the machine is up and what its system log says."]
    if cause.kind is Kind.HANG:
        if not cause.ready:
            return [
                "The ranks could not all meet: see that every node can reach the address of the first one, and that no "
                "firewall is between them; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME choose the interface."
            ]
        return ["It made no progress for the time allowed: its stack shows where it waits."]
    if cause.kind is Kind.EXIT:
        return [_exit_advice(cause)]
    for pattern, sentence in _ADVICE:
        if re.search(pattern, text):
            return [sentence]
    if is_collateral(cause):
        return [
            "A collective failed and no rank failed before it: look at the network between the nodes, and at ranks "
            "that call different collectives or a different number of them."
        ]
    return ["Correct the error that the traceback shows."]


def _exit_advice(cause: Failure) -> str:
    code = cause.exit_code
    if code == -signal.SIGKILL:
        return (
            "SIGKILL comes from the system when memory runs out (`dmesg` shows it), or from a person or a scheduler: "
            "use smaller batches or fewer loader workers, or ask for more memory."
        )
    if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE, -signal.SIGABRT):
        return (
            "It crashed in native code: the output above may hold its stack; a full /dev/shm (SIGBUS), mixed library "
            "versions and custom extensions are the usual causes."
        )
    if code == -signal.SIGTERM:
        return "Something asked it to end: a scheduler, a time limit, or a person."
    if code == 0:
        return "Something called sys.exit or os._exit: return from the training function instead."
    return "The output above is all that it left behind; sys.exit and os._exit end a rank without a traceback."


_ADVICE = (
    (r"CUDA out of memory|OutOfMemoryError", "Use a smaller batch, accumulate gradients, or shard the model."),
    (
        r"ModuleNotFoundError|ImportError",
        "Install the module on every node, or put its folder on PYTHONPATH there; code next to your script is found "
        "on this machine only.",
    ),
    (r"No space left on device|Errno 28", "Free space in the storage folder, or keep fewer checkpoints (num_to_keep)."),
    (r"Address already in use|EADDRINUSE", "Another process took the port; the next start uses another one."),
    (r"MemoryError", "The process ran out of memory: use smaller batches or fewer loader workers."),
    (r"AccessDenied|PermissionError|NoCredentials", "See whether the workers may write to the storage folder."),
)


def _next_time(budget: str, why: str, checkpoint: str | None) -> list[str]:
    found = f"It was not started again: {why}"
    if budget == "failures":
        found += "; RunConfig(failure_config=FailureConfig(max_failures=N)) allows N restarts"
    after = (
        f"The same run (same name and storage_path) resumes from {checkpoint}."
        if checkpoint
        else "No checkpoint was committed: the same run starts from the beginning."
    )
    return [found + ".", after]


def _grouped(failures: Sequence[Failure]) -> list[str]:
    """One line for all failures that read the same but for their numbers; echoes of the cause last."""
    groups: dict[tuple[bool, str], list[Failure]] = {}
    for failure in failures:
        key = re.sub(r"0x[0-9a-fA-F]+|\d+", "N", summary(failure))
        groups.setdefault((is_collateral(failure), key), []).append(failure)
    lines = []
    for (echo, _), members in sorted(groups.items(), key=lambda item: item[0][0]):
        ranks = ranks_text([each.rank for each in members])
        lines.append(f"{ranks}: {summary(members[0])}" + (" [follows from the first]" if echo else ""))
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"ranks 0-2, 5"``; long lists are cut."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:10]]
    more = f" and {sum(high - low + 1 for low, high in runs[10:])} more" if len(runs) > 10 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more


def _shorten(text: str) -> str:
    text = text.rstrip()
    if len(text) <= MAX_TRACEBACK_CHARS:
        return text
    # The end of a traceback says what happened, its beginning where it came from.
    head, tail = MAX_TRACEBACK_CHARS // 4, MAX_TRACEBACK_CHARS * 3 // 4
    return f"{text[:head]}\n... {len(text) - head - tail} characters left out ...\n{text[-tail:]}"


def _tail(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip()[:MAX_LINE_CHARS] for line in lines[-MAX_LOG_LINES:])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
