"""Seeds and the state of random generators."""

from leyden.base.seed import isolate_rng, reset_seed, seed_everything

__all__ = ["isolate_rng", "reset_seed", "seed_everything"]
