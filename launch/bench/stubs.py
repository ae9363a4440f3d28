"""Stand-ins with which timing is put on given terms. None of them keeps the law of a completion."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from launch.bench.presets import LongTail
from specjax.drafters import Drafter, Proposal
from specjax.drafters.base import DraftState, Flag
from specjax.keys import Purpose, SeedStep, uniforms
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.types import Params, Policy, Prompts, Rollout
from specjax.verify import VERIFIERS, Noise, Verdict, Verifier, accept_law, draw

# No network draws it, and looked up in an embedding it counts from the end.
STOP = -1


@dataclass(frozen=True)
class FreeDrafter(Drafter):
    """Proposes tokens 0, 1, .. out of a flat law, and does no work for it: what is left of a round is verification."""

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
    """`speculative_rollout` in which a drafted token is kept with chance `rate` once those before it are.

    All of a round's work is done, and for prompts of one length. With a `tail`, completions get the lengths that
    `forced_lengths` gives, and end with STOP.
    """
    verifier = _forced(rate, tail, prompts.lengths[0])
    config = replace(config, verifier=verifier, stop_tokens=(STOP,) if tail else ())
    return speculative_rollout(policy, drafter, params, prompts, seed_step, config)


def forced_lengths(keys: UInt32[Array, "B 2"], tail: LongTail) -> Int[Array, "B"]:
    """The length of each sequence, int32, from its own key: the same whatever the phases, slots and draft lengths."""
    long, around = (uniforms(keys, jnp.full(len(keys), at), Purpose.ACCEPT) for at in (-1, -2))
    usual = (tail.median * (0.5 + around)).astype(jnp.int32)
    return jnp.where(long < 1 / tail.every, tail.longest, usual)


def _forced(rate: Array, tail: LongTail | None, prompt: Array) -> Verifier:
    """`rejection` but for how many are accepted: still one uniform against survival, now that of a geometric law.

    What is left of a row's length rides on its uniform as the integer part, k + 2 where it is more than a round.
    """
    rejection = VERIFIERS["rejection"]

    def noise(keys: Array, start: Array, k: int, vocab: int) -> Noise:
        own = rejection.noise(keys, start, k, vocab)
        if tail is None:
            return own._replace(uniform=own.uniform + (k + 2.0))
        left = forced_lengths(keys, tail) - (start - prompt)
        return own._replace(uniform=own.uniform + jnp.clip(left, 1, k + 2).astype(jnp.float32))

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        left = jnp.floor(noise.uniform)
        law = accept_law(log_p, log_q, draft, length)
        survival = jnp.broadcast_to(rate ** jnp.arange(1.0, draft.shape[1] + 1)[None], draft.shape)
        # Behind a barrier, so that the survival that is not used is still computed.
        _, survival = jax.lax.optimization_barrier((law.survival, survival))
        verdict = draw(law._replace(survival=survival), noise._replace(uniform=noise.uniform - left))
        last = left.astype(jnp.int32) - 1
        accepted = jnp.minimum(verdict.accepted, last)
        return Verdict(accepted, jnp.where(accepted == last, STOP, verdict.token))

    return Verifier(noise, verify)
