"""Attention of new tokens over a cache in two parts: exact, and without a mask over the cache.

A verification feeds T = K + 1 tokens per row. All of them see every earlier position, which key lengths express; among
one another they are causal. The softmax over both parts follows from each part's log-sum-exp (FlashAttention-2,
arXiv 2307.08691, section 3.1.1). cuDNN knows no mask that is causal from the bottom right: with one, it would read a
bias of [B, N, T, S].
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention as _attention
from jaxtyping import Array, Float, Int

from specjax.types import LayerCache

# jax declares it to return what its overloads for training do, too.
cudnn_attention: Callable[..., Any] = _attention


class PartAttention(Protocol):
    """Attention with its log-sum-exp, N query heads to G heads of keys and values, heads before positions.

    lengths: number of keys that each row sees. None: as many as there are queries, causally.
    Returns outputs and float32 log-sum-exps.
    """

    def __call__(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B G S H"],
        v: Float[Array, "B G S H"],
        lengths: Int[Array, "B"] | None,
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]: ...


def in_two_parts(
    over_cache: PartAttention,
    among_new: PartAttention,
    q: Float[Array, "B T N H"],
    cache: LayerCache,
    start: Int[Array, "B"],
    *,
    fold: bool = False,
) -> Float[Array, "B T N H"]:
    """Attend from the tokens at start[b] .. start[b] + T - 1 of row b, whose keys and values the cache holds already.

    start: at least 1.
    fold:  give the query heads of a group to `over_cache` as queries of one head, so that it reads keys once per group.
    """
    count, grouped = q.shape[1], cache.k.shape[1]
    queries = jnp.swapaxes(q, 1, 2)
    rows, heads, _, size = queries.shape
    asked = queries.reshape(rows, grouped, -1, size) if fold else queries
    old, old_lse = over_cache(asked, cache.k, cache.v, start)
    old, old_lse = old.reshape(queries.shape), old_lse.reshape(rows, heads, count)
    new, new_lse = among_new(queries, _new(cache.k, start, count), _new(cache.v, start, count), None)
    lse = jnp.logaddexp(old_lse, new_lse)
    merged = sum(jnp.exp(own - lse)[..., None] * y.astype(lse.dtype) for own, y in ((old_lse, old), (new_lse, new)))
    return jnp.swapaxes(merged, 1, 2).astype(q.dtype)


def xla(q: Array, k: Array, v: Array, lengths: Array | None) -> tuple[Array, Array]:
    """Attend with XLA. Implements `PartAttention`."""
    (rows, heads, count, size), (grouped, positions) = q.shape, k.shape[1:3]
    q = q.reshape(rows, grouped, heads // grouped, count, size)
    wide = jnp.float32 if q.dtype == jnp.bfloat16 else q.dtype
    scores = jnp.einsum("bgnth,bgsh->bgnts", q, k, preferred_element_type=wide) * size**-0.5
    if lengths is None:
        allowed = jnp.tril(jnp.ones((count, positions), bool))[None]
    else:
        allowed = jnp.broadcast_to(
            jnp.arange(positions, dtype=lengths.dtype)[None] < lengths[:, None], (rows, positions)
        )[:, None]
    scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    y = jnp.einsum("bgnts,bgsh->bgnth", weights, v, preferred_element_type=wide)
    return y.reshape(rows, heads, count, size).astype(v.dtype), lse.reshape(rows, heads, count)


def cudnn(q: Array, k: Array, v: Array, lengths: Array | None) -> tuple[Array, Array]:
    """Attend with cuDNN. Implements `PartAttention`.

    jax's public function rounds the log-sum-exp to bfloat16, an error of up to 3% in each part's weight. It also takes
    positions before heads only, which would copy our cache.
    """
    rows, _, count, size = q.shape
    options: dict[str, Any]
    if lengths is None:
        options = dict(mask_type=MaskType.CAUSAL)
    else:
        options = dict(mask_type=MaskType.PADDING, q_seqlen=jnp.full(rows, count, jnp.int32), kv_seqlen=lengths)
    y, lse = cudnn_attention(q, k, v, scale=size**-0.5, qkv_layout="BNTH", return_residual=True, **options)
    return y, lse


def _new(cached: Float[Array, "B G S H"], start: Int[Array, "B"], count: int) -> Array:
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count, axis=1))(cached, start)
