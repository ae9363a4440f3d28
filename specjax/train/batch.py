"""From a rollout to what training reads: prompt and completion joined, one row a sequence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.types import Prompts, PyTree, Rollout, pytree


@pytree
class Batch:
    """Rows of teacher-forced training; S = P + C. What is None is not recorded, not known yet, or not asked for: rows
    that train the draft alone have tokens and completion.

    tokens:     int32 [R, S], prompt and completion, left-aligned, zero behind.
    completion: bool [R, S], which of them are completion tokens.
    mu:         float32 [R, S], log-prob of each completion token when it was generated.
    reward:     float32 [R], NaN where there is none.
    counted:    bool [R], the rows that train the policy; others train the draft alone.
    advantage:  float32 [R], or [R, S] where those of a sequence's tokens differ.
    old:        float32 [R, S], log-prob of each completion token that anchors its ratio.
    reference:  float32 [R, S], its log-prob under the reference policy.
    proposed:   bool [R, S], completion tokens at whose place position 1 of a draft stood (`Rollout.draft_outcome`);
                accepted: those of them at which it was accepted. None too where nothing could be drafted.
    """

    tokens: Int[Array, "R S"]
    completion: Bool[Array, "R S"]
    mu: Float[Array, "R S"] | None = None
    reward: Float[Array, "R"] = None  # pyright: ignore[reportAssignmentType]
    counted: Bool[Array, "R"] = None  # pyright: ignore[reportAssignmentType]
    advantage: Float[Array, "R"] | Float[Array, "R S"] = None  # pyright: ignore[reportAssignmentType]
    old: Float[Array, "R S"] | None = None
    reference: Float[Array, "R S"] | None = None
    proposed: Bool[Array, "R S"] | None = None
    accepted: Bool[Array, "R S"] | None = None

    @property
    def trained(self) -> Bool[Array, "R S"]:
        """Tokens that count in the policy's loss."""
        if self.counted is None:
            return jnp.zeros_like(self.completion)
        return self.completion & self.counted[:, None]

    @property
    def lengths(self) -> Int[Array, "R"]:
        """int32, up to the last completion token: nothing behind it counts in any loss. 0 where there is none."""
        return jnp.max(jnp.where(self.completion, jnp.arange(1, self.tokens.shape[1] + 1)[None], 0), axis=1)

    def cut(self, window: int) -> "Batch":
        """The first `window` columns."""
        return jax.tree.map(lambda x: x[:, :window] if x.ndim == 2 else x, self)


def make_batch(prompts: Prompts, rollout: Rollout, reward: Float[Array, "R"]) -> Batch:
    """Join each completion to its prompt. Rows without a finite reward do not count."""
    group = len(rollout.lengths) // len(prompts.lengths)
    start = jnp.repeat(prompts.lengths, group)

    def place(row: Array, completion: Array) -> Array:
        put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        return put(row, completion, start)

    budget = rollout.tokens.shape[1]
    tokens = jnp.pad(jnp.repeat(prompts.tokens, group, axis=0), ((0, 0), (0, budget)))
    proposed = accepted = None
    if rollout.draft_outcome is not None and rollout.drafted is not None and rollout.drafted.shape[1]:
        first = place(jnp.zeros(tokens.shape, jnp.int32), rollout.draft_outcome)
        proposed, accepted = first > 0, first == 2
    column, end = jnp.arange(tokens.shape[1])[None], (start + rollout.lengths)[:, None]
    return Batch(
        tokens=jnp.where(column < end, place(tokens, rollout.tokens), 0),
        completion=(column >= start[:, None]) & (column < end),
        mu=None if rollout.full is None else place(jnp.zeros(tokens.shape, jnp.float32), rollout.full),
        reward=reward,
        counted=jnp.isfinite(reward),
        proposed=proposed,
        accepted=accepted,
    )


def split(tree: PyTree, parts: int) -> PyTree:
    """[R, ..] -> [parts, R / parts, ..], taking every parts-th row, so that each data shard keeps its own rows."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), tree)
