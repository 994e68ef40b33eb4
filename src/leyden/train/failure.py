"""What went wrong in the workers, whether to try again, and the errors that `fit` raises. Pure: nothing here waits.

``decide(failures, spent, budgets)`` answers RETRY or RAISE. The text of the error is made in `failure_text`.
"""

import builtins
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

__all__ = [
    "Action",
    "Budgets",
    "ControllerError",
    "Decision",
    "Failure",
    "Kind",
    "PlacementError",
    "Spent",
    "TrainingFailedError",
    "WorkerError",
    "WorkerGroupError",
    "as_exceptions",
    "decide",
    "in_order",
    "is_collateral",
]

BACKOFF_LIMIT_S = 30.0
UNLIMITED = -1


class TrainingFailedError(RuntimeError):
    """A run ended without success. Its first line says which rank failed first, and how."""


class WorkerGroupError(TrainingFailedError):
    """One or more ranks failed, and the budget of `FailureConfig` is spent.

    Attributes:
        error_message: The whole text: the first failure in time, its traceback and log, what to do, the other ranks.
        worker_failures: Rank -> what it failed with, the first failure in time first. Exceptions of builtin types are
            instances of these types too; all are `WorkerError`.
    """

    def __init__(self, error_message: str, worker_failures: Mapping[int, Exception]) -> None:
        super().__init__(error_message)
        self.error_message = error_message
        self.worker_failures = dict(worker_failures)

    def __reduce__(self) -> tuple:
        return WorkerGroupError, (self.error_message, self.worker_failures)


class ControllerError(TrainingFailedError):
    """The run ended for a reason outside of the user's function: no place for it, storage, a callback, a bug of ours.

    Attributes:
        controller_failure: The exception behind it.
    """

    def __init__(self, controller_failure: Exception) -> None:
        text = str(controller_failure) or type(controller_failure).__name__
        known = isinstance(controller_failure, PlacementError)
        super().__init__(text if known else f"{type(controller_failure).__name__}: {text}")
        self.controller_failure = controller_failure
        self.__cause__ = controller_failure

    def __reduce__(self) -> tuple:
        return ControllerError, (self.controller_failure,)


class PlacementError(RuntimeError):
    """The workers that were asked for fit nowhere, or no place came free in the time allowed."""


class WorkerError(Exception):
    """What one rank failed with, as text: the exception itself stays in the process that raised it.

    Attributes:
        rank: World rank.
        kind: How it failed.
        type: Name of the exception's type; "" where the process ended without one.
        text: The exception's text, or how the process ended.
        traceback: As printed by Python, or the stack of a rank that hung; "" where there is none.
        exit_code: Of the process; negative: killed by that signal; None where it did not end by itself.
    """

    rank: int
    kind: "Kind"
    type: str
    text: str
    traceback: str
    exit_code: int | None

    def __str__(self) -> str:
        return self.text


class Kind(str, Enum):
    """The ways a rank can fail."""

    ERROR = "error"  # the user's function, or an upload, raised
    EXIT = "exit"  # the process ended before the function returned
    HANG = "hang"  # no progress for the time allowed
    NODE = "node"  # its node, or the agent there, is gone


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        rank: World rank.
        kind: How it failed.
        time: When, on the clock of its node, in seconds since the epoch.
        ready: Whether the rank had joined the others and called the user's function.
        type: Name of the exception's type; "" where there was none.
        text: The exception's text, or how the process ended; one or more lines.
        traceback: Or the stack of a rank that hung; "" where there is none.
        log_tail: Its last lines of output.
        exit_code: Of the process, where it ended by itself.
        node: Where it ran.
    """

    rank: int
    kind: Kind
    time: float
    ready: bool = True
    type: str = ""
    text: str = ""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    exit_code: int | None = None
    node: str = ""


@dataclass(frozen=True)
class Budgets:
    """How many failures of each sort a run may survive; -1: any number.

    Attributes:
        failures: In the user's function: errors, deaths, hangs; and lost nodes where the group can't shrink.
        starts: In a row before all ranks are ready; a start that succeeds clears the count.
        nodes: Lost nodes, for a group that can go on with fewer ranks.
        elastic: Whether it can.
    """

    failures: int = 0
    starts: int = 3
    nodes: int = UNLIMITED
    elastic: bool = False


@dataclass(frozen=True)
class Spent:
    """Failures so far, in the same sorts as `Budgets`."""

    failures: int = 0
    starts: int = 0
    nodes: int = 0


class Action(str, Enum):
    """What follows a failure."""

    RETRY = "retry"
    RAISE = "raise"


@dataclass(frozen=True)
class Decision:
    """The answer of `decide`.

    Attributes:
        action: Whether to start the group again.
        budget: Which field of `Budgets` the failure was charged to.
        spent: The counts after it.
        delay_s: Seconds to wait before the next start.
        why: For people and for the event line.
    """

    action: Action
    budget: str
    spent: Spent
    delay_s: float
    why: str


# A collective that fails because a rank at its other end is gone says so in words like these.
_COLLATERAL_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_COLLATERAL_TEXT = re.compile(
    r"connection (closed|reset|refused|was|to remote)|broken pipe|gloo|nccl|process ?group|tcpstore|socket|"
    r"collective|barrier|peer|timed out waiting for clients|heartbeat",
    re.IGNORECASE,
)
_CARRIERS = {"RuntimeError", "TimeoutError", "ConnectionError", "ConnectionResetError", "BrokenPipeError", "EOFError"}
# The next start would end the same way.
_NEVER_AT_START = {
    "ModuleNotFoundError",
    "ImportError",
    "AttributeError",
    "SyntaxError",
    "UnpicklingError",
    "NameError",
}


def is_collateral(failure: Failure) -> bool:
    """Whether it looks like the echo of another rank's failure: an error of a collective, not of the user's code."""
    kind = failure.type.rsplit(".", 1)[-1]
    if failure.kind is not Kind.ERROR:
        return False
    return kind in _COLLATERAL_TYPES or (kind in _CARRIERS and _COLLATERAL_TEXT.search(failure.text) is not None)


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """One failure a rank, the cause first: the earliest in time, errors of collectives after all others.

    Clocks of nodes differ by more than the milliseconds a collective takes to notice a dead peer, so time alone would
    sometimes name a witness.
    """
    first: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda each: (is_collateral(each), each.time)):
        first.setdefault(failure.rank, failure)
    return list(first.values())


def decide(failures: Sequence[Failure], spent: Spent, budgets: Budgets) -> Decision:
    """Whether to start again after ``failures`` (at least one): by the sort of the first one, and what is left for it.

    A group that never got all ranks ready failed to start: the budget for that is its own, small, and waits longer each
    time, because what is missing (a port, a file system, memory) often comes back. What can't come back, such as a
    module that isn't there, is raised at once. A lost node is no fault of the user's code: a group that can shrink goes
    on without it, charged to its own budget.
    """
    cause = in_order(failures)[0]
    if not cause.ready:
        budget = "starts"
    elif cause.kind is Kind.NODE and budgets.elastic:
        budget = "nodes"
    else:
        budget = "failures"
    count, limit = getattr(spent, budget) + 1, getattr(budgets, budget)
    after = replace(spent, **{budget: count})
    name = _BUDGET_NAMES[budget]
    if budget == "starts" and cause.type.rsplit(".", 1)[-1] in _NEVER_AT_START:
        return Decision(Action.RAISE, budget, after, 0.0, f"{cause.type} at start: the next one would end the same way")
    if limit != UNLIMITED and count > limit:
        return Decision(
            Action.RAISE, budget, after, 0.0, f"{_LIMIT_NAMES[budget]}={limit}, and this was {name} {count}"
        )
    delay = min(2.0 ** (count - 1), BACKOFF_LIMIT_S) if budget == "starts" else 0.0
    allowed = "any number" if limit == UNLIMITED else str(limit)
    return Decision(Action.RETRY, budget, after, delay, f"{name} {count} of {allowed}")


_BUDGET_NAMES = {"starts": "failed start", "nodes": "lost node", "failures": "failure"}
_LIMIT_NAMES = {
    "starts": "controller_failure_limit",
    "nodes": "max_preemption_failures",
    "failures": "max_failures",
}


def as_exceptions(failures: Sequence[Failure]) -> dict[int, Exception]:
    """Rank -> `WorkerError`, in the order of ``failures``; errors of builtin types can be caught as these."""
    found: dict[int, Exception] = {}
    for failure in failures:
        error = _error_class(failure.type)(failure.text)
        error.rank, error.kind, error.type, error.text = failure.rank, failure.kind, failure.type, failure.text
        error.traceback, error.exit_code = failure.traceback, failure.exit_code
        found[failure.rank] = error
    return found


_error_classes: dict[str, type[WorkerError]] = {}


def _error_class(name: str) -> type[WorkerError]:
    """`WorkerError`, joined with the builtin exception ``name`` where there is one."""
    if name not in _error_classes:
        builtin = getattr(builtins, name, None)
        # These two can't be made from a text alone.
        special = (UnicodeError, getattr(builtins, "BaseExceptionGroup", UnicodeError))
        bases: tuple[type, ...] = (WorkerError,)
        if isinstance(builtin, type) and issubclass(builtin, Exception) and not issubclass(builtin, special):
            bases = (WorkerError,) if builtin is Exception else (WorkerError, builtin)
        own_name = name if len(bases) > 1 else "WorkerError"
        _error_classes[name] = type(own_name, bases, {"__reduce__": _reduce, "__module__": __name__})
    return _error_classes[name]


def _reduce(error: WorkerError) -> tuple:
    return _rebuild, (error.type, error.text, dict(vars(error)))


def _rebuild(name: str, text: str, attributes: dict) -> WorkerError:
    error = _error_class(name)(text)
    vars(error).update(attributes)
    return error
