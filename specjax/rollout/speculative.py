"""Generation by lossless speculative decoding, on one data shard: a fold of rounds over the phases of a plan.

All sequences, or those that find a slot, are decoded together. While others wait, they are let in as slots free up;
then the batch shrinks with the tail. In each phase the caches are as long as its rows may become.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax import cache as kv
from specjax.drafters import Drafter
from specjax.keys import SeedStep
from specjax.rollout.admission import (
    Queue,
    admit,
    compact,
    empty_record,
    prefill,
    share_finished,
    start_rows,
    write_back,
    zeros_like_result,
)
from specjax.rollout.lookup_acceptance import count_lookup_acceptance
from specjax.rollout.plan import ChosenConfig, Phase, RolloutConfig, admission, lay_out
from specjax.rollout.rounds import Decoding, RoundState, StopCondition, rounds
from specjax.types import Params, Policy, Prompts, PyTree, Rollout


class Carry(NamedTuple):
    """What goes from phase to phase: the rows at work, the sequences that wait (None where none do), the finished."""

    state: RoundState
    queue: Queue | None
    record: Rollout


def speculative_rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """G completions of each of this shard's prompts, sampled from the policy's processed law.

    The tokens depend on (seed, step, prompt id, sample, prompt, law, policy) alone, and with `rejection` on the
    proposals; on the batch around them and the phases only where these decide the length of `rejection`'s drafts, or
    the drafter reads what was said to the same prompt.
    """
    decoding = Decoding(policy, drafter, params, config)
    phases = lay_out(config, len(prompts.lengths) * config.group_size, prompts.tokens.shape[1])
    if isinstance(config, ChosenConfig) and config.chosen is not None and config.chosen.shape != (len(phases),):
        raise ValueError(f"chosen: of shape {config.chosen.shape}, must be {(len(phases),)}, an index for each phase")
    leaving = phases[-1].slots < len(prompts.lengths) * config.group_size
    carry, loop_rounds, plain_rounds = begin(decoding, prompts, seed_step, phases[0].slots, leaving=leaving), [], []
    for number, phase in enumerate(phases):
        if phase.slots < len(carry.state.done):
            record = write_back(carry.record, carry.state, decoding)
            carry = Carry(share_finished(decoding, compact(carry.state, phase.slots), record, prompts), None, record)
        before = carry
        carry, count = _run(decoding, carry, prompts, seed_step, phases, number)
        loop_rounds.append(count)
        plain_rounds.append(_plain_rounds(before, carry, count))
    draft_length = [_draft_length(config, number) for number in range(len(phases))]
    loop_rounds, draft_length, plain_rounds = (
        jnp.stack(by_phase)[None] for by_phase in (loop_rounds, draft_length, plain_rounds)
    )
    record = write_back(carry.record, carry.state, decoding)
    if len(config.lengths) > 1 and not jax.tree.leaves(params.draft):
        record = replace(record, lookup_counts=count_lookup_acceptance(decoding, carry.state)[None])
    return replace(record, loop_rounds=loop_rounds, draft_length=draft_length, plain_rounds=plain_rounds)


def begin(decoding: Decoding, prompts: Prompts, seed_step: SeedStep, slots: int, *, leaving: bool = False) -> Carry:
    """The first sequences in their slots, the others waiting, and an empty record.

    leaving: whether sequences will leave their slots before the rollout ends; their drafts then make room for others.
    """
    config, group = decoding.config, decoding.config.group_size
    sequences, sequence = len(prompts.lengths) * group, jnp.arange(slots)
    first = prefill(decoding, jax.tree.map(lambda x: x[: -(-slots // group)], prompts), _draft_length(config, 0) > 0)
    length = prompts.tokens.shape[1] + config.max_new_tokens + config.slack
    state = start_rows(decoding, first, sequence // group, sequence, seed_step, length)
    record = empty_record(config, sequences)
    if leaving:
        state = share_finished(decoding, state, record, prompts)
    if slots == sequences:
        return Carry(state, None, record)
    some = jax.tree.map(lambda x: x[: admission(config, slots)[1]], prompts)
    kept = zeros_like_result(lambda: prefill(decoding, some, _draft_length(config, 0) > 0))
    # The last prompt seated is kept where samples of it wait.
    kept = jax.tree.map(lambda zeros, made: zeros.at[0].set(made[-1]), kept, first)
    at, until = (jnp.int32(x) for x in (slots, -(-slots // group) * group))
    return Carry(state, Queue(at, at // group, until, kept), record)


def _run(
    decoding: Decoding, carry: Carry, prompts: Prompts, seed_step: SeedStep, phases: tuple[Phase, ...], number: int
) -> tuple[Carry, Int[Array, ""]]:
    """One phase, to its end or until a row has outgrown its window, and the number of its rounds."""
    phase, longest = phases[number], max(phase.window for phase in phases)
    zero = jnp.int32(0)
    if phase.window == longest:
        return _fill_and_decode(decoding, carry, prompts, seed_step, phases, number)

    def run(carry: Carry) -> tuple[Carry, Int[Array, ""]]:
        by = longest - phase.window
        carry = carry._replace(state=kv.resize(carry.state, -by))
        carry, loop_rounds = _fill_and_decode(decoding, carry, prompts, seed_step, phases, number)
        return carry._replace(state=kv.resize(carry.state, by)), loop_rounds

    return jax.lax.cond(_outgrown(carry.state, phase), lambda carry: (carry, zero), run, carry)


def _fill_and_decode(
    decoding: Decoding, carry: Carry, prompts: Prompts, seed_step: SeedStep, phases: tuple[Phase, ...], number: int
) -> tuple[Carry, Int[Array, ""]]:
    """While sequences wait, let them in and decode in turns; then decode until few enough are left for fewer slots."""
    config, phase = decoding.config, phases[number]
    left = max((later.slots for later in phases if later.slots < phase.slots), default=0)
    sequences = len(prompts.lengths) * config.group_size

    def over(state: RoundState, waiting: Int[Array, ""] | int) -> Bool[Array, ""]:
        few = (waiting == 0) & (jnp.sum(~state.done) <= left)
        return few | _outgrown(state, phase)

    def decode(state: RoundState, stop: StopCondition) -> tuple[RoundState, Array]:
        if len(config.lengths) == 1:
            return rounds(decoding, state, config.lengths[0], stop)
        whole = partial(kv.whole, like=state)

        def branch(k: int, carried: PyTree) -> tuple[PyTree, Array]:
            after, loop_rounds = rounds(decoding, whole(carried), k, stop)
            return kv.carried(after), loop_rounds

        # As a branch's loop carries them: else the XLA of jax 0.10.2 copies a lone row's caches for each branch.
        branches = [partial(branch, k) for k in config.lengths]
        carried, loop_rounds = jax.lax.switch(_choice(config, number), branches, kv.carried(state))
        return whole(carried), loop_rounds

    if carry.queue is None:
        state, loop_rounds = decode(carry.state, lambda state, _: over(state, 0))
        return carry._replace(state=state), loop_rounds
    rows = admission(config, phase.slots)[0]

    def waiting(carry: Carry) -> Int[Array, ""]:
        assert carry.queue is not None
        return sequences - carry.queue.next_sequence

    def room(state: RoundState, waiting: Int[Array, ""]) -> Bool[Array, ""]:
        return (waiting > 0) & (jnp.sum(state.done) >= jnp.minimum(rows, waiting))

    def turn(loop: tuple[Carry, Array]) -> tuple[Carry, Array]:
        carry, loop_rounds = loop
        fill = partial(admit, decoding, prompts=prompts, seed_step=seed_step, rows=rows)
        carry = jax.lax.cond(
            room(carry.state, waiting(carry)),
            lambda carry: Carry(*fill(*carry, drafting=_draft_length(config, number) > 0)),
            lambda carry: carry,
            carry,
        )
        still = waiting(carry)
        state, count = decode(carry.state, lambda state, _: over(state, still) | room(state, still))
        return carry._replace(state=state), loop_rounds + count

    return jax.lax.while_loop(lambda loop: ~over(loop[0].state, waiting(loop[0])), turn, (carry, jnp.int32(0)))


def _outgrown(state: RoundState, phase: Phase) -> Bool[Array, ""]:
    return jnp.any(~state.done & (state.visible > phase.window))


def _plain_rounds(before: Carry, after: Carry, loop_rounds: Int[Array, ""]) -> Int[Array, ""]:
    """Rounds at draft length 0 that a phase made up for: what those rows gained at least that have to go on, for they
    are waited for later; the furthest of all where none has to. Where others wait for their slots, the mean row.
    """
    if after.queue is None:
        tokens = after.state.emitted - before.state.emitted
        return jnp.min(jnp.where(after.state.done, jnp.max(tokens), tokens))

    def so_far(carry: Carry) -> tuple[Array, Array]:
        lengths = carry.record.lengths.at[carry.state.sequence].set(carry.state.emitted)
        assert carry.record.row_rounds is not None
        rounds = carry.record.row_rounds.at[carry.state.sequence].set(carry.state.row_rounds)
        return jnp.sum(jnp.maximum(lengths - 1, 0)), jnp.sum(rounds)

    tokens, rounds = (now - then for now, then in zip(so_far(after), so_far(before), strict=True))
    mean = tokens / jnp.maximum(rounds, 1)
    return jnp.rint(loop_rounds.astype(mean.dtype) * mean).astype(jnp.int32)


def _choice(config: RolloutConfig, number: int) -> Int[Array, ""]:
    if not isinstance(config, ChosenConfig) or config.chosen is None:
        raise ValueError(f"draft_lengths = {config.draft_lengths}: none is chosen for phase {number}")
    return config.chosen[number]


def _draft_length(config: RolloutConfig, number: int) -> Int[Array, ""]:
    return jnp.array(config.lengths)[0 if len(config.lengths) == 1 else _choice(config, number)]
