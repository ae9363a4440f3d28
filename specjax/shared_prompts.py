"""A prompt once for its group: rows that begin with the same prompt pass a network as one packed row.

A packed row holds the prompt, then the completion of each sample: P + G C tokens in place of the G (P + C) of G rows.
All of a network but its attention and its positions treats each token by itself, and so computes the prompt once; the
gradient of the prompt is the sum over its samples.
"""

from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from specjax.types import pytree

# Share of the tokens of separate rows above which packing is not worth its copies.
MOST_TOKENS = 0.95


@pytree
class SharedPrompts:
    """Rows [R, S] of which `samples` successive ones begin with the same prompt, R = N G.

    starts:  int32 [R], where the completion of each row begins: the length of its prompt.
    prompt:  P, at least the tokens of any prompt. Static.
    budget:  C, at least the tokens of any completion. Static.
    samples: G. Static.
    """

    starts: Int[Array, "R"]
    prompt: int = field(metadata={"static": True})
    budget: int = field(metadata={"static": True})
    samples: int = field(metadata={"static": True})

    @property
    def positions(self) -> Int[Array, "N T"]:
        """Return the position of each token of the packed rows, int32."""
        prompts, after = (jnp.arange(width, dtype=jnp.int32)[None] for width in (self.prompt, self.budget))
        completions = (self.starts[:, None] + after).reshape(len(self.starts) // self.samples, -1)
        return jnp.concatenate([jnp.tile(prompts, (len(completions), 1)), completions], axis=1)

    def pack(self, rows: Shaped[Array, "R S *rest"]) -> Shaped[Array, "N T *rest"]:
        """Return the packed rows, T = P + G C, S = P + C."""
        take = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, self.budget))
        grouped = rows.reshape(-1, self.samples, *rows.shape[1:])
        completions = take(rows, self.starts).reshape(len(grouped), -1, *rows.shape[2:])
        return jnp.concatenate([grouped[:, 0, : self.prompt], completions], axis=1)

    def unpack(self, packed: Shaped[Array, "N T *rest"]) -> Shaped[Array, "R S *rest"]:
        """Return rows of S = P + C tokens, each with its prompt's. What stands after a completion means nothing."""
        prompts = jnp.repeat(packed[:, : self.prompt], self.samples, axis=0)
        rows = jnp.pad(prompts, ((0, 0), (0, self.budget), *((0, 0),) * (packed.ndim - 2)))
        put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
        return put(rows, self.completions(packed), self.starts)

    def completions(self, packed: Shaped[Array, "N T *rest"]) -> Shaped[Array, "R C *rest"]:
        """Return the completions' part of packed rows."""
        return packed[:, self.prompt :].reshape(len(self.starts), self.budget, *packed.shape[2:])


def samples_that_share(prompt: int, budget: int, samples: int) -> int:
    """Return `samples`, or 1 if packed rows of so many would save too little. prompt, budget: as in `SharedPrompts`."""
    packed, separate = prompt + samples * budget, samples * (prompt + budget)
    return samples if packed <= MOST_TOKENS * separate else 1


def shared_prompts(completion: Bool[Array, "R S"], budget: int, samples: int) -> SharedPrompts:
    """Return how rows share prompts. completion: True at completion tokens; a row without one has no prompt of its own.

    budget, samples: as in `SharedPrompts`. S is the sum of the widths of prompts and completions.
    """
    starts = jnp.argmax(completion, axis=1).astype(jnp.int32)
    return SharedPrompts(starts, completion.shape[1] - budget, budget, samples)
