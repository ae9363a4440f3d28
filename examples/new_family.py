"""Example of a custom model family: a small recurrent network (minimal gated unit, arXiv 1603.09420) as the policy.

Speculative decoding discards rejected tokens, but a recurrent state cannot be rolled back. The cache therefore keeps
the state after every position, and a forward that starts at position s begins with the state at s - 1.

    python -m launch.train tiny --model.family examples.new_family:gated_unit --draft.kind none \\
        --draft.lookup.kind ngram --distill.steps 0
"""

import jax
import jax.numpy as jnp

from specjax import Policy
from specjax.cache import token_at
from specjax.types import LayerCache, PolicyOutput


def gated_unit(model, mesh, key):
    """Return the policy and random weights. Width and vocabulary are those of model.architecture."""
    vocab, size, dtype = model.architecture.vocab_size, model.architecture.hidden_size, jnp.dtype(model.dtype)

    def unembed(params, hidden):
        return hidden @ params["embedding"].astype(dtype).T

    def init_cache(rows, length):
        return (LayerCache(k=jnp.zeros((rows, 1, length, size), dtype), v=jnp.zeros((rows, 1, length, 0), dtype)),)

    def apply(params, tokens, start, cache=None, logits_at=None, visible_from=0):
        weights = jax.tree.map(lambda x: x.astype(dtype), params)
        state = jnp.zeros((len(tokens), size), dtype)
        if cache is not None:
            states = cache[0].k[:, 0]
            before = token_at(states, jnp.maximum(start - 1, 0))[:, 0]
            state = jnp.where((start > visible_from)[:, None], before, state)

        def step(h, x):
            gate = jax.nn.sigmoid(jnp.concatenate([x, h], axis=-1) @ weights["gate"])
            h = (1 - gate) * h + gate * jnp.tanh(jnp.concatenate([x, gate * h], axis=-1) @ weights["candidate"])
            return h, h

        _, hidden = jax.lax.scan(step, state, jnp.swapaxes(weights["embedding"][tokens], 0, 1))
        hidden = jnp.swapaxes(hidden, 0, 1)
        if cache is not None:
            put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0)))
            cache = (cache[0]._replace(k=put(cache[0].k[:, 0], hidden, start)[:, None]),)
        read = hidden if logits_at is None else token_at(hidden, logits_at)
        return PolicyOutput(unembed(params, read), features=hidden[..., :0], hidden=hidden, cache=cache)

    shapes = {"embedding": (vocab, size), "gate": (2 * size, size), "candidate": (2 * size, size)}
    keys = zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    params = {name: jax.random.normal(k, shape, model.param_dtype) * size**-0.5 for (name, shape), k in keys}
    policy = Policy(apply, init_cache, lambda params: params["embedding"], unembed, vocab, dtype)
    return policy, params
