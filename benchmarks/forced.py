"""Rows whose length is known beforehand: a policy that stops where the first token of its prompt says, nowhere else."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import cache as kv
from specjax.types import Cache, Policy, PolicyOutput, PyTree


def stops_at(policy: Policy, ends: Int[np.ndarray, "V"], stop: int) -> Policy:
    """`policy` with all of its mass on the token `stop` where a row is to end, and none of it before.

    ends: the position of that token in a row whose first token is v. The row remembers its first token in a layer of
    the cache that holds tokens: the law stays a function of what stands before, as that of any policy.
    """

    def apply(
        params: PyTree, tokens: Array, start: Array, cache: Cache | None = None, logits_at: Array | None = None
    ) -> PolicyOutput:
        own = None if cache is None else cache[:-1]
        output, first, written = policy.apply(params, tokens, start, own, logits_at), tokens[:, 0], None
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
    """Lognormal lengths, 2 at least, of which `tail` are eight times the median and none is longer."""
    lengths = np.clip(median * np.exp(0.5 * rng.standard_normal(rows)), 2, 8 * median).astype(np.int32)
    lengths[rng.choice(rows, tail, replace=False)] = 8 * median
    return lengths
