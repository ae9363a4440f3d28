"""Example of a rollout function written from scratch: plain sampling, one token per forward, without a draft.

With `coupled` it generates the same tokens as the built-in rollout, because it draws from the same noise. Copy it to
begin a decoder of your own; docs/rollout.md says how policy, caches and keys are called.

    python -m launch.train tiny --rollout.function examples.plain_rollout:rollout --draft.kind none \
        --rollout.draft-length 0 --distill.steps 0 --speedup.steps 0
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import Drafter, Params, Policy, Prompts, Rollout, RolloutConfig
from specjax.cache import resize
from specjax.keys import Purpose, SeedStep, gumbels, sequence_keys
from specjax.sampling import full_log_probs, pick, process_logits, sample
from specjax.types import Cache


class State(NamedTuple):
    cache: Cache | None
    logits: jax.Array  # [R, 1, V], of the next token
    drawn: jax.Array  # number of tokens drawn of each row
    done: jax.Array  # bool [R]
    record: Rollout


def rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Return the completions of this shard's prompts. Row r is sample r % G of prompt r // G."""
    (count, width), group, budget = prompts.tokens.shape, config.group_size, config.max_new_tokens
    # One forward of each prompt. Its samples get copies of the cache, with room for their completions.
    cache, start = policy.init_cache(count, width), jnp.zeros(count, jnp.int32)
    prefill = policy.apply(params.policy, prompts.tokens, start, cache, logits_at=prompts.lengths - 1)
    by_prompt = prompts.lengths, prompts.id, resize(prefill.cache, budget), prefill.logits
    lengths, ids, cache, logits = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), by_prompt)
    keys = sequence_keys(seed_step, ids, jnp.arange(count * group) % group)

    def next_token(state: State) -> State:
        record, active, position = state.record, ~state.done, lengths + state.drawn
        log_p = process_logits(state.logits[:, 0], config.law)
        token = sample(log_p, gumbels(keys, position, Purpose.COUPLED, policy.vocab_size))
        done = state.done | jnp.isin(token, jnp.array(config.stop_tokens, jnp.int32))
        full = pick(full_log_probs(state.logits[:, 0], config.law), token)
        column = {"tokens": token, "law": pick(log_p, token), "full": full}
        by_token = {k: getattr(record, k).at[:, state.drawn].set(jnp.where(active, x, 0)) for k, x in column.items()}
        record = Rollout(lengths=record.lengths + active.astype(jnp.int32), stopped=done, **by_token)
        # The token's keys and values are written at its position; the logits belong to the token after it.
        output = policy.apply(params.policy, token[:, None], position, state.cache)
        return State(output.cache, output.logits, state.drawn + 1, done, record)

    no_tokens, no_log_probs = (jnp.zeros((count * group, budget), dtype) for dtype in (jnp.int32, jnp.float32))
    not_done = jnp.zeros(count * group, bool)
    no_record = Rollout(no_tokens, no_tokens[:, 0], not_done, law=no_log_probs, full=no_log_probs)
    state = State(cache, logits, jnp.int32(0), not_done, no_record)
    return jax.lax.while_loop(lambda s: (s.drawn < budget) & ~jnp.all(s.done), next_token, state).record
