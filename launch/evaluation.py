"""Accuracy on held-out prompts, through the same rollout and reward as training."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.drafters import Drafter
from specjax.generate import make_generate
from specjax.plan import RolloutConfig
from specjax.rewards import RewardFn
from specjax.types import Params, Policy, Prompts

Evaluate = Callable[[Params], float]


def make_evaluate(
    policy: Policy,
    drafter: Drafter,
    reward_fn: RewardFn,
    config: RolloutConfig,
    samples: int,
    batches: list[Prompts],
    seed: int,
    mesh: Mesh,
) -> Evaluate:
    """params -> the fraction of correct completions over `samples` of every prompt; rows with an id below 0 are filler.

    The noise is that of (seed, -1), which no training step uses, and the same at every call: two evaluations differ by
    their parameters alone. A completion that could not be scored counts as wrong.
    """
    # Any draft length has the same law. Where a run chooses, its choice is for other batches than these.
    config = replace(config, group_size=samples, draft_length=config.lengths[0], draft_lengths=())
    generate = make_generate(policy, drafter, config, mesh)
    score = jax.jit(reward_fn)
    noise = jnp.int32(seed), jnp.int32(-1)

    def evaluate(params: Params) -> float:
        # What a drafter remembers it knows by the ids of other prompts.
        params, right, total = replace(params, memory=()), 0, 0
        with jax.set_mesh(mesh):
            for prompts in batches:
                rollout = generate(params, prompts, noise)
                correct = np.asarray(score(rollout, jax.tree.map(jnp.asarray, prompts)).correct)
                counted = np.repeat(prompts.id >= 0, samples)
                right, total = right + correct[counted].sum(), total + counted.sum()
        return float(right / total)

    return evaluate
