"""Gradients of both losses from one teacher-forced forward, accumulated over microbatches."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from specjax.drafters import Drafter
from specjax.log_probs import teacher_forced, token_log_probs
from specjax.sampling import SamplingLaw
from specjax.train.adaptation import when
from specjax.train.batch import Batch, split
from specjax.train.ladder import in_window, put_back, sorted_order, take_rows
from specjax.train.loss import LossConfig, policy_terms, token_weights
from specjax.types import Params, Policy, PolicyOutput, PyTree
from specjax.verify import Verifier, VerifierName, find_verifier


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
    promised: Array


def accumulate(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    batch: Batch,
    law: SamplingLaw,
    config: LossConfig,
    *,
    microbatches: int = 1,
    train_draft: bool | Bool[Array, ""] = True,
    replay: Batch | None = None,
    verifier: VerifierName | Verifier = "rejection",
    ladder: tuple[int, ...] = (),
    budget: int | None = None,
    logit_chunk: int = 0,
) -> tuple[Params, Sums]:
    """Gradients of the policy's and the draft's loss, each normalised over the whole batch.

    Where the batch has no `old`, the policy as it is anchors the ratio; without `mu`, `old` is taken for it.

    train_draft: False leaves the draft's gradient at zero, and only measures its loss. It may be traced.
    replay:      rows of earlier rollouts, [n, R, ..], which the gradient of the draft is taken over too; what is
                 reported is of `batch` alone.
    verifier:    of the rollout, by which what its drafts promise is reckoned.
    ladder:      windows that a microbatch may be cut to, see `specjax.train.ladder`; the gradient is the same with any.
    budget:      the most tokens that a completion may have; None for as many as a row.
    logit_chunk: positions of each row whose logits exist at a time (`specjax.log_probs`); 0 for all.

    The draft's loss reads the policy's output behind stop_gradient and is differentiated apart, so that the policy's
    gradient is the same program whether the draft is trained or not.
    """
    tokens = jnp.maximum(jnp.sum(batch.trained, dtype=jnp.float32), 1.0)
    shares = token_weights(batch.trained, config.aggregate, budget or batch.tokens.shape[1])
    draft_tokens = jnp.maximum(jnp.sum(batch.completion, dtype=jnp.float32), 1.0)
    taught = draft_tokens if replay is None else draft_tokens + jnp.sum(replay.completion, dtype=jnp.float32)
    drafting = bool(jax.tree.leaves(params.draft))
    zero = jax.tree.map(jnp.zeros_like, params)

    def policy_loss(weights: PyTree, batch: Batch, share: Array) -> tuple[Array, tuple[PolicyOutput, dict]]:
        output = teacher_forced(policy, weights, batch.tokens, logit_chunk)
        theta, entropy = token_log_probs(weights, output, batch.tokens, law)
        now = jax.lax.stop_gradient(theta)
        old = now if batch.old is None else batch.old[:, 1:]
        mu = old if batch.mu is None else batch.mu[:, 1:]
        reference = None if batch.reference is None else batch.reference[:, 1:]
        mask = batch.trained[:, 1:]
        advantage = batch.advantage if batch.advantage.ndim == 1 else batch.advantage[:, 1:]
        terms = policy_terms(theta, old, mu, reference, advantage, mask, config)
        gap = jnp.where(mask, now - mu, 0.0)
        ratio = jnp.where(mask, jnp.exp(gap), 0.0)
        loss = jnp.sum(terms.loss * share[:, 1:])
        sums = dict(
            policy_loss=loss,
            clipped=jnp.sum(terms.clipped),
            kl=jnp.sum(terms.kl),
            entropy=jnp.sum(jnp.where(mask, entropy, 0.0)),
            ratio=jnp.sum(ratio),
            ratio_max=jnp.max(ratio),
            gap=jnp.sum(jnp.abs(gap)),
            gap_max=jnp.max(jnp.abs(gap)),
        )
        return loss, (jax.lax.stop_gradient(output), jax.lax.stop_gradient(sums))

    def draft_loss(weights: PyTree, batch: Batch, output: PolicyOutput) -> tuple[Array, dict]:
        both = Params(jax.lax.stop_gradient(params.policy), weights, params.memory)
        result = drafter.loss(both, batch.tokens, output, batch.completion, law)
        promises = find_verifier(verifier).promises(result.overlap)
        sums = dict(
            draft_loss=result.loss,
            overlap=jnp.sum(result.overlap),
            promised=jnp.float32(0) if batch.proposed is None else jnp.sum(jnp.where(batch.proposed, promises, 0.0)),
        )
        return result.loss / taught, sums

    def teach(batch: Batch, output: PolicyOutput) -> tuple[PyTree, dict]:
        return jax.grad(draft_loss, has_aux=True)(params.draft, batch, output)

    def watch(batch: Batch, output: PolicyOutput) -> tuple[PyTree, dict]:
        # A draft at rest is watched all the same: what it promises is what its acceptance is held against.
        return zero.draft, draft_loss(params.draft, batch, output)[1]

    def one(window: int, batch: Batch, share: Array) -> tuple[Params, dict]:
        batch, share = batch.cut(window), share[:, :window]
        with jax.named_scope("policy_gradient"):
            gradient, (output, sums) = jax.grad(policy_loss, has_aux=True)(params.policy, batch, share)
        draft, drafted = zero.draft, dict.fromkeys(("draft_loss", "overlap", "promised"), jnp.float32(0))
        if drafting:
            with jax.named_scope("draft_gradient"):
                draft, drafted = when(train_draft, teach, watch, batch, output)
        return Params(policy=gradient, draft=draft), sums | drafted

    def add(total: Params, part: tuple[Batch, Array]) -> tuple[Params, dict]:
        gradients, sums = in_window(one, ladder, *part)
        return jax.tree.map(jnp.add, total, gradients), sums

    def again(window: int, batch: Batch) -> PyTree:
        batch = batch.cut(window)
        return teach(batch, jax.lax.stop_gradient(teacher_forced(policy, params.policy, batch.tokens, logit_chunk)))[0]

    def relearn(total: PyTree, rows: Batch) -> PyTree:
        each = jax.vmap(partial(split, parts=microbatches))(rows)
        parts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), each)
        return jax.lax.scan(
            lambda total, part: (jax.tree.map(jnp.add, total, in_window(again, ladder, part)), None), total, parts
        )[0]

    start_with = replace(zero, memory=())
    gradients, parts = jax.lax.scan(add, start_with, split((batch, shares), microbatches))
    if replay is not None and drafting:
        with jax.named_scope("replay"):
            draft = when(train_draft, relearn, lambda total, _: total, gradients.draft, replay)
        gradients = replace(gradients, draft=draft)
    reduced = {name: (jnp.max if name.endswith("_max") else jnp.sum)(value) for name, value in parts.items()}
    return gradients, Sums(tokens=tokens, draft_tokens=draft_tokens, **reduced)


def log_probs_of(
    policy: Policy,
    weights: PyTree,
    batch: Batch,
    law: SamplingLaw,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    ladder: tuple[int, ...] = (),
    logit_chunk: int = 0,
) -> Float[Array, "R S"]:
    """Log-probs of the completion tokens under temperature alone, by a policy of these weights; 0 elsewhere."""
    width = batch.tokens.shape[1]

    def one(window: int, batch: Batch) -> Array:
        batch = batch.cut(window)
        output = teacher_forced(policy, weights, batch.tokens, logit_chunk)
        log_probs, _ = token_log_probs(weights, output, batch.tokens, law)
        kept = jnp.where(batch.completion[:, 1:], log_probs, 0.0)
        return jnp.pad(kept, ((0, 0), (1, width - window)))

    rows = Batch(batch.tokens, batch.completion)
    order = sorted_order(rows, mesh, microbatches) if ladder else None
    if order is not None:
        rows = take_rows(rows, order, mesh)
    parts = jax.lax.map(lambda part: in_window(one, ladder, part), split(rows, microbatches))
    log_probs = jnp.moveaxis(parts, 0, 1).reshape(-1, width)
    return log_probs if order is None else put_back(log_probs, order, mesh)
