"""Gradients of both losses from one teacher-forced forward, accumulated over microbatches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.batch import Batch, split
from specjax.drafters import Drafter
from specjax.ladder import in_window
from specjax.loss import LossConfig, grpo_terms
from specjax.sampling import SamplingLaw, full_log_probs, pick
from specjax.types import Params, Policy, PolicyOutput, PyTree


class Sums(NamedTuple):
    """What the losses report, summed over tokens (or maximised, where named so)."""

    tokens: Array
    policy_loss: Array
    clipped: Array
    kl: Array
    entropy: Array
    ratio: Array
    ratio_max: Array
    gap: Array
    gap_max: Array
    draft_tokens: Array
    draft_loss: Array
    overlap: Array


def accumulate(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    batch: Batch,
    reference: Float[Array, "R T"] | None,
    law: SamplingLaw,
    config: LossConfig,
    *,
    microbatches: int = 1,
    train_draft: bool = True,
    ladder: tuple[int, ...] = (),
) -> tuple[Params, Sums]:
    """Gradients of the policy's and the draft's loss, each normalised by the global number of tokens it counts.

    reference:   log-probs of the batch's tokens from the second on, T = S - 1, as `reference_log_probs` gives them.
    train_draft: False leaves the draft's gradient at zero, and only measures its loss.
    ladder:      windows that a microbatch may be cut to, see `specjax.ladder`; the gradient is the same with any.

    The draft's loss reads the policy's output behind stop_gradient and is differentiated apart, so that the policy's
    gradient is the same program whether the draft is trained or not.
    """
    tokens = jnp.maximum(jnp.sum(batch.trained, dtype=jnp.float32), 1.0)
    draft_tokens = jnp.maximum(jnp.sum(batch.completion, dtype=jnp.float32), 1.0)
    start = jnp.zeros(len(batch.advantage) // microbatches, jnp.int32)
    drafting = bool(jax.tree.leaves(params.draft))

    def policy_loss(weights: PyTree, batch: Batch, reference: Array | None) -> tuple[Array, tuple[PolicyOutput, dict]]:
        output = policy.apply(weights, batch.tokens, start)
        log_probs = full_log_probs(output.logits[:, :-1], law)
        theta = pick(log_probs, batch.tokens[:, 1:])
        old = jax.lax.stop_gradient(theta)
        mu = old if batch.mu is None else batch.mu[:, 1:]
        mask = batch.trained[:, 1:]
        terms = grpo_terms(theta, old, mu, reference, batch.advantage, mask, config)
        gap = jnp.where(mask, old - mu, 0.0)
        ratio = jnp.where(mask, jnp.exp(gap), 0.0)
        log_probs = jax.lax.stop_gradient(log_probs)
        entropy = jnp.where(mask, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1), 0.0)
        loss = jnp.sum(terms.loss) / tokens
        sums = dict(
            policy_loss=loss,
            clipped=jnp.sum(terms.clipped),
            kl=jnp.sum(terms.kl),
            entropy=jnp.sum(entropy),
            ratio=jnp.sum(ratio),
            ratio_max=jnp.max(ratio),
            gap=jnp.sum(jnp.abs(gap)),
            gap_max=jnp.max(jnp.abs(gap)),
        )
        return loss, (jax.lax.stop_gradient(output), jax.lax.stop_gradient(sums))

    def draft_loss(weights: PyTree, batch: Batch, output: PolicyOutput) -> tuple[Array, Array]:
        both = Params(jax.lax.stop_gradient(params.policy), weights, params.memory)
        result = drafter.loss(both, batch.tokens, output, batch.completion, law)
        return result.loss / draft_tokens, result.overlap

    def one(window: int, batch: Batch, reference: Array | None) -> tuple[Params, dict]:
        batch, reference = batch.cut(window), None if reference is None else reference[:, : window - 1]
        with jax.named_scope("policy_gradient"):
            gradient, (output, sums) = jax.grad(policy_loss, has_aux=True)(params.policy, batch, reference)
        draft, loss, overlap = jax.tree.map(jnp.zeros_like, params.draft), jnp.float32(0), jnp.float32(0)
        with jax.named_scope("draft_gradient"):
            if train_draft:
                (loss, overlap), draft = jax.value_and_grad(draft_loss, has_aux=True)(params.draft, batch, output)
            elif drafting:
                # A frozen draft is watched all the same: what it promises is what its acceptance is held against.
                loss, overlap = draft_loss(params.draft, batch, output)
        return Params(policy=gradient, draft=draft), sums | dict(draft_loss=loss, overlap=overlap)

    def add(total: Params, part: tuple[Batch, Array | None]) -> tuple[Params, dict]:
        gradients, sums = in_window(one, ladder, *part)
        return jax.tree.map(jnp.add, total, gradients), sums

    zero = jax.tree.map(jnp.zeros_like, Params(params.policy, params.draft))
    gradients, parts = jax.lax.scan(add, zero, split((batch, reference), microbatches))
    reduced = {name: (jnp.max if name.endswith("_max") else jnp.sum)(value) for name, value in parts.items()}
    return gradients, Sums(tokens=tokens, draft_tokens=draft_tokens, **reduced)


def reference_log_probs(
    policy: Policy,
    reference: PyTree,
    batch: Batch,
    law: SamplingLaw,
    microbatches: int,
    ladder: tuple[int, ...] = (),
) -> Float[Array, "R T"]:
    """Log-probs of the batch's tokens, from the second on, under the reference policy.

    Behind the window of its microbatch, where no token counts, a row is zero.
    """
    width = batch.tokens.shape[1]

    def one(window: int, batch: Batch) -> Array:
        tokens = batch.tokens[:, :window]
        output = policy.apply(reference, tokens, jnp.zeros(len(tokens), jnp.int32))
        log_probs = pick(full_log_probs(output.logits[:, :-1], law), tokens[:, 1:])
        return jnp.pad(log_probs, ((0, 0), (0, width - window)))

    parts = jax.lax.map(lambda part: in_window(one, ladder, part), split(batch, microbatches))
    return jnp.moveaxis(parts, 0, 1).reshape(-1, parts.shape[-1])
