"""Test of whole rollouts, sampled many times, against the exact law of completions."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adapters import joined
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.parallel import processes
from specjax.rollout.generate import RolloutFn
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.environments import answers_to, sampler
from specjax.testing.exact import Cells, Completion, Fit, completion_law, count_completions, fit
from specjax.testing.proposals import refuse_without_proposals
from specjax.types import Params, Policy, Prompts

LEAST_POWER = 0.9
MOST_PATHS = 100_000


def assert_lossless(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    config: RolloutConfig,
    *,
    prompt: tuple[int, ...] = (0,),
    rollout_fn: RolloutFn = speculative_rollout,
    draws: int = 100_000,
    total_variation: float = 0.02,
    seed: int = 0,
) -> Fit:
    """Assert that completions of `prompt` follow the policy's law under `config.law`, with a chi-square test.

    The law is enumerated in float64 from teacher-forced logits, without a cache. Completions are drawn
    `config.group_size` at a time, in one program. At the level of 1e-6, a correct rollout fails once per million seeds.
    With 150 completions that are not rare, the default 100,000 draws detect a law 0.02 away in total variation with
    probability 0.98. The returned `Fit` has the power of the test at hand, and prints it.

    With an environment, turns and observations are enumerated too; its answers must not depend on seed or key, and the
    prompt's id is 0.

    Raises AssertionError if the law differs. Raises ValueError if there are too many completions to enumerate, too few
    draws for a power of 0.9 at `total_variation`, or if nothing was drafted although `config` drafts.
    """
    params = joined(params)
    cells = _enumerate(policy, params, config, prompt)
    batches = -(-draws // config.group_size)
    planned = fit({(): batches * config.group_size}, cells, total_variation)
    if planned.power < LEAST_POWER:
        raise ValueError(
            f"draws = {planned.draws}: too few, a law {total_variation} away in total variation would fail with chance "
            f"{planned.power:.2f} alone; must be {LEAST_POWER}"
        )

    tokens, zero = jnp.array([prompt], jnp.int32), jnp.zeros(1, jnp.int32)
    prompts, sample = Prompts(tokens, zero + len(prompt), zero), sampler(rollout_fn, policy, drafter, config)
    rollouts = [sample(params, prompts, seed_step(seed, step)) for step in range(batches)]
    counts = Counter[tuple[int, ...]]()
    for rollout in rollouts:
        counts.update(count_completions(rollout))
    result = fit(counts, cells, total_variation)
    if not result.passes:
        raise AssertionError(f"not lossless: {result}")
    refuse_without_proposals(config, rollouts)
    return result


def _enumerate(policy: Policy, params: Params, config: RolloutConfig, prompt: tuple[int, ...]) -> Cells:
    going_on = policy.vocab_size - (len(set(config.stop_tokens)) if config.environment is None else 0)
    if going_on**config.max_new_tokens > MOST_PATHS:
        raise ValueError(
            f"max_new_tokens = {config.max_new_tokens}: {going_on} tokens that are no stop have more than {MOST_PATHS} "
            "completions of that length"
        )
    answer = answers_to(config, prompt)

    def logits_of(tokens: np.ndarray) -> np.ndarray:
        rows = jnp.asarray(tokens, jnp.int32)
        return processes.fetch(jax.jit(policy.apply)(params.policy, rows, jnp.zeros(len(rows), jnp.int32)).logits)

    def ends(tokens: Completion) -> bool:
        return config.stop_automaton is not None and config.stop_automaton.end(tokens) is not None

    options = config.stop_tokens, config.max_new_tokens, config.law
    turns = {"answer": answer, "turn_tokens": config.turn_tokens if answer is not None else None}
    return completion_law(logits_of, prompt, policy.vocab_size, *options, ends, **turns)
