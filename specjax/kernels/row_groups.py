"""Products of groups of rows, each group with its own matrix, in blocks of rows: plain XLA, with its own gradient.

XLA makes of `jax.lax.ragged_dot` on GPUs (jax 0.10.2 and 0.12) a product of every row with every matrix; for 65,536
rows and 128 groups that takes many times the memory. The gradient is written out because JAX would keep a copy of all
matrices for every part of the blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Rows of a block, all of one group, and in how many parts the blocks are multiplied. Parts without rows are skipped:
# where experts are split over devices, each has rows only for its own, but room for all.
BLOCK, PARTS = 128, 8

Residuals = tuple[Array, Array, Array]


class Layout(NamedTuple):
    """Rows of groups that are padded to whole blocks.

    Attributes:
        place: int32 [M], index of each row among the padded ones. Past their end for rows after the last group: nothing
               is written there, and zeros are read.
        owner: int32 [parts, blocks], the group of each block, ascending.
        used:  bool [parts], whether a part has a row.
        zero:  int32, 0, computed from the sizes, so that XLA cannot make buffers of zeros early. It made the buffers of
               all layers of a network at the start of a prefill (for GPUs, jax 0.10.2).
    """

    place: Int[Array, "M"]
    owner: Int[Array, "parts blocks"]
    used: Bool[Array, "parts"]
    zero: Int[Array, ""]

    def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jnp.full(shape, self.zero.astype(dtype))


@jax.custom_vjp
def grouped(
    x: Float[Array, "M D"], weights: Float[Array, "groups D F"], sizes: Int[Array, "groups"]
) -> Float[Array, "M F"]:
    """Multiply each group of rows by its own matrix: the first sizes[0] rows by weights[0], and so on.

    Rows after the last group become zero. Each group is padded to whole blocks of rows, and blocks are multiplied in
    batched products, each by a copy of its group's matrix.
    """
    layout = _layout(len(x), sizes)
    return _rows(_multiplied("bid,bdf->bif", _blocks(x, layout), weights, layout), layout)


def _forward(x: Array, weights: Array, sizes: Array) -> tuple[Array, Residuals]:
    return grouped(x, weights, sizes), (x, weights, sizes)


def _backward(residuals: Residuals, gradient: Array) -> tuple[Array, Array, None]:
    x, weights, sizes = residuals
    layout = _layout(len(x), sizes)
    rows, gradients = _blocks(x, layout), _blocks(gradient, layout)
    dtype = jnp.dtype("float32") if weights.dtype.itemsize < 4 else weights.dtype

    def add_part(total: Array, part: tuple[Array, ...]) -> tuple[Array, None]:
        rows, gradients, owner, used = part

        def add(total: Array) -> Array:
            products = jnp.einsum("bid,bif->bdf", rows, gradients, preferred_element_type=dtype)
            return total.at[owner].add(products, indices_are_sorted=True)

        return jax.lax.cond(used, add, lambda total: total, total), None

    parts = rows, gradients, layout.owner, layout.used
    total, _ = jax.lax.scan(add_part, layout.zeros(weights.shape, dtype), parts)
    back = _rows(_multiplied("bif,bdf->bid", gradients, weights, layout), layout)
    # Tied, or XLA puts off the gradients of the matrices of several layers, and keeps the rows for all of them.
    back, total = jax.lax.optimization_barrier((back, total.astype(weights.dtype)))
    return back, total, None


grouped.defvjp(_forward, _backward)


def _layout(rows: int, sizes: Int[Array, "groups"]) -> Layout:
    groups, block = len(sizes), min(BLOCK, rows)
    count = -(-rows // block) + groups
    parts = min(PARTS, count)
    room = -(-count // parts) * parts * block
    ends, padded = jnp.cumsum(sizes), -(-sizes // block) * block
    padded_ends, row = jnp.cumsum(padded), jnp.arange(rows)
    group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), groups - 1)
    place = jnp.where(row < ends[-1], (padded_ends - padded)[group] + row - (ends - sizes)[group], room + row)
    first = jnp.arange(room // block).reshape(parts, -1) * block
    owner = jnp.minimum(jnp.searchsorted(padded_ends, first, side="right"), groups - 1)
    # The minimum is always 0, which XLA does not know.
    return Layout(place, owner, first[:, 0] < padded_ends[-1], jnp.minimum(sizes[0], 0))


def _blocks(x: Float[Array, "M D"], layout: Layout) -> Float[Array, "parts blocks rows D"]:
    block = min(BLOCK, len(x))
    into = layout.zeros((layout.owner.size * block, x.shape[1]), x.dtype)
    into = into.at[layout.place].set(x, mode="drop", unique_indices=True)
    return into.reshape(*layout.owner.shape, block, -1)


def _rows(blocks: Float[Array, "parts blocks rows F"], layout: Layout) -> Float[Array, "M F"]:
    padded = blocks.reshape(-1, blocks.shape[-1])
    return padded.at[layout.place].get(mode="fill", fill_value=0, unique_indices=True)


def _multiplied(
    axes: str, blocks: Float[Array, "parts blocks rows _"], weights: Float[Array, "groups D F"], layout: Layout
) -> Float[Array, "parts blocks rows _"]:
    def multiply(blocks: Array, owner: Array) -> Array:
        return jnp.einsum(axes, blocks, weights.at[owner].get(indices_are_sorted=True))

    def part(products: Array, each: tuple[Array, ...]) -> tuple[Array, None]:
        number, blocks, owner, used = each
        product = jax.lax.cond(used, multiply, lambda *_: jnp.zeros(products.shape[1:], products.dtype), blocks, owner)
        return jax.lax.dynamic_update_index_in_dim(products, product, number, 0), None

    result = jax.eval_shape(multiply, blocks[0], layout.owner[0])
    products = layout.zeros((len(blocks), *result.shape), result.dtype)
    return jax.lax.scan(part, products, (jnp.arange(len(blocks)), blocks, layout.owner, layout.used))[0]
