"""Log-probs of whole rows, computed in chunks of positions, so that the logits [B, T, V] never exist as a whole.

Those logits would be the largest arrays in training. The backward pass computes each chunk again and stores none.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Integer

from specjax.chunks import by_position
from specjax.parallel.mesh import spec
from specjax.sampling import SamplingLaw, full_log_probs, pick
from specjax.types import ChunkedLogits, Policy, PolicyOutput, PyTree

# Bytes of a device that the logits of a forward may take in float32 before they are computed in chunks. The backward
# pass of a chunk holds about as much again, and computes the logits a second time. The same on every device: a chunk
# decides how sums are rounded, and a run should not depend on the memory it finds.
LOGIT_BYTES = 2**31


def positions_at_a_time(policy: Policy, rows: int, width: int, logit_chunk: int | None) -> int:
    """Return the positions of each of `rows` rows of `width` tokens whose logits exist at a time; 0: all.

    logit_chunk: as in `TrainConfig`.
    """
    if logit_chunk is not None:
        return logit_chunk
    mesh, shape = jax.sharding.get_abstract_mesh(), (rows, width, policy.vocab_size)
    if not mesh.empty:
        shape = NamedSharding(mesh, spec(("batch", None, "vocab"), shape, mesh)).shard_shape(shape)
    fitting = LOGIT_BYTES // (4 * shape[0] * shape[2])
    return 0 if fitting >= width else max(fitting, 1)


def teacher_forced(
    policy: Policy,
    params: PyTree,
    tokens: Int[Array, "B T"],
    logit_chunk: int | None = None,
    routes: Integer[Array, "B T M A"] | None = None,
) -> PolicyOutput:
    """Run the policy over whole rows. In chunks of logits, `chunked` stands in for the logits, which are left out.

    logit_chunk: as in `TrainConfig`. routes: experts to use in place of those that the routers choose.
    """
    start = jnp.zeros(len(tokens), jnp.int32)
    options = {} if routes is None else {"routes": routes}
    chunk = positions_at_a_time(policy, len(tokens), tokens.shape[1], logit_chunk)
    if not chunk:
        return policy.apply(params, tokens, start, **options)
    output = policy.apply(params, tokens, start, logits=False, **options)
    return replace(output, chunked=ChunkedLogits(policy.unembed, chunk))


def without_logits(policy: Policy, output: PolicyOutput, logit_chunk: int | None) -> PolicyOutput:
    """Return the output without its logits. Readers compute those that they need from the hidden state.

    logit_chunk: as in `TrainConfig`, of the positions that are read.
    """
    rows, width, _ = output.hidden.shape
    chunk = positions_at_a_time(policy, rows, width, logit_chunk) or width
    return replace(output, logits=output.logits[:, :0], chunked=ChunkedLogits(policy.unembed, chunk))


def laws(
    params: PyTree, output: PolicyOutput, law: SamplingLaw
) -> tuple[Float[Array, "B T D"], Callable[[Array], Array], int]:
    """Return (array, function, chunk size) from which the log-probs at each position can be computed.

    The function maps positions of the array to log-probs [.., V] under temperature alone. The chunk size is the number
    of positions to apply it to at a time; 0, for all at once, if the output has its logits.

    params: parameters of the policy that computed the output.
    """
    if output.chunked is None:
        return output.logits, partial(full_log_probs, law=law), 0
    unembed = partial(output.chunked.unembed, params)
    return output.hidden, lambda hidden: full_log_probs(unembed(hidden), law), output.chunked.chunk


def token_log_probs(
    params: PyTree, output: PolicyOutput, tokens: Int[Array, "B T"], law: SamplingLaw
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Return log-probs of the tokens from the second on, N = T - 1, and entropies of the laws they were drawn from.

    No gradient flows through the entropies.
    """
    source, law_of, chunk = laws(params, output, law)

    def read(source: Array, tokens: Array) -> tuple[Array, Array]:
        log_probs = law_of(source)
        constant = jax.lax.stop_gradient(log_probs)
        return pick(log_probs, tokens), -jnp.sum(jnp.exp(constant) * constant, axis=-1)

    return by_position(read, chunk, source[:, :-1], tokens[:, 1:])
