"""Example of a custom rollout function: generate two halves of the prompts in turn, with caches of half the size.

It is lossless. With `coupled`, it even generates the same tokens as the built-in rollout: all noise is keyed by (seed,
step, prompt, sample, position), so it does not matter which sequences are decoded together. It takes less memory but
more time, because smaller batches are slower. Each data shard needs an even number of prompts, and rollout.phases must
be empty.

    python -m launch.train tiny --rollout.function examples.fork_rollout:rollout --speedup.steps 0
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from specjax import Drafter, Params, Policy, Prompts, Rollout, RolloutConfig, speculative_rollout
from specjax.keys import SeedStep

PARTS = 2


def rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Return the completions of this shard's prompts. Row r is sample r % G of prompt r // G."""
    generate = partial(speculative_rollout, policy, drafter, params, seed_step=seed_step, config=config)
    parts = jax.tree.map(lambda x: x.reshape(PARTS, -1, *x.shape[1:]), prompts)
    by_part = jax.lax.map(lambda part: generate(prompts=part), parts)
    by_row = jax.tree.map(lambda x: x.reshape(PARTS * x.shape[1], *x.shape[2:]), by_part)

    # These counts have one row per shard, not one per sequence.
    def total(counts: jax.Array | None) -> jax.Array | None:
        return None if counts is None else jnp.sum(counts, axis=0)

    return replace(
        by_row,
        loop_rounds=total(by_part.loop_rounds),
        plain_rounds=total(by_part.plain_rounds),
        lookup_counts=total(by_part.lookup_counts),
        draft_length=by_part.draft_length[0],
    )
