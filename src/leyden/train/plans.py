"""What a run asks of its controller, and the plan of every rank made from it: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.train.failure import Budgets
from leyden.train.messages import RankPlan
from leyden.train.scaling import Share, Workers

__all__ = ["RunSpec", "rank_plans"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """All that stays the same from the start of a run to its end.

    Attributes:
        name: Of the run.
        url: Of its folder, ``storage_path/name``.
        payload: The user's function, as `payload.pack_payload` makes it.
        workers: How many ranks.
        budgets: How many failures it may survive.
        storage_options: For the ranks' uploads.
        use_gpu: Whether ranks use their accelerators.
        gpus_per_worker: Accelerators of each rank; ranks share one where it is less than 1.
        backend: Of the process group; None: by device.
        timeout_s: Of the process group.
        environment: Variables for every rank.
        log_folder: Where the ranks' logs go, on their nodes; "": the agent knows, and stores them in the run folder.
        start_timeout_s: From the start of the ranks until the last one is ready.
        place_timeout_s: How long to wait for places; None: for ever.
        resize_interval_s: Between two looks for more places, for an elastic group.
        stop_grace_s: Between SIGTERM and SIGKILL when ranks are ended after a failure. Short: the others usually sit in
            a collective and can do nothing in it.
        commit_grace_s: How long a failure may wait for uploads that make a last checkpoint whole.
        hang_timeout_s: Without a sign of progress before a rank counts as hung; 0: never.
        lag_warning_s: After which ranks that a checkpoint waits for are named.
    """

    name: str
    url: str
    payload: bytes = b""
    workers: Workers = field(default_factory=lambda: Workers(1, 1))
    budgets: Budgets = field(default_factory=Budgets)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    use_gpu: bool = False
    gpus_per_worker: float = 1.0
    backend: str | None = None
    timeout_s: float = 1800.0
    environment: Mapping[str, str] = field(default_factory=dict)
    log_folder: str = ""
    start_timeout_s: float = 600.0
    place_timeout_s: float | None = None
    resize_interval_s: float = 60.0
    stop_grace_s: float = 0.2
    commit_grace_s: float = 10.0
    hang_timeout_s: float = 0.0
    lag_warning_s: float = 60.0


def rank_plans(
    spec: RunSpec, shares: Sequence[Share], attempt: int, checkpoint: str | None, next_report: int
) -> dict[str, tuple[RankPlan, ...]]:
    """Node id -> the plans of its ranks. Rank 0's node is where the ranks meet; each attempt takes another port there.

    Args:
        spec: The run.
        shares: The ranks of each node; the first has rank 0.
        attempt: Number of this start.
        checkpoint: Folder of the last committed checkpoint; None where there is none.
        next_report: Index of each rank's first report.
    """
    master = shares[0].node
    # A port that was taken while the attempt before started is not tried again at once.
    port = master.ports[attempt % len(master.ports)] if master.ports else 0
    world = sum(share.count for share in shares)
    found: dict[str, tuple[RankPlan, ...]] = {}
    for share in shares:
        visible = share.visible_devices(spec.gpus_per_worker) if spec.use_gpu else ()
        found[share.node.id] = tuple(
            RankPlan(
                attempt=attempt,
                rank=rank,
                world_size=world,
                local_rank=local,
                local_world_size=share.count,
                node_rank=share.node_rank,
                master_addr=master.address,
                master_port=port,
                run_name=spec.name,
                run_url=spec.url,
                storage_options=spec.storage_options,
                checkpoint=checkpoint,
                next_report=next_report,
                use_gpu=spec.use_gpu,
                devices=share.devices(local, spec.gpus_per_worker) if spec.use_gpu else (),
                visible_devices=visible,
                threads=share.threads,
                backend=spec.backend,
                timeout_s=spec.timeout_s,
                log_path=f"{spec.log_folder}/rank-{rank}.log" if spec.log_folder else "",
                environment=spec.environment,
                hang_timeout_s=spec.hang_timeout_s,
            )
            for local, rank in enumerate(share.ranks)
        )
    return found
