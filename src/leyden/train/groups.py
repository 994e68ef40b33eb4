"""What the controller knows of its workers, wherever they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from leyden.train.messages import Down, Up

__all__ = ["Event", "Node", "Placement", "WorkerGroup"]


@dataclass(frozen=True)
class Node:
    """A place where an agent runs, and how many ranks the resources of this run allow there."""

    id: str
    address: str
    ranks: int
    devices: tuple[int, ...] = ()
    cpus: int = 1
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """The answer to a request for workers: where they can run now; or why not, and whether they ever could."""

    nodes: tuple[Node, ...]
    waiting_for: str = ""  # what is missing now, for people; "" when ``nodes`` hold all that was asked for
    impossible: bool = False  # no node, present or promised, could ever hold it


@dataclass(frozen=True)
class Event:
    """A message from a node's agent. ``message`` None: the node, or its agent, is gone."""

    node: str
    message: Up | None


class WorkerGroup(Protocol):
    """The workers of one run. One conformance suite passes on every implementation.

    The controller calls it from one thread. Nothing in it blocks longer than its ``timeout`` arguments.
    """

    def place(self, least: int, most: int, timeout: float) -> Placement:
        """Finds places for at least ``least`` and at most ``most`` ranks; agents run on the nodes returned."""
        ...

    def send(self, node: str, message: Down) -> None:
        """Sends to a node's agent; a node that is gone is no error, its `Event` says so."""
        ...

    def poll(self, timeout: float) -> Sequence[Event]:
        """What arrived, at the latest after ``timeout`` seconds; returns at once when there is something."""
        ...

    def release(self) -> None:
        """Ends all ranks and gives all places back; agents that can be reused stay warm. May be called twice."""
        ...
