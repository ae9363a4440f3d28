"""Attention by cuDNN: over whole rows in training and prefill, and over long caches in rounds.

Attention over caches was measured on one H100 with jax 0.11.2: `python -m benchmarks.gpu.attention`, and rounds of
Qwen3-8B (benchmarks/results/attention_h100.txt, rounds_h100.txt).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specjax.kernels import plain
from specjax.shared_prompts import SharedPrompts
from specjax.types import LayerCache

# XLA reads shorter caches as fast, for one token of a row and for several. More than MOST_TOKENS are a prompt.
LEAST_POSITIONS, LEAST_POSITIONS_OF_SEVERAL, MOST_TOKENS = 2048, 1024, 16
# cuDNN reads the keys of each row and head with one of the GPU's 132 processors. With fewer than these, most are idle.
LEAST_HEADS = 64
# Rows from which cuDNN attends: chosen, not measured. Only on Hopper and later does it take heads of up to 256 numbers.
LEAST_ROW, LARGEST_HEAD = 64, 128
HALF = (jnp.bfloat16, jnp.float16)
# Axes of the mesh (specjax.parallel.mesh) that split rows, and heads.
ROW_AXES, HEAD_AXES = ("data", "fsdp"), ("tensor",)

# jax's primitive of the forward. In training it returns outputs and log-sum-exps, all that the backward pass asks for.
FORWARD = "dot_product_attention_fwd_wrapper"

# Outputs and float32 log-sum-exps of queries [B, N, T, H] over the first lengths[b] keys and values [B, N, S, H].
OverCache = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def attend(
    q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"], start: Int[Array, "B"] | None = None
) -> Float[Array, "B T N H"]:
    """Attend as `plain.attend` does, but read a long cache with cuDNN where `start` tells what the mask allows.

    cuDNN reads 8,192 positions of 32 rows at the bandwidth of the memory, in half the time that XLA takes.
    """
    if start is None or not _pays(q, cache.k):
        return plain.attend(q, cache, mask)

    def on_device(q: Array, k: Array, v: Array, start: Array) -> Array:
        return in_two_parts(over_cache, q, LayerCache(k, v), start)

    # XLA does not know how to divide a call of cuDNN.
    rows, heads = _split_axes(cache.k.shape[1])
    by_head = P(rows, heads)
    return _per_device(on_device, (P(rows, None, heads), by_head, by_head, P(rows)), P(rows, None, heads))(
        q, *cache, start
    )


def attend_rows(
    q: Float[Array, "B N heads H"],
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G H"],
    own: tuple[Float[Array, "B N D G H"], Float[Array, "B N D G H"]] | None = None,
    window: int | None = None,
    at: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N heads H"]:
    """Attend as `plain.attend_rows` does, with cuDNN for every token of a row in half precision.

    cuDNN keeps no scores for the backward pass, which sums with atomics: gradients differ in the last bits from run to
    run, unless XLA's flag for deterministic operations is set.
    """
    (_, count, queries, size), kv_heads = q.shape, k.shape[2]
    fits = q.dtype in HALF and count >= LEAST_ROW and size <= LARGEST_HEAD and size % 8 == 0
    if not fits or own is not None or at is not None or not _cudnn_is_here():
        return plain.attend_rows(q, k, v, own, window, at)

    def call(q: Array, k: Array, v: Array) -> Array:
        # jax refuses a gradient over an odd number of tokens. No token sees the one that is added at the end.
        q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
        before = None if window is None else (window - 1, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=before, implementation="cudnn")
        return y[:, :count]

    rows, heads = _split_axes(kv_heads)
    _, query_heads = _split_axes(queries)
    if jax.sharding.get_abstract_mesh().manual_axes:
        # A rollout, whose rows are divided already. There, jax cannot divide the call.
        return _per_device(call, (P(rows, None, heads),) * 3, P(rows, None, heads))(q, k, v)
    if heads != query_heads:
        # jax divides queries and keys alike.
        by_query = P(rows, None, query_heads)
        k, v = (jnp.repeat(x, queries // kv_heads, axis=2) for x in (k, v))
        k, v = (jax.lax.with_sharding_constraint(x, by_query) for x in (k, v))
    return call(q, k, v)


def attend_packed(
    q: Float[Array, "N T heads H"],
    k: Float[Array, "N T G H"],
    v: Float[Array, "N T G H"],
    shared: SharedPrompts,
    window: int | None = None,
) -> Float[Array, "N T heads H"]:
    """Attend as `plain.attend_packed` does, in separate rows, whose causal mask cuDNN knows."""
    q, k, v = (shared.unpack(x) for x in (q, k, v))
    return shared.pack(attend_rows(q, k, v, window=window))


def save_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what cuDNN's forward returns: a policy for `jax.checkpoint`, to which attention is no product."""
    return primitive.name == FORWARD


def _split_axes(head_count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes of the mesh, of those that the compiler still divides by, that split rows and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, heads = (tuple(axis for axis in axes if axis in _free_axes()) for axes in (ROW_AXES, HEAD_AXES))
    return rows, () if head_count % math.prod(mesh.shape[axis] for axis in heads) else heads


def _free_axes() -> set[str]:
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


def _per_device(function: Callable[..., Array], in_specs: tuple[P, ...], out_specs: P) -> Callable[..., Array]:
    """Return the function, run by each device with its own rows and heads."""
    free = _free_axes()
    if not free:
        return function
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)


def _pays(q: Float[Array, "B T N H"], keys: Float[Array, "B G S H"]) -> bool:
    """Return whether cuDNN can attend, and is measured or expected to take less time than XLA."""
    tokens, (rows, heads, positions, _) = q.shape[1], keys.shape
    least = LEAST_POSITIONS if tokens == 1 else LEAST_POSITIONS_OF_SEVERAL
    fits = q.dtype in HALF and tokens <= MOST_TOKENS and positions >= least and rows * heads >= LEAST_HEADS
    return fits and _cudnn_is_here()


def _cudnn_is_here() -> bool:
    """Return whether cuDNN is installed, as on every machine with a GPU but not on all that compile for one.

    It attends on compute capability 8.0 (A100) and later.
    """
    from jax._src.cudnn import fused_attention_stablehlo as private

    try:
        version = private.check_cudnn_version()
    except RuntimeError:
        return False
    absent = jax.default_backend() == "cpu"
    return bool(version) and (absent or private.check_compute_capability("8.0"))


def in_two_parts(
    attend_cache: OverCache, q: Float[Array, "B T N H"], cache: LayerCache, start: Int[Array, "B"]
) -> Float[Array, "B T N H"]:
    """Attend from the tokens at start[b] .. start[b] + T - 1 of row b, whose keys and values the cache holds already.

    All of them see every earlier position, which a number of keys expresses; among one another they are causal. The
    softmax over both parts follows from each part's log-sum-exp (FlashAttention-2, arXiv 2307.08691, section 3.1.1).
    cuDNN knows no mask that is causal from the bottom right: with one, it would read a bias of [B, N, T, S]. The query
    heads that share keys are asked as queries of one head, so that keys are read once.
    """
    rows, count, heads, size = q.shape
    shared = cache.k.shape[1]
    # [B, G, T * N / G, H]
    queries = jnp.swapaxes(q.reshape(rows, count, shared, -1, size), 1, 2).reshape(rows, shared, -1, size)
    if count == 1:
        y, _ = attend_cache(queries, cache.k, cache.v, start + 1)
        return y.reshape(q.shape)
    old, old_lse = attend_cache(queries, cache.k, cache.v, jnp.maximum(start, 1))
    # A row that starts at position 0 has no earlier one.
    old_lse = jnp.where((start > 0)[:, None, None], old_lse, -jnp.inf)
    new, new_lse = _among_new(queries, count, *(_from(x, start, count) for x in cache))
    lse = jnp.logaddexp(old_lse, new_lse)
    y = jnp.exp(old_lse - lse)[..., None] * old.astype(lse.dtype) + jnp.exp(new_lse - lse)[..., None] * new
    y = jnp.swapaxes(y.reshape(rows, shared, count, -1, size), 1, 2)
    return y.reshape(q.shape).astype(q.dtype)


def over_cache(
    q: Float[Array, "B N T H"], k: Float[Array, "B N S H"], v: Float[Array, "B N S H"], lengths: Int[Array, "B"]
) -> tuple[Array, Array]:
    """Attend to the first lengths[b] positions with cuDNN. Implements `OverCache`.

    jax's public function rounds the log-sum-exp to bfloat16, an error of up to 3% in each part's weight. It also takes
    positions before heads only, which would copy our cache.
    """
    # Private, so imported where a GPU needs it. jax declares it to return what its overloads for training do, too.
    from jax._src.cudnn import fused_attention_stablehlo as private

    attention: Callable[..., Any] = private.dot_product_attention
    rows, _, count, size = q.shape
    return attention(
        q,
        k,
        v,
        mask_type=private.MaskType.PADDING,
        q_seqlen=jnp.full(rows, count, jnp.int32),
        kv_seqlen=lengths,
        scale=size**-0.5,
        qkv_layout="BNTH",
        return_residual=True,
    )


def _among_new(
    queries: Float[Array, "B G Q H"], count: int, k: Float[Array, "B G T H"], v: Float[Array, "B G T H"]
) -> tuple[Float[Array, "B G Q H"], Float[Array, "B G Q"]]:
    """Attend causally among the new tokens, in float32 or wider, for Q = T * N / G queries ordered by token."""
    wide = jnp.float32 if queries.dtype in HALF else queries.dtype
    scores = jnp.einsum("bgqh,bgth->bgqt", queries, k, preferred_element_type=wide) * queries.shape[-1] ** -0.5
    token = jnp.arange(queries.shape[2]) // (queries.shape[2] // count)
    scores = jnp.where(token[:, None] >= jnp.arange(count)[None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
    return jnp.einsum("bgqt,bgth->bgqh", weights, v, preferred_element_type=wide), lse


def _from(cached: Float[Array, "B G S H"], start: Int[Array, "B"], count: int) -> Array:
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count, axis=1))(cached, start)
