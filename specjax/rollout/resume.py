"""Continue sequences that earlier rollouts began. Finished ones keep their rows, others are prefilled and decoded.

An unfinished sequence needs one forward over its prompt and tokens, under the networks of this rollout. It is then
decoded as if all of that were its prompt, so that the drafters need not know. Its next tokens follow the law of these
networks after its prefix; their noise is keyed by this step.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.keys import SeedStep
from specjax.rollout.admission import Carry, prefill, put_carried, start_rows
from specjax.rollout.rounds import Decoding, RoundState
from specjax.types import Carried, Prompts


def resume(decoding: Decoding, carry: Carry, prompts: Prompts, carried: Carried, seed_step: SeedStep) -> Carry:
    """Return the start of a rollout with the sequences of `carried` in place of those that start there.

    A data shard goes on with at most as many as its rollout leaves: its rows must be those of the same shard before.
    Raises ValueError if sequences wait for slots, since all must have a row, and if no rollout leaves any.
    """
    config, state, sequences = decoding.config, carry.state, len(carried.lengths)
    most = config.left_over(sequences)
    if not most:
        raise ValueError(
            f"rollout.carry_over = {config.carry_over}: leaves none of the {sequences} sequences of a data shard to "
            f"the next step; must be at most {math.floor(1e4 * (1 - 1 / sequences)) / 1e4}"
        )
    if carry.queue is not None:
        raise ValueError(
            f"rollout.phases = {config.phases}: the first must have at least {sequences} slots with carry_over, one "
            "for each sequence of a data shard"
        )
    state = replace(put_carried(state, carried, carried.done), routes=None)
    rows = jnp.nonzero((carried.lengths > 0) & ~carried.done, size=most, fill_value=sequences)[0]
    resumed = _resumed_rows(decoding, state, rows, prompts, carried, seed_step)
    state = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), state, resumed)
    return carry._replace(state=state, record=replace(carry.record, routes=None))


def left_over(decoding: Decoding, carried: Carried) -> Int[Array, ""]:
    """Return how many sequences this rollout leaves unfinished, of those that it has to generate."""
    sequences = len(carried.lengths)
    table = jnp.array([decoding.config.left_over(count) for count in range(sequences + 1)], jnp.int32)
    return table[jnp.sum(~carried.done)]


def _resumed_rows(
    decoding: Decoding,
    state: RoundState,
    rows: Int[Array, "B"],
    prompts: Prompts,
    carried: Carried,
    seed_step: SeedStep,
) -> RoundState:
    """Return the state of these rows after a prefill of their prompts and tokens, with their next token."""
    config = decoding.config
    rows = jnp.minimum(rows, len(carried.lengths) - 1)
    own = jax.tree.map(lambda x: x[rows // config.group_size], prompts)
    carried = jax.tree.map(lambda x: x[rows], carried)
    tokens = jnp.pad(own.tokens, ((0, 0), (0, config.max_new_tokens)))
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    texts = Prompts(put(tokens, carried.tokens, own.lengths), own.lengths + carried.lengths, own.id)
    # The routes of earlier tokens are not carried over.
    prefilled = replace(prefill(decoding, texts, config.draft_length_in(0) > 0), routes=None)
    length = state.cache[0].k.shape[2]
    return start_rows(decoding, prefilled, jnp.arange(len(rows)), rows, seed_step, length, carried)
