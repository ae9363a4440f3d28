"""Laws over whole rows, computed from hidden states where they are read, so that the logits [B, T, V] never exist.

Those logits would be the largest arrays in training, and most of their positions, prompts and padding, are not read.
Many positions are computed in chunks; the backward pass computes each chunk again and stores none.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Integer

from specjax import chunks
from specjax.cache import tokens_at
from specjax.parallel.mesh import spec
from specjax.sampling import SamplingLaw, full_log_probs, pick
from specjax.shared_prompts import SharedPrompts
from specjax.types import Policy, PolicyOutput, PyTree, Unembedding

# Bytes of a device that the logits of a forward may take in float32 before they are computed in chunks. The backward
# pass of a chunk holds about as much again, and computes the logits a second time. The same on every device: a chunk
# decides how sums are rounded, and a run should not depend on the memory it finds.
LOGIT_BYTES = 2**31


def positions_at_a_time(vocab_size: int, rows: int, width: int, logit_chunk: int | None) -> int:
    """Return the positions of each of `rows` rows whose logits exist at a time if `width` are read; 0: all.

    logit_chunk: as in `TrainConfig`.
    """
    if logit_chunk is not None:
        return logit_chunk
    mesh, shape = jax.sharding.get_abstract_mesh(), (rows, width, vocab_size)
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
    shared: SharedPrompts | None = None,
) -> PolicyOutput:
    """Run the policy over whole rows. The output has no logits: `laws` computes them where they are read.

    logit_chunk: as in `TrainConfig`. routes: experts to use in place of those that the routers choose. shared: prompts
    that pass the network once for several rows.
    """
    options = {} if routes is None else {"routes": routes}
    if shared is not None:
        tokens, options = jax.tree.map(shared.pack, (tokens, options))
        options["shared"] = shared
    start = jnp.zeros(len(tokens), jnp.int32)
    # Logits of one token only: none are read here, and what is traced is counted.
    output = policy.apply(params, tokens, start, logits_at=start, **options)
    output = without_logits(policy, output, logit_chunk)
    if shared is None:
        return output
    each = output.features, output.hidden, output.routing
    features, hidden, routing = jax.tree.map(shared.unpack, each)
    return replace(output, features=features, hidden=hidden, routing=routing)


def without_logits(policy: Policy, output: PolicyOutput, logit_chunk: int | None) -> PolicyOutput:
    """Return the output without its logits, which XLA then does not compute. logit_chunk: as in `TrainConfig`."""
    placeholder = Unembedding(policy.unembed, policy.vocab_size, logit_chunk)
    return replace(output, logits=output.logits[:, :0], unembedding=placeholder)


class Laws(NamedTuple):
    """A policy's laws over whole rows, under temperature alone, each computed where it is read.

    Attributes:
        source:      [B, T, ..], hidden states, or the logits of a forward that kept them.
        log_probs:   Source at any positions, [.., D] -> log-probs [.., V].
        unembedding: Placeholder for the logits; None if the source is logits, or log-probs.
    """

    source: Float[Array, "B T D"]
    log_probs: Callable[[Array], Array]
    unembedding: Unembedding | None

    def chunk(self, rows: int, width: int, networks: int = 1) -> int:
        """Return the positions of each row to apply `log_probs` to at a time if `width` are read; 0: all.

        networks: number of networks whose laws are computed beside each other.
        """
        if self.unembedding is None:
            return 0
        return positions_at_a_time(self.unembedding.vocab_size, networks * rows, width, self.unembedding.logit_chunk)

    def for_reads(self, count: int) -> "Laws":
        """Return the same laws, all of them computed now if that fits and is less work than `count` reads a row."""
        rows, width, _ = self.source.shape
        if count < width or self.chunk(rows, width):
            return self
        return Laws(self.log_probs(self.source), lambda log_p: log_p, None)

    def by_position(self, function: Callable[..., Any], *arrays: Array, networks: int = 1) -> Any:
        """Return `function(*arrays)`, computed for some positions of every row at a time (specjax.chunks).

        function: treats each position by itself. arrays: [B, N, ..]. networks: as in `chunk`.
        """
        return chunks.by_position(function, self.chunk(*arrays[0].shape[:2], networks=networks), *arrays)


def laws(params: PyTree, output: PolicyOutput, law: SamplingLaw) -> Laws:
    """Return the laws of a forward over whole rows. params: parameters of the policy that computed it."""
    if output.unembedding is None:
        return Laws(output.logits, partial(full_log_probs, law=law), None)
    unembed = partial(output.unembedding.unembed, params)
    return Laws(output.hidden, lambda hidden: full_log_probs(unembed(hidden), law), output.unembedding)


def token_log_probs(
    params: PyTree,
    output: PolicyOutput,
    tokens: Int[Array, "B T"],
    law: SamplingLaw,
    at: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Return log-probs of tokens and the entropies of the laws they were drawn from, which have no gradient.

    at: indices of the tokens, 1 or above; at index 0, which no law predicts, the result means nothing. None: all from
        the second on, N = T - 1.
    """
    policy = laws(params, output, law)

    def read(source: Array, tokens: Array) -> tuple[Array, Array]:
        return drawn_and_entropy(policy.log_probs(source), tokens)

    if at is None:
        return policy.by_position(read, policy.source[:, :-1], tokens[:, 1:])
    return policy.by_position(read, tokens_at(policy.source, jnp.maximum(at - 1, 0)), tokens_at(tokens, at))


def drawn_and_entropy(log_probs: Float[Array, "... V"], tokens: Int[Array, "..."]) -> tuple[Array, Array]:
    """Return the log-probs of tokens, and the entropies of the laws, which have no gradient."""
    constant = jax.lax.stop_gradient(log_probs)
    return pick(log_probs, tokens), -jnp.sum(jnp.exp(constant) * constant, axis=-1)
