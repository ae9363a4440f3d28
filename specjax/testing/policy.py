"""A policy small enough to enumerate its completions, with a real key-value cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax import kernels
from specjax.cache import decode_view, empty, token_at, uncached_view, write
from specjax.types import Cache, Policy, PolicyOutput, PyTree


def tiny_policy(vocab_size: int = 5, width: int = 8, seed: int = 0) -> tuple[Policy, PyTree]:
    """Return a policy of one causal attention layer in float32, and random parameters.

    With these parameters its law depends on the whole context.

    Its features are the residual stream, F = D = width.
    """
    dtype = jnp.dtype("float32")

    def init_cache(rows: int, length: int) -> Cache:
        return (empty(rows, length, 1, width, dtype),)

    def unembed(params: PyTree, hidden: Array) -> Array:
        return jnp.einsum("btd,dv->btv", hidden, params["head"])

    def apply(
        params: PyTree,
        tokens: Array,
        start: Array,
        cache: Cache | None = None,
        logits_at: Array | None = None,
        visible_from: Array | None = None,
    ) -> PolicyOutput:
        rows, count = tokens.shape
        position = uncached_view(start, count).positions.astype(jnp.float32)
        at = jnp.zeros_like(start) if cache is None else start
        (before,) = init_cache(rows, count) if cache is None else cache
        x = params["embed"][tokens] + jnp.sin(position[..., None] / jnp.arange(1.0, width + 1)[None, None])
        q, k, v = (jnp.einsum("btd,de->bte", x, params[name])[:, :, None] for name in ("q", "k", "v"))
        layer, view = write(before, k, v, at), decode_view(at, count, before.k.shape[2], visible_from)
        assert view.mask is not None
        x = x + kernels.attend(q, layer, view.mask)[:, :, 0]
        hidden = jnp.tanh(x)
        read = hidden if logits_at is None else token_at(hidden, logits_at)
        return PolicyOutput(unembed(params, read), x, hidden, None if cache is None else (layer,))

    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = dict(embed=(vocab_size, width), q=(width, width), k=(width, width), v=(width, width))
    shapes["head"] = (width, vocab_size)
    params = {
        name: jax.random.normal(key, shape) * (1.0 if name == "embed" else 1.5 * width**-0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    policy = Policy(
        apply=apply,
        init_cache=init_cache,
        embedding=lambda params: params["embed"],
        unembed=unembed,
        vocab_size=vocab_size,
        dtype=dtype,
    )
    return policy, params
