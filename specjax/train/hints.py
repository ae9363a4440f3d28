"""Hints: text that only the teacher sees, put into the prompts of its rows on the device.

A worked solution of each problem comes with its prompt. Or a row gets the first correct completion of its group, other
than itself (SDPO, arXiv 2601.20802): token ids that are on the device, so that nothing is rendered or tokenised again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.types import Hints, Rollout


class HintTemplate(NamedTuple):
    """Where a hint stands in a prompt, as token ids.

    Attributes:
        before: Tokens before it.
        after:  Tokens after it.
        tail:   Number of a prompt's last tokens before which all of this stands, such as those that open an answer.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    tail: int

    def most(self, hint: int) -> int:
        """Return by how many tokens a hint of so many lengthens a row."""
        return len(self.before) + hint + len(self.after)


def group_hints(rollout: Rollout, correct: Bool[Array, "R"], group_size: int) -> Hints:
    """Return for each row the first correct completion of its group other than its own, of length 0 without one.

    What ended the completion is left out.
    """
    rows = jnp.arange(len(correct)).reshape(-1, group_size)
    members, good = rows[:, None], correct.reshape(-1, 1, group_size)
    # Of each row [N, G, 1], the members [N, 1, G] that may help it.
    helps = good & (members != rows[:, :, None])
    first = rows[:, :1] + jnp.argmax(helps, axis=2)
    source, found = first.ravel(), jnp.any(helps, axis=2).ravel()
    ends = 1 if rollout.stopped is None else rollout.stopped.astype(jnp.int32)
    lengths = jnp.maximum(rollout.lengths - ends, 0)
    return Hints(rollout.tokens[source], jnp.where(found, lengths[source], 0))


def with_hints(
    tokens: Int[Array, "R S"], starts: Int[Array, "R"], hints: Hints, template: HintTemplate
) -> tuple[Int[Array, "R T"], Int[Array, "R"]]:
    """Return rows with hints in their prompts, T = S + `template.most(H)`, and by how many tokens each is longer.

    starts: where the completion of each row begins. A row whose hint has length 0 stays as it is.
    """
    before, after = (jnp.array(ids, jnp.int32) for ids in (template.before, template.after))
    longer = jnp.where(hints.lengths > 0, len(before) + hints.lengths + len(after), 0)

    def insert(row: Array, start: Array, hint: Array, length: Array, longer: Array) -> Array:
        new = jnp.concatenate([before, hint, jnp.zeros(len(after), jnp.int32)])
        new = jax.lax.dynamic_update_slice(new, after, (len(before) + length,))
        at, column = jnp.maximum(start - template.tail, 0), jnp.arange(len(row) + len(new))
        own = jnp.where(column < at, column, column - longer)
        inside = (column >= at) & (column < at + longer)
        values = row.at[own].get(mode="fill", fill_value=0)
        return jnp.where(inside, new.at[column - at].get(mode="fill", fill_value=0), values)

    return jax.vmap(insert)(tokens, starts, hints.tokens, hints.lengths, longer), longer
