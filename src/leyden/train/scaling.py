"""How many workers, and where each of them runs: pure decisions over a `Placement`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from leyden.train.groups import Node, Placement

__all__ = ["Decision", "Move", "Share", "Workers", "decide", "in_words", "layout"]


@dataclass(frozen=True)
class Workers:
    """How many ranks a run may have: between ``least`` and ``most``; elastic when these differ."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"num_workers: {self.least} to {self.most}, but 1 <= least <= most is needed")

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least} to {self.most}" if self.elastic else str(self.most)


class Move(str, Enum):
    """What to do about the number of workers."""

    START = "start"  # with ``world`` ranks
    WAIT = "wait"  # for what ``why`` says
    REFUSE = "refuse"  # it can never fit, ``why`` says what
    GROW = "grow"  # to ``world`` ranks, at the next commit
    KEEP = "keep"


@dataclass(frozen=True)
class Decision:
    """The answer of `decide`."""

    move: Move
    world: int
    why: str


def decide(placement: Placement, workers: Workers, running: int = 0) -> Decision:
    """What to do with the places that there are.

    Args:
        placement: What the group found: places in all, with those in use.
        workers: How many are wanted.
        running: Ranks that run now; 0 before a start.

    A start takes what there is as soon as it is enough: waiting for the last worker while the others idle costs more
    than one restart when it comes. A running group never shrinks by decision, only by loss.
    """
    places = min(sum(node.ranks for node in placement.nodes), workers.most)
    if running:
        if places > running and workers.elastic:
            return Decision(Move.GROW, places, f"{places} places, {running} ranks run")
        return Decision(Move.KEEP, running, "")
    missing = placement.waiting_for or f"{workers.least - places} more places"
    if placement.impossible:
        return Decision(Move.REFUSE, 0, f"num_workers={workers} can never fit here: {missing}")
    if places < workers.least:
        return Decision(Move.WAIT, 0, f"{places} of {workers.least} workers have a place; waiting for {missing}")
    return Decision(Move.START, places, f"{places} places")


@dataclass(frozen=True)
class Share:
    """The ranks of one node: ``first`` and the ``count - 1`` after it."""

    node: Node
    node_rank: int
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def threads(self) -> int:
        """CPU threads for each rank, so that together they use the node's cores once."""
        return max(1, self.node.cpus // self.count)

    def devices(self, local_rank: int, each: float = 1.0) -> tuple[int, ...]:
        """The accelerators of one rank: ``each`` of the node's, lowest numbers first; parts of one are shared."""
        first = int(local_rank * each + 1e-9)
        return tuple(sorted(self.node.devices)[first : first + max(1, int(each))])

    def visible_devices(self, each: float = 1.0) -> tuple[int, ...]:
        """Of all ranks here, so that they can reach each other's; in numeric order."""
        return tuple(sorted({number for local in range(self.count) for number in self.devices(local, each)}))


def layout(nodes: Sequence[Node], world: int, before: Mapping[str, int] | None = None) -> tuple[Share, ...]:
    """Deals ``world`` ranks out to ``nodes``: contiguous on each, the first node has rank 0.

    Args:
        nodes: In the group's order of preference; together they have at least ``world`` places.
        world: Number of ranks.
        before: Node id -> its node rank in the attempt before. Nodes that stay keep their order and come first, so that
            ranks move as little as they can, and data cached on a node is used again.
    """
    known = before or {}
    order = sorted(range(len(nodes)), key=lambda at: (known.get(nodes[at].id, len(known)), at))
    shares: list[Share] = []
    first = 0
    for at in order:
        count = min(nodes[at].ranks, world - first)
        if count > 0:
            shares.append(Share(nodes[at], len(shares), first, count))
            first += count
    if first < world:
        raise ValueError(f"{world} ranks, but the nodes have {first} places")
    return tuple(shares)


def in_words(shares: Sequence[Share]) -> str:
    """``4 ranks on 2 nodes, 8 CPU threads each``."""
    world, threads = sum(share.count for share in shares), sorted({share.threads for share in shares})
    each = f"{threads[0]} to {threads[-1]}" if len(threads) > 1 else f"{threads[0]}"
    nodes = f"{len(shares)} nodes" if len(shares) > 1 else "one node"
    return f"{world} rank{'s' * (world > 1)} on {nodes}, {each} CPU thread{'s' * (each != '1')} each"
