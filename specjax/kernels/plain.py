"""Reference implementation of every operation. It is the default, and tuned kernels are tested against it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.chunks import by_position
from specjax.kernels.row_groups import grouped as grouped
from specjax.shared_prompts import SharedPrompts
from specjax.types import LayerCache, PyTree

State = TypeVar("State", bound=PyTree)
# Queries of each row that `attend_rows` scores at a time.
QUERIES = 512
Product = Callable[[str, Array, Array], Array]


def matmul(x: Float[Array, "*batch_in"], kernel: Float[Array, "*in_features"], contract: int = 1) -> Array:
    """Multiply [*batch, *in] by [*in, *features] over the first `contract` axes of the kernel; both have one dtype."""
    return jnp.tensordot(x, kernel, axes=contract)


def matmul_quantized(
    x: Float[Array, "*batch_in"], values: Shaped[Array, "*in_features"], scale: Float[Array, "*features"], contract: int
) -> Array:
    """Multiply by a kernel values * scale, whose values have 8 bits, over its first `contract` axes.

    Differentiable only in x: the kernel is a constant. The backward pass converts the values again, and keeps none.

    The scale multiplies the product, so that the values can be converted where they are read. Tied to x, they are:
    otherwise XLA for CPUs (jax 0.10.2) converts them before a loop of rounds, which then reads the copy.
    """
    return _matmul_quantized(contract, x, values, scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_quantized(contract: int, x: Array, values: Array, scale: Array) -> Array:
    x, values = jax.lax.optimization_barrier((x, values))
    return _scaled(matmul(x, values.astype(x.dtype), contract), scale)


def _matmul_quantized_forward(
    contract: int, x: Array, values: Array, scale: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _matmul_quantized(contract, x, values, scale), (values, scale)


def _matmul_quantized_backward(contract: int, kept: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    values, scale = kept
    dy, values = jax.lax.optimization_barrier((_scaled(dy, scale), values))
    features = range(contract, values.ndim)
    axes = (tuple(range(dy.ndim - len(features), dy.ndim)), tuple(features))
    return jnp.tensordot(dy, values.astype(dy.dtype), axes), None, None


_matmul_quantized.defvjp(_matmul_quantized_forward, _matmul_quantized_backward)


def _scaled(y: Array, scale: Array) -> Array:
    """Return y * scale, multiplied in float32, in the dtype of y."""
    return (y.astype(jnp.float32) * jnp.expand_dims(scale, tuple(range(y.ndim - scale.ndim)))).astype(y.dtype)


def matmul_transposed(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Multiply by the transpose of an embedding table, as a tied vocabulary head does."""
    return matmul(x, table.T)


def attend(
    q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"], start: Int[Array, "B"] | None = None
) -> Float[Array, "B T N H"]:
    """Attend to the cached positions that `mask` allows, N queries to fewer heads of keys and values.

    N is a multiple of the cache's heads. Scores and softmax are float32.

    start: the mask in short, if token t of row b may attend to exactly the positions 0 .. start[b] + t; else None.
    """
    return grouped_attention(q, cache, mask, product, product)


def grouped_attention(
    q: Float[Array, "B T N H"],
    cache: LayerCache,
    mask: Bool[Array, "B T S"],
    by_keys: Product,
    by_values: Product,
    own: tuple[Float[Array, "B T D G H"], ...] | None = None,
) -> Float[Array, "B T N H"]:
    """Return `attend`, computed with the given products. Keys are shared by the queries of a group, never repeated.

    own: keys and values that each token sees beside the cache.
    """
    rows, count, heads, size = q.shape
    groups = heads // cache.k.shape[1]
    q = jnp.swapaxes(q.reshape(rows, count, -1, groups, size), 1, 2).reshape(rows, -1, count * groups, size)
    allowed = jnp.repeat(mask, groups, axis=1)[:, None]
    scores = by_keys("bkqh,bksh->bkqs", q, cache.k) * size**-0.5
    scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
    if own is None:
        weights = jax.nn.softmax(scores, axis=-1)
        y = by_values("bkqs,bksh->bkqh", weights.astype(cache.v.dtype), cache.v)
    else:
        # [B, G, T * N / G, D, H], in float32: there are few.
        own_k, own_v = (jnp.repeat(jnp.moveaxis(x, 3, 1), groups, axis=2).astype(scores.dtype) for x in own)
        own_scores = jnp.einsum("bkqh,bkqdh->bkqd", q.astype(scores.dtype), own_k) * size**-0.5
        weights = jax.nn.softmax(jnp.concatenate([scores, own_scores], axis=-1), axis=-1)
        cache_weights, own_weights = jnp.split(weights, [scores.shape[-1]], axis=-1)
        y = by_values("bkqs,bksh->bkqh", cache_weights.astype(cache.v.dtype), cache.v)
        y += jnp.einsum("bkqd,bkqdh->bkqh", own_weights, own_v)
    y = y.astype(cache.v.dtype)
    return jnp.swapaxes(y.reshape(rows, -1, count, groups, size), 1, 2).reshape(rows, count, heads, size)


def product(axes: str, x: Array, y: Array) -> Array:
    """Return the einsum of two arrays in float32, or wider if they are."""
    return jnp.einsum(axes, x, y, preferred_element_type=widened(x.dtype))


def widened(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype that sums are made in: float32, or float64 for float64."""
    return jnp.dtype("float32") if dtype.itemsize < 4 else dtype


def attend_rows(
    q: Float[Array, "B N heads H"],
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    own: tuple[Float[Array, "B N D G H"], Float[Array, "B N D G H"]] | None = None,
    window: int | None = None,
    at: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N heads H"]:
    """Attend causally over whole rows of T tokens, in memory that grows with T.

    Queries are scored in chunks, which the backward pass computes again. Scores and softmax are float32, or wider.

    Args:
        own:    Keys and values that each query sees beside the row.
        window: Number of last keys of the row that a query sees, that at its own index included; 0: only `own`.
        at:     Index of each query in its row; None: query i is at index i, N = T.
    """
    rows, count = q.shape[:2]
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], (rows, count)) if at is None else at
    return _attend_from(q, index, k, v, jnp.arange(k.shape[1], dtype=jnp.int32)[None], own, window)


def _attend_from(
    q: Float[Array, "B N heads H"],
    index: Int[Array, "B N"],
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    place: Int[Array, "#B T"],
    own: tuple[Float[Array, "B N D G H"], Float[Array, "B N D G H"]] | None = None,
    window: int | None = None,
) -> Float[Array, "B N heads H"]:
    """Attend from queries at `index` to the keys at the places up to it. See `attend_rows`."""
    dtype = v.dtype
    # Widened here, so that the gradients of all chunks add up in float32.
    k, v = (jnp.swapaxes(x, 1, 2).astype(widened(dtype)) for x in (k, v))

    def attend_chunk(q: Array, index: Array, *own: Array) -> Array:
        mask = place[:, None] <= index[..., None]
        if window is not None:
            mask &= place[:, None] > index[..., None] - window
        cache = LayerCache(k.astype(dtype), v.astype(dtype))
        return grouped_attention(q, cache, mask, product, product, own or None)

    return by_position(attend_chunk, QUERIES, q, index, *(own or ()))


def attend_packed(
    q: Float[Array, "N T heads H"],
    k: Float[Array, "N T G H"],
    v: Float[Array, "N T G H"],
    shared: SharedPrompts,
    window: int | None = None,
) -> Float[Array, "N T heads H"]:
    """Attend causally in packed rows (specjax.shared_prompts): a completion sees its prompt and itself.

    Keys of a prompt are copied for each of its samples, its queries are not.
    """
    prompt, at = shared.prompt, shared.completions(shared.positions)
    y = attend_rows(q[:, :prompt], k[:, :prompt], v[:, :prompt], window=window)
    place = jnp.arange(prompt, dtype=jnp.int32)[None]
    # What stands after the end of a prompt is at a place that no query reaches.
    place = jnp.where(place < shared.starts[:, None], place, jnp.iinfo(jnp.int32).max)
    keys, values = (
        jnp.concatenate([jnp.repeat(x[:, :prompt], shared.samples, axis=0), shared.completions(x)], axis=1)
        for x in (k, v)
    )
    completions = _attend_from(
        shared.completions(q), at, keys, values, jnp.concatenate([place, at], axis=1), window=window
    )
    return jnp.concatenate([y, completions.reshape(len(y), -1, *y.shape[2:])], axis=1)


def write(into: Float[Array, "B G S H"], new: Float[Array, "B G T H"], start: Int[Array, "B"]) -> Array:
    """Write T new positions at start[b] of row b.

    The vmapped update keeps a sharded row axis local; `.at[rows, columns].set` would gather it.
    """
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=1))(into, new, start)


def while_loop(condition: Callable[[State], Bool[Array, ""]], body: Callable[[State], State], state: State) -> State:
    """Run `jax.lax.while_loop` over a state that holds caches."""
    return jax.lax.while_loop(condition, body, state)


def run_if(condition: Bool[Array, ""], branch: Callable[[State], State], state: State) -> State:
    """Return `branch(state)` if the condition holds, otherwise the state, which holds caches."""
    return jax.lax.cond(condition, branch, lambda state: state, state)


def switch(index: Int[Array, ""] | int, branches: Sequence[Callable[[State], State]], state: State) -> State:
    """Run `jax.lax.switch` over a state that holds caches, with branches that return the next state."""
    return jax.lax.switch(index, branches, state)


def argmax(x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Return the first index of the largest number, int32."""
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def computed_once(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Return x. A tuned kernel keeps the compiler from computing x again for each operation that reads it."""
    return x


def compiler_options(dtype: jnp.dtype) -> dict[str, Any]:
    """Return XLA's options for a program that decodes in this dtype, alone or as part of a training step.

    Options belong to a whole program: jax accepts none inside a trace.
    """
    return {}
