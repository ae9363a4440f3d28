"""Completions of known length: a policy that stops at the position set by the first token of its prompt."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import cache as kv
from specjax.types import Cache, Policy, PolicyOutput, PyTree


def stops_at(policy: Policy, ends: Int[np.ndarray, "V"], stop: int) -> Policy:
    """Return `policy` changed so that a row whose first token is v emits `stop` at position ends[v], and only there.

    A further cache layer holds the tokens, so that a row still knows its first token when decoding. The distribution
    thus depends only on earlier tokens, as for any policy.
    """

    def apply(
        params: PyTree, tokens: Array, start: Array, cache: Cache | None = None, logits_at: Array | None = None
    ) -> PolicyOutput:
        policy_cache = None if cache is None else cache[:-1]
        output, first, written = policy.apply(params, tokens, start, policy_cache, logits_at), tokens[:, 0], None
        if cache is not None:
            read = tokens[:, :, None, None].astype(jnp.float32)
            memory = kv.write(cache[-1], read, read, start)
            first, written = memory.k[:, 0, 0, 0].astype(jnp.int32), (*(output.cache or ()), memory)
        offset = jnp.arange(tokens.shape[1])[None] if logits_at is None else logits_at[:, None]
        ending = (start[:, None] + offset + 1 == jnp.array(ends)[first][:, None])[..., None]
        stopping = jnp.arange(policy.vocab_size)[None, None] == stop
        logits = jnp.where(ending == stopping, output.logits, -jnp.inf)
        return replace(output, logits=logits, cache=written)

    def init_cache(rows: int, length: int) -> Cache:
        return (*policy.init_cache(rows, length), kv.empty(rows, length, 1, 1, jnp.dtype(jnp.float32)))

    return replace(policy, apply=apply, init_cache=init_cache)


def long_tailed(rng: np.random.Generator, rows: int, median: int, tail: int) -> Int[np.ndarray, "rows"]:
    """Return lognormal lengths from 2 to eight times the median. At least `tail` rows have the maximum."""
    lengths = np.clip(median * np.exp(0.5 * rng.standard_normal(rows)), 2, 8 * median).astype(np.int32)
    lengths[rng.choice(rows, tail, replace=False)] = 8 * median
    return lengths
