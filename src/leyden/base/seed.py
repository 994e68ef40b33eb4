"""Random numbers: seeding every generator, seeding loader workers, and keeping or restoring the global state."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from leyden.base.log import log, rank_zero_only, rank_zero_warn

__all__ = [
    "collect_rng_state",
    "global_seed",
    "isolate_rng",
    "reset_seed",
    "seed_everything",
    "set_rng_state",
    "worker_init_function",
    "workers_are_seeded",
]

_MAX_SEED = 2**32 - 1  # numpy takes no more

# The two variables are Lightning's: launched and spawned processes inherit them, so that every rank has the same seed.
_SEED = "PL_GLOBAL_SEED"
_WORKERS = "PL_SEED_WORKERS"


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seeds Python's, numpy's and torch's random number generators, on all devices.

    The seed is also left in the environment variable ``PL_GLOBAL_SEED``, for the processes that this one starts, and
    for distributed samplers.

    Args:
        seed: From 0 to 4294967295. None takes ``PL_GLOBAL_SEED``, or else 0.
        workers: Also give each worker process of each DataLoader its own seed, different on every rank, unless the
            loader has a ``worker_init_fn`` (numpy's generator is otherwise the same in all workers).
        verbose: Say which seed was set.

    Returns:
        The seed.

    Raises:
        ValueError: The seed is out of bounds or no integer.
    """
    if seed is None:
        inherited = os.environ.get(_SEED)
        if inherited is None:
            seed = 0
            if verbose:
                rank_zero_warn("seed_everything() without a seed takes 0; pass one, or set PL_GLOBAL_SEED")
        else:
            try:
                seed = int(inherited)
            except ValueError:
                raise ValueError(f"The environment variable {_SEED}={inherited!r} is not an integer.") from None
    seed = int(seed)
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"seed={seed} is not in bounds: numpy takes seeds from 0 to {_MAX_SEED}.")
    if verbose:
        rank = rank_zero_only.rank  # pyright: ignore[reportFunctionMemberAccess]
        log.info("%sSeed set to %d", f"[rank: {rank}] " if rank else "", seed)

    import numpy as np

    os.environ[_SEED] = str(seed)
    os.environ[_WORKERS] = str(int(workers))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def reset_seed() -> None:
    """Seeds again with what `seed_everything` set last; does nothing when it was never called."""
    if _SEED in os.environ:
        seed_everything(workers=workers_are_seeded(), verbose=False)


def global_seed(default: int = 0) -> int:
    """The seed that `seed_everything` set, in this process or the one that launched it; else ``default``."""
    return int(os.environ.get(_SEED, default))


def workers_are_seeded() -> bool:
    """Whether `seed_everything` was called with ``workers=True``."""
    return bool(int(os.environ.get(_WORKERS, "0")))


def worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """A ``worker_init_fn`` for DataLoader: seeds Python, numpy and torch in a worker, differently on every rank.

    Args:
        worker_id: The worker's index in its loader.
        rank: The global rank of the process that owns the loader; None takes this process's.
    """
    import numpy as np

    if rank is None:
        rank = rank_zero_only.rank  # pyright: ignore[reportFunctionMemberAccess]
    # torch seeded this worker with `base seed + worker id`; the base alone is what changes from epoch to epoch. A hash
    # of the three keeps neighbouring (seed, worker, rank) far apart, which sums of them would not.
    base = torch.initial_seed() - worker_id
    digest = hashlib.blake2b(f"{base}/{worker_id}/{rank}".encode(), digest_size=40).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(int.from_bytes(digest[8:24], "little"))
    np.random.seed([int.from_bytes(digest[start : start + 4], "little") for start in range(24, 40, 4)])


def collect_rng_state(include_cuda: bool = True) -> dict[str, Any]:
    """The global random state of Python, numpy, torch and, once it is in use, CUDA.

    It consists of tensors, numbers, strings, tuples and lists only, so a checkpoint that holds it loads with
    ``weights_only=True``.
    """
    import numpy as np

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
    }
    if include_cuda:
        # Asking a GPU that is not in use yet would start its context, which a process that forks later can't have.
        state["torch.cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `collect_rng_state` returned; GPUs that this host has not are left out."""
    import numpy as np

    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    cuda_states = state.get("torch.cuda") or []
    if cuda_states and torch.cuda.is_available():
        for device, cuda_state in enumerate(cuda_states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state.cpu(), device)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Context: whatever the block draws, the global random state afterwards is what it was before.

    Args:
        include_cuda: Also keep the state of CUDA's generators; False in a forked process, which can't use CUDA.
    """
    state = collect_rng_state(include_cuda)
    try:
        yield
    finally:
        set_rng_state(state)
