"""A policy whose tables have rows for ids that no token has, as padded vocabularies do."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.types import Policy, PolicyOutput, PyTree

# Finite, because minus infinity times a probability of 0 is NaN in entropies. In float32 its probability is exactly 0.
_LOWEST = -1e30


def with_tokens(policy: Policy, ids: Collection[int]) -> Policy:
    """Return the policy with probability 0 for every other id than these, in all that it computes.

    Rollout, verification, loss and distillation read one law. Text cannot show other ids, so a scorer would take two
    completions for one.
    """
    has_token = np.zeros(policy.vocab_size, bool)
    has_token[[*ids]] = True
    if has_token.all():
        return policy

    # A sum, because XLA fuses it with what reads the logits: on CPUs a selection takes a quarter of the head's time.
    bias = np.where(has_token, 0, _LOWEST)[None, None]

    def cut(logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        return logits + jnp.array(bias, logits.dtype)

    def apply(*args: Any, **options: Any) -> PolicyOutput:
        output = policy.apply(*args, **options)
        return replace(output, logits=cut(output.logits))

    def unembed(params: PyTree, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return cut(policy.unembed(params, hidden))

    return replace(policy, apply=apply, unembed=unembed)
