"""Reference implementation of every operation. It is the default, and tuned kernels are tested against it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.types import LayerCache, PyTree

# Rows of a block in `grouped`, all of one group, and in how many parts the blocks are multiplied. Parts without rows
# are skipped: where experts are split over devices, each has rows for its own alone, but room for all.
BLOCK, PARTS = 128, 8
State = TypeVar("State", bound=PyTree)
Product = Callable[[str, Array, Array], Array]


def matmul(x: Float[Array, "*batch_in"], kernel: Float[Array, "*in_features"], contract: int = 1) -> Array:
    """Multiply [*batch, *in] by [*in, *features] over the first `contract` axes of the kernel; both have one dtype."""
    return jnp.tensordot(x, kernel, axes=contract)


def matmul_quantized(
    x: Float[Array, "*batch_in"], values: Shaped[Array, "*in_features"], scale: Float[Array, "*features"], contract: int
) -> Array:
    """Multiply by a kernel values * scale, whose values have 8 bits, over its first `contract` axes.

    The scale multiplies the product, so that the values can be converted where they are read. Tied to x, they are:
    otherwise XLA for CPUs (jax 0.10.2) converts them before a loop of rounds, which then reads the copy.
    """
    x, values = jax.lax.optimization_barrier((x, values))
    y = matmul(x, values.astype(x.dtype), contract).astype(jnp.float32)
    return (y * jnp.expand_dims(scale, tuple(range(y.ndim - scale.ndim)))).astype(x.dtype)


def matmul_transposed(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Multiply by the transpose of an embedding table, as a tied vocabulary head does."""
    return matmul(x, table.T)


def grouped(
    x: Float[Array, "M D"], weights: Float[Array, "groups D F"], sizes: Int[Array, "groups"]
) -> Float[Array, "M F"]:
    """Multiply each group of rows by its own matrix: the first sizes[0] rows by weights[0], and so on.

    Rows after the last group become zero. Each group is padded to whole blocks of rows, and blocks are multiplied in
    batched products, each by a copy of its group's matrix. XLA makes of `jax.lax.ragged_dot` on GPUs (jax 0.10.2 and
    0.12) a product of every row with every matrix; for 65,536 rows and 128 groups that takes many times the memory.
    """
    rows, groups, block = len(x), len(weights), min(BLOCK, len(x))
    count = -(-rows // block) + groups
    parts = min(PARTS, count)
    ends, padded = jnp.cumsum(sizes), -(-sizes // block) * block
    padded_ends, row = jnp.cumsum(padded), jnp.arange(rows)
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
    room = -(-count // parts) * parts * block
    # Rows after the last group lie beyond the blocks, where nothing is written and zeros are read.
    place = jnp.where(row < ends[-1], (padded_ends - padded)[group] + row - (ends - sizes)[group], room + row)
    into = jnp.zeros((room, x.shape[1]), x.dtype).at[place].set(x, mode="drop", unique_indices=True)
    first = jnp.arange(room // block).reshape(parts, -1) * block
    owner = jnp.minimum(jnp.searchsorted(padded_ends, first, side="right"), groups - 1)

    # The backward pass copies the matrices again: kept, they would be the largest arrays of training.
    @partial(jax.checkpoint, prevent_cse=False)
    def multiply(blocks: Array, owner: Array, weights: Array) -> Array:
        return jnp.einsum("bid,bdf->bif", blocks, weights.at[owner].get(indices_are_sorted=True))

    def part(_: None, each: tuple[Array, Array, Array]) -> tuple[None, Array]:
        blocks, owner, first = each
        zeros = jnp.zeros((*blocks.shape[:2], weights.shape[2]), x.dtype)
        used = first[0] < padded_ends[-1]
        return None, jax.lax.cond(used, multiply, lambda *_: zeros, blocks, owner, weights)

    _, y = jax.lax.scan(part, None, (into.reshape(parts, -1, block, x.shape[1]), owner, first))
    return y.reshape(room, -1).at[place].get(mode="fill", fill_value=0, unique_indices=True)


def attend(
    q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"], start: Int[Array, "B"] | None = None
) -> Float[Array, "B T N H"]:
    """Attend to the cached positions that `mask` allows, N queries to fewer heads of keys and values.

    N is a multiple of the cache's heads. Scores and softmax are float32.

    start: the mask in short, if token t of row b may attend to exactly the positions 0 .. start[b] + t; else None.
    """
    return grouped_attention(q, cache, mask, product, product)


def grouped_attention(
    q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"], by_keys: Product, by_values: Product
) -> Float[Array, "B T N H"]:
    """Return `attend`, computed with the given products. Keys are shared by the queries of a group, never repeated."""
    rows, count, heads, size = q.shape
    groups = heads // cache.k.shape[1]
    q = jnp.swapaxes(q.reshape(rows, count, -1, groups, size), 1, 2).reshape(rows, -1, count * groups, size)
    allowed = jnp.repeat(mask, groups, axis=1)[:, None]
    scores = by_keys("bkqh,bksh->bkqs", q, cache.k) * size**-0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(jnp.float32).min), axis=-1)
    y = by_values("bkqs,bksh->bkqh", weights.astype(cache.v.dtype), cache.v).astype(cache.v.dtype)
    return jnp.swapaxes(y.reshape(rows, -1, count, groups, size), 1, 2).reshape(rows, count, heads, size)


def product(axes: str, x: Array, y: Array) -> Array:
    """Return the einsum of two arrays in float32."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


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
