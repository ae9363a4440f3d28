"""Sums over tokens that both losses report, and their combination over microbatches and updates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.train.draft.loss import DraftSums
from specjax.train.loss import LossConfig, LossInputs, kl_estimate
from specjax.train.routing import RouterSums
from specjax.train.teacher import TeacherSums


class PolicySums(NamedTuple):
    """Sums over the tokens, or over the sequences, that train the policy; names that end in `_max` are maxima.

    Attributes:
        tokens:           Number of tokens.
        sequences:        Number of sequences.
        loss:             Weighted, so that over a batch it is the loss itself.
        kl:               KL from the reference policy; 0 without one.
        entropy:          Entropy of the policy.
        ratio:            theta / mu.
        ratio_max:        The largest.
        gap:              |log theta - log mu|.
        gap_max:          The largest.
        sequence_gap:     |log theta - log mu| of whole sequences.
        sequence_gap_max: The largest.
        metrics:          Those of the loss function, by its names.
        router:           Those of the routers; None without a mixture of experts.
        current:          Number of tokens and of sequences that gaps are measured of: those of the newest rollout. None
                          without carry-over: all.
        teacher:          Those of the comparison with a teacher; None without one.
    """

    tokens: Array
    sequences: Array
    loss: Array
    kl: Array
    entropy: Array
    ratio: Array
    ratio_max: Array
    gap: Array
    gap_max: Array
    sequence_gap: Array
    sequence_gap_max: Array
    metrics: dict[str, Array]
    router: RouterSums | None = None
    current: tuple[Array, Array] | None = None
    teacher: TeacherSums | None = None

    @property
    def compared(self) -> tuple[Array, Array]:
        """Return the number of tokens and of sequences that gaps are measured of."""
        return (self.tokens, self.sequences) if self.current is None else self.current


class Sums(NamedTuple):
    """Sums that both losses report."""

    policy: PolicySums
    draft: DraftSums


def reduce_sums(parts: Sums) -> Sums:
    """Combine the sums of several parts, stacked along any axes."""
    total, policy = jax.tree.map(jnp.sum, parts), parts.policy
    maxima = {name: jnp.max(x) for name, x in policy._asdict().items() if name.endswith("_max")}
    reduced = total.policy._replace(**maxima)
    if policy.router is not None and reduced.router is not None:
        load = policy.router.load
        load = jnp.sum(load.reshape(-1, *load.shape[-2:]), axis=0)
        reduced = reduced._replace(router=reduced.router._replace(load=load))
    return total._replace(policy=reduced)


def sum_policy(
    inputs: LossInputs,
    loss: Array,
    entropy: Float[Array, "R T"],
    metrics: dict[str, Array],
    config: LossConfig,
    current: Bool[Array, "R T"] | None = None,
) -> PolicySums:
    """Sum what a microbatch reports of the policy. current: tokens of the newest rollout; None: all."""
    gap = compared = inputs.theta - inputs.mu
    counts = None
    if current is not None:
        # Policies of several versions differ for no fault.
        current &= inputs.mask
        compared, rows = jnp.where(current, gap, 0.0), jnp.any(current, axis=1)
        counts = jnp.sum(current, dtype=jnp.float32), jnp.sum(rows, dtype=jnp.float32)
    sequence_gap = jnp.abs(jnp.sum(compared, axis=1))
    ratio = jnp.where(inputs.mask, jnp.exp(gap), 0.0)
    kl = jnp.float32(0)
    if inputs.reference is not None:
        kl = jnp.sum(kl_estimate(inputs.theta, inputs.reference, config.kl_estimator))
    return PolicySums(
        tokens=jnp.sum(inputs.mask, dtype=jnp.float32),
        sequences=jnp.sum(jnp.any(inputs.mask, axis=1), dtype=jnp.float32),
        loss=loss,
        kl=kl,
        entropy=jnp.sum(jnp.where(inputs.mask, entropy, 0.0)),
        ratio=jnp.sum(ratio),
        ratio_max=jnp.max(ratio),
        gap=jnp.sum(jnp.abs(compared)),
        gap_max=jnp.max(jnp.abs(compared)),
        sequence_gap=jnp.sum(sequence_gap),
        sequence_gap_max=jnp.max(sequence_gap),
        metrics=jax.tree.map(jnp.sum, metrics),
        current=counts,
    )
