"""Answers of an environment: observed tokens are appended to rows whose turn has ended, with caches kept."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.environments import Environment, Observation
from specjax.rollout.rounds import Decoding, RoundState, put_rows, routes_of
from specjax.rollout.stop_strings import START
from specjax.types import Ending, Writer


@jax.named_scope("answer")
def answer(decoding: Decoding, state: RoundState) -> RoundState:
    """Let an environment in JAX answer the rows that wait for it: each ends, or begins its next turn."""
    environment, turns = decoding.config.environment, state.turns
    assert isinstance(environment, Environment) and turns is not None
    written = state.tokens[:, : decoding.config.max_new_tokens]
    after, seen = environment.step(turns.environment, written, turns.began, state.emitted)
    seen = _checked(seen, environment.width, decoding.policy.vocab_size)
    kept = _where_rows(turns.waiting, after, turns.environment)
    return apply_answers(decoding, replace(state, turns=replace(turns, environment=kept)), seen, turns.waiting)


def _checked(seen: Observation, width: int, vocab_size: int) -> Observation:
    """Return the observation, with FAILED for rows that no sequence can take. Raises ValueError for another shape."""
    shape = seen.tokens.shape
    if shape[1] > width:
        raise ValueError(f"environment: an observation of shape {shape}; must have at most width = {width} columns")
    lengths, why = jnp.clip(seen.lengths, 0, shape[1]), Ending.STOP if seen.ending is None else seen.ending
    valid = (seen.tokens >= 0) & (seen.tokens < vocab_size) | (jnp.arange(shape[1])[None] >= lengths[:, None])
    wrong = ~jnp.all(valid, axis=1) | (seen.lengths != lengths) | ~jnp.isfinite(seen.reward)
    ending = jnp.where(wrong, Ending.FAILED, why).astype(jnp.int8)
    return Observation(seen.tokens, lengths, seen.done | wrong, seen.reward, ending)


@jax.named_scope("append")
def apply_answers(decoding: Decoding, state: RoundState, seen: Observation, ready: Bool[Array, "B"]) -> RoundState:
    """Give the rows that are `ready` the answers to their turns: each ends, or begins its next turn."""
    config, turns = decoding.config, state.turns
    assert turns is not None
    why = Ending.STOP if seen.ending is None else seen.ending
    number = turns.number + ready.astype(jnp.int32)
    full = state.emitted + seen.lengths >= config.max_new_tokens
    ending = jnp.where(full, Ending.FULL, Ending.GOING)
    ending = jnp.where(number >= config.turns, Ending.TURNS, ending)
    ending = jnp.where(seen.done, why, ending).astype(jnp.int8)
    goes_on, emitted = ready & (ending == Ending.GOING), state.emitted
    failed = (ending == Ending.FAILED) | (ending == Ending.TIMED_OUT)
    state = append(decoding, state, seen.tokens, jnp.where(goes_on, seen.lengths, 0))
    return replace(
        state,
        done=state.done | (ready & ~goes_on),
        # Stop strings are looked for in each turn by itself.
        stop_state=None if state.stop_state is None else jnp.where(goes_on, START, state.stop_state),
        stopped=jnp.where(ready, ~goes_on & (ending != Ending.FULL), state.stopped),
        turns=replace(
            turns,
            number=number,
            observed=turns.observed + state.emitted - emitted,
            began=jnp.where(goes_on, state.emitted, turns.began),
            waiting=turns.waiting & ~ready,
            ending=jnp.where(ready, ending, turns.ending),
            returns=jnp.where(ready, turns.returns + jnp.where(failed, jnp.nan, seen.reward), turns.returns),
        ),
    )


def append(decoding: Decoding, state: RoundState, tokens: Int[Array, "B O"], count: Int[Array, "B"]) -> RoundState:
    """Append the first `count` tokens to each row, as observed. One forward caches the row up to the last of them.

    The drafter observes them with the policy's features, as it observes emitted tokens.
    """
    policy, config = decoding.policy, decoding.config
    fed = jnp.concatenate([state.pending[:, None], tokens[:, :-1]], axis=1)
    output = policy.apply(decoding.params.policy, fed, state.visible, state.cache, jnp.zeros_like(count))
    draft, routes = state.draft, routes_of(policy, output)
    if max(config.lengths):
        features = decoding.drafter.features(output)
        draft = decoding.drafter.append(decoding.params, draft, features, tokens, count, state.visible)
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    put = {"tokens": tokens, "law": zeros, "full": zeros, "draft_outcome": jnp.zeros_like(tokens)}
    put |= {"writer": jnp.full(tokens.shape, Writer.ENVIRONMENT, jnp.int8)}
    written = {name: put_rows(getattr(state, name), new, state.emitted) for name, new in put.items()}
    if state.routes is not None and routes is not None:
        written["routes"] = put_rows(state.routes, routes, state.visible)
    return replace(
        state,
        cache=output.cache,
        draft=draft,
        emitted=state.emitted + count,
        pending=jnp.where(count > 0, last, state.pending),
        **written,
    )


def _where_rows(rows: Bool[Array, "B"], new: object, old: object) -> object:
    """Return the rows of `new` where `rows`, otherwise those of `old`."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y), new, old)
