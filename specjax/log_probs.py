"""Log-probs of whole rows without their logits: a vocabulary's worth of numbers for each token is what training would
otherwise need the most memory for.

Hidden states become logits for some positions of every row at a time, and again in the backward pass, which keeps none
of them. Chunks are cut from the positions and not from the rows, so that rows stay on their shards.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.sampling import SamplingLaw, full_log_probs, pick
from specjax.types import ChunkedLogits, Policy, PolicyOutput, PyTree


def teacher_forced(policy: Policy, params: PyTree, tokens: Int[Array, "B T"], logit_chunk: int = 0) -> PolicyOutput:
    """The forward of whole rows, with their logits or, with a chunk size, with what gives them chunk by chunk."""
    start = jnp.zeros(len(tokens), jnp.int32)
    if not logit_chunk:
        return policy.apply(params, tokens, start)
    output = policy.apply(params, tokens, start, logits=False)
    return replace(output, chunked=ChunkedLogits(policy.unembed, logit_chunk))


def laws(
    params: PyTree, output: PolicyOutput, law: SamplingLaw
) -> tuple[Float[Array, "B T D"], Callable[[Array], Array], int]:
    """Return an array per position, a function from it to log-probs [.., V] under temperature alone, and the chunk size
    to apply it by; 0 where the output has its logits.

    params: of the policy whose output it is.
    """
    if output.chunked is None:
        return output.logits, partial(full_log_probs, law=law), 0
    unembed = partial(output.chunked.unembed, params)
    return output.hidden, lambda hidden: full_log_probs(unembed(hidden), law), output.chunked.chunk


def token_log_probs(
    params: PyTree, output: PolicyOutput, tokens: Int[Array, "B T"], law: SamplingLaw
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Return log-probs of the tokens from the second on, N = T - 1, and entropies of their laws, not differentiated."""
    source, law_of, chunk = laws(params, output, law)

    def read(source: Array, tokens: Array) -> tuple[Array, Array]:
        log_probs = law_of(source)
        held = jax.lax.stop_gradient(log_probs)
        return pick(log_probs, tokens), -jnp.sum(jnp.exp(held) * held, axis=-1)

    return by_position(read, chunk, source[:, :-1], tokens[:, 1:])


def by_position(read: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """`read(*arrays)`, a function of each position by itself, over `chunk` positions of every row at a time.

    arrays: [B, T, ..], as are the results. The backward pass computes each chunk again. 0 reads all at once.
    """
    count = arrays[0].shape[1]
    if not 0 < chunk < count:
        return read(*arrays)
    missing = -count % chunk

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])[:, :count]

    # Within a loop nothing can be shared with the forward pass, so that no barrier is needed against it.
    once_more = jax.checkpoint(lambda parts: read(*parts), prevent_cse=False)
    return jax.tree.map(join, jax.lax.map(once_more, tuple(map(cut, arrays))))
