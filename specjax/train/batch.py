"""Batches that training reads: prompts joined with their completions, one row each. S = P + C."""

from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped, UInt32

from specjax.types import Hints, Prompts, PyTree, Rollout, pytree


@pytree
class Sequences:
    """Sequences that a draft is trained on.

    tokens:     int32 [R, S], prompt and completion, left-aligned, then zeros.
    completion: bool [R, S], True at completion tokens. What was observed between turns is none.
    keys:       uint32 [R, 2], keys of the rows' draws of anchors (specjax.train.draft.anchors); None: nothing is drawn.
    routes:     [R, S, M, A], experts of each token in the rollout (`Rollout.routes`); None: not recorded.
    """

    tokens: Int[Array, "R S"]
    completion: Bool[Array, "R S"]
    keys: UInt32[Array, "R 2"] | None = None
    routes: Integer[Array, "R S M A"] | None = None

    @property
    def lengths(self) -> Int[Array, "R"]:
        """Return int32 lengths up to the last completion token; 0 without one. No loss counts anything after it."""
        return jnp.max(jnp.where(self.completion, jnp.arange(1, self.tokens.shape[1] + 1)[None], 0), axis=1)

    def places(self, most: int | None) -> Int[Array, "R N"]:
        """Return the indices of each row's completion tokens, int32, in order; then of other tokens.

        most: at least the completion tokens of any row; N is the smaller of it and S. None: S.
        """
        return jnp.argsort(~self.completion, axis=1, stable=True)[:, :most].astype(jnp.int32)


@pytree
class ScoredSequences(Sequences):
    """Sequences with their rewards and the records of the rollout; None for what the rollout did not record.

    Attributes:
        reward:   float32 [R], NaN without one.
        counted:  bool [R], rows that train the policy; the others train the draft alone.
        mu:       float32 [R, S], log-prob of each completion token when it was generated.
        proposed: bool [R, S], completion tokens at which position 1 of a draft was verified.
        accepted: bool [R, S], those of them at which it was accepted.
        current:  bool [R, S], completion tokens that the newest rollout wrote; None: all.
        hints:    text in the prompts of the teacher's rows; None without.
    """

    _: KW_ONLY
    reward: Float[Array, "R"]
    counted: Bool[Array, "R"]
    mu: Float[Array, "R S"] | None = None
    proposed: Bool[Array, "R S"] | None = None
    accepted: Bool[Array, "R S"] | None = None
    current: Bool[Array, "R S"] | None = None
    hints: Hints | None = None

    @property
    def trained(self) -> Bool[Array, "R S"]:
        """Return the mask of the tokens that count in the policy's loss."""
        return self.completion & self.counted[:, None]


@pytree
class TrainBatch(ScoredSequences):
    """Sequences that the policy is trained on, with advantages and log-probs under other policies.

    advantage: float32 [R, S], of each completion token.
    old:       float32 [R, S], log-prob of each completion token under the anchor of the ratio; None if the policy being
               trained is the anchor.
    reference: float32 [R, S], its log-prob under the reference policy; None without one.
    """

    _: KW_ONLY
    advantage: Float[Array, "R S"]
    old: Float[Array, "R S"] | None = None
    reference: Float[Array, "R S"] | None = None


def join_completions(prompts: Prompts, rollout: Rollout, reward: Float[Array, "R"]) -> ScoredSequences:
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
        outcome = place(jnp.zeros(tokens.shape, jnp.int32), rollout.draft_outcome)
        proposed, accepted = outcome > 0, outcome == 2
    if rollout.routes is not None and rollout.routes.shape[:2] != tokens.shape:
        raise ValueError(f"routes: of shape {rollout.routes.shape}; must begin with {tokens.shape}, the rows' shape")
    column, end = jnp.arange(tokens.shape[1])[None], (start + rollout.lengths)[:, None]
    completion = (column >= start[:, None]) & (column < end)
    if rollout.sampled is not None:
        completion &= place(jnp.zeros(tokens.shape, bool), rollout.sampled)
    current = None
    if rollout.resumed_at is not None:
        current = (column >= (start + rollout.resumed_at)[:, None]) & (column < end)
    return ScoredSequences(
        tokens=jnp.where(column < end, place(tokens, rollout.tokens), 0),
        completion=completion,
        reward=reward,
        counted=jnp.isfinite(reward),
        mu=None if rollout.full is None else place(jnp.zeros(tokens.shape, jnp.float32), rollout.full),
        proposed=proposed,
        accepted=accepted,
        current=current,
        routes=rollout.routes,
    )


def split(tree: PyTree, parts: int, unit: int = 1) -> PyTree:
    """Split [R, ..] into [parts, R / parts, ..], so that each data shard keeps its rows.

    unit: number of successive rows that stay together. A part takes every parts-th unit.
    """

    # No -1 in the shapes: an axis may have size 0.
    def one(x: Array) -> Array:
        size, rest = len(x) // parts, x.shape[1:]
        return jnp.moveaxis(x.reshape(size // unit, parts, unit, *rest), 1, 0).reshape(parts, size, *rest)

    return jax.tree.map(one, tree)


def join(parts: Shaped[Array, "parts R *rest"], unit: int = 1) -> Shaped[Array, "rows *rest"]:
    """Undo `split`."""
    count, size, *rest = parts.shape
    return jnp.moveaxis(parts.reshape(count, size // unit, unit, *rest), 0, 1).reshape(count * size, *rest)
