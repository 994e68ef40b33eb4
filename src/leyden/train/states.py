"""The states of a run, and which may follow which."""

from collections.abc import Mapping
from enum import Enum

__all__ = ["ENDED", "NEXT", "State", "check_move"]


class State(str, Enum):
    """Where a run is."""

    INIT = "INIT"
    SCHEDULING = "SCHEDULING"  # waiting for places, then until all ranks are ready
    RUNNING = "RUNNING"  # all ranks are in the user's function
    RESTARTING = "RESTARTING"  # after a failure: the group is down, the next start is prepared
    RESIZING = "RESIZING"  # the group is being ended to start again with another number of ranks
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    ABORTED = "ABORTED"


ENDED = frozenset({State.FINISHED, State.ERRORED, State.ABORTED})

NEXT: Mapping[State, frozenset[State]] = {
    State.INIT: frozenset({State.SCHEDULING, State.SHUTTING_DOWN}),
    State.SCHEDULING: frozenset({State.RUNNING, State.RESTARTING, State.RESIZING, State.SHUTTING_DOWN}),
    State.RUNNING: frozenset({State.RESTARTING, State.RESIZING, State.SHUTTING_DOWN}),
    State.RESTARTING: frozenset({State.SCHEDULING, State.SHUTTING_DOWN}),
    State.RESIZING: frozenset({State.SCHEDULING, State.SHUTTING_DOWN}),
    State.SHUTTING_DOWN: ENDED,
    State.FINISHED: frozenset(),
    State.ERRORED: frozenset(),
    State.ABORTED: frozenset(),
}


def check_move(state: State, to: State) -> None:
    """Raises an `AssertionError` for a move that the table doesn't have: only a bug of ours can ask for it."""
    assert to in NEXT[state], f"{state.value} -> {to.value} is no transition; from {state.value}: " + (
        ", ".join(sorted(each.value for each in NEXT[state])) or "none"
    )
