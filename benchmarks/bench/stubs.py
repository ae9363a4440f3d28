"""Stubs that force acceptance and completion lengths, for timing only: they change the output distribution."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from benchmarks.bench.presets import LongTail
from specjax.drafters import Drafter, Proposal
from specjax.drafters.base import DraftState, Flag
from specjax.keys import Purpose, SeedStep, uniforms
from specjax.options import at_least, at_most
from specjax.rollout.plan import RolloutConfig, choose_lengths
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.types import Params, Policy, Prompts, Rollout
from specjax.verify import VERIFIERS, Noise, Verdict, Verifier, accept_law, draw

# Token that no network samples. As an index into an embedding it is valid, because it counts from the end.
STOP = -1


@dataclass(frozen=True)
class ForcedConfig(RolloutConfig):
    """Options of a rollout that may end with STOP."""

    stop_tokens: tuple[Annotated[int, at_least(STOP), at_most(2**31 - 1)], ...] = ()


@dataclass(frozen=True)
class FreeDrafter(Drafter):
    """Drafter that does no work: it proposes tokens 0, 1, .. under a uniform distribution.

    A round with it costs only verification and commit.
    """

    vocab_size: int

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> DraftState:
        return ()

    def propose(
        self, params: Params, state: DraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, DraftState]:
        rows, k, _ = gumbel.shape
        tokens = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], (rows, k))
        log_q = jnp.full(gumbel.shape, -jnp.log(jnp.float32(self.vocab_size)))
        return Proposal(tokens, log_q, jnp.full(rows, k, jnp.int32)), state

    def observe(self, state: DraftState, features: Array, tokens: Array, emitted: Array) -> DraftState:
        return state


def forced_rollout(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    prompts: Prompts,
    seed_step: SeedStep,
    config: RolloutConfig,
    *,
    rate: Float[Array, ""],
    tail: LongTail | None = None,
) -> Rollout:
    """Run `speculative_rollout`, but accept a drafted token with probability `rate` if those before it are accepted.

    All of a round's work is still done. Prompts must have one length. With a `tail`, completions have the lengths of
    `forced_lengths` and end with STOP.
    """
    verifier = _forced_verifier(rate, tail, prompts.lengths[0])
    values = vars(config) | {"verifier": verifier, "stop_tokens": (STOP,) if tail else ()}
    chosen = values.pop("chosen", None)
    forced = choose_lengths(ForcedConfig(**values), chosen)
    return speculative_rollout(policy, drafter, params, prompts, seed_step, forced)


def forced_lengths(keys: UInt32[Array, "B 2"], tail: LongTail) -> Int[Array, "B"]:
    """Return the forced length of each sequence. It depends only on the sequence's key, not on phases or slots."""
    tail_uniform, spread_uniform = (
        uniforms(keys, jnp.full(len(keys), position), Purpose.ACCEPT) for position in (-1, -2)
    )
    near_median = (tail.median * (0.5 + spread_uniform)).astype(jnp.int32)
    return jnp.where(tail_uniform < 1 / tail.every, tail.longest, near_median)


def _forced_verifier(rate: Array, tail: LongTail | None, prompt_length: Array) -> Verifier:
    """Return `rejection` with forced acceptance: the uniform is compared with rate**i instead of the true survival.

    The integer part of a row's uniform carries the number of tokens left until its forced length. It is clipped at
    k + 2, one more than a round can emit.
    """
    rejection = VERIFIERS["rejection"]

    def draw_noise(keys: Array, start: Array, k: int, vocab: int) -> Noise:
        noise = rejection.noise(keys, start, k, vocab)
        if tail is None:
            return noise._replace(uniform=noise.uniform + (k + 2.0))
        remaining = forced_lengths(keys, tail) - (start - prompt_length)
        return noise._replace(uniform=noise.uniform + jnp.clip(remaining, 1, k + 2).astype(jnp.float32))

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        remaining = jnp.floor(noise.uniform)
        law = accept_law(log_p, log_q, draft, length)
        survival = jnp.broadcast_to(rate ** jnp.arange(1.0, draft.shape[1] + 1)[None], draft.shape)
        # The barrier keeps XLA from removing the true survival, whose cost belongs to the round.
        _, survival = jax.lax.optimization_barrier((law.survival, survival))
        verdict = draw(law._replace(survival=survival), noise._replace(uniform=noise.uniform - remaining))
        most_accepted = remaining.astype(jnp.int32) - 1
        accepted = jnp.minimum(verdict.accepted, most_accepted)
        return Verdict(accepted, jnp.where(accepted == most_accepted, STOP, verdict.token))

    return Verifier(draw_noise, verify)
