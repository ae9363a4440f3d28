"""Updates of both networks from one rollout."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from specjax.options import Options, Positive
from specjax.train.batch import Sequences, TrainBatch, split
from specjax.train.loss_sums import Sums, reduce_sums
from specjax.train.optimizer import apply_gradients, usable
from specjax.types import Params

Gradients = Callable[[Params, TrainBatch, Sequences | None], tuple[Params, Sums]]


@dataclass(frozen=True)
class UpdateConfig(Options):
    """Updates per rollout.

    With one update, the policy that generated is the one that is trained, and it anchors the ratio itself. With
    several, the anchor is the rollout's log-probs (`mu`), or with recompute_old those of a training forward before the
    first update.

    Attributes:
        minibatches:   Updates per epoch. Each takes every n-th sequence of a data shard. Optimisers count updates.
        epochs:        Passes over the rollout.
        recompute_old: Anchor the ratio by one more forward before the first update: old / mu then corrects for
                       rounding.
    """

    minibatches: Positive = 1
    epochs: Positive = 1
    recompute_old: bool = False

    @property
    def count(self) -> int:
        """Return the number of updates per rollout."""
        return self.minibatches * self.epochs

    @property
    def several(self) -> bool:
        return self.count > 1


class Report(NamedTuple):
    """Report of the updates of a step.

    sums:         over all `updates`.
    first_update: sums of the first update, whose policy is the one that generated.
    norms:        gradient norms before clipping, means over the updates.
    skipped:      number of updates of each network that were skipped, for a loss or a gradient that is not finite.
    empty:        number of updates of the policy that changed nothing, because its gradient was 0.
    """

    updates: int
    sums: Sums
    first_update: Sums
    norms: Params
    skipped: Params
    empty: Array


def run_updates(
    gradients: Gradients,
    optimizers: Params,
    params: Params,
    states: Params,
    batch: TrainBatch,
    replay: Sequences | None,
    train_draft: bool | Bool[Array, ""],
    config: UpdateConfig,
) -> tuple[Params, Params, Report]:
    """Return (params, optimiser states, report) after all updates.

    gradients: (params, minibatch, its part of the replay) -> both gradients and their sums.
    replay:    rows of earlier rollouts, [n, R, ..], split over the minibatches as the batch is.
    """

    def update(carry: tuple[Params, Params], part: tuple[TrainBatch, Sequences | None]) -> tuple:
        params, states = carry
        found, sums = gradients(params, *part)
        norms = Params(optax.tree.norm(found.policy), optax.tree.norm(found.draft))
        finite = Params(usable(found.policy, sums.policy.loss), usable(found.draft, sums.draft.loss))
        # Without a gradient, the moments alone would move a network.
        moves = Params(finite.policy & (norms.policy > 0), finite.draft & (norms.draft > 0))
        params, states = apply_gradients(optimizers, found, states, params, moves, train_draft)
        return (params, states), (sums, norms, finite)

    def epoch(carry: tuple[Params, Params], _: None) -> tuple:
        return jax.lax.scan(update, carry, parts)

    parts = split(batch, config.minibatches), None
    if replay is not None:
        rows = jax.vmap(partial(split, parts=config.minibatches))(replay)
        parts = parts[0], jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows)
    (params, states), (sums, norms, finite) = jax.lax.scan(epoch, (params, states), None, length=config.epochs)
    report = Report(
        updates=config.count,
        sums=reduce_sums(sums),
        first_update=jax.tree.map(lambda x: x[0, 0], sums),
        norms=jax.tree.map(jnp.mean, norms),
        # A draft that is not trained has no update to skip, whatever its loss.
        skipped=Params(*(jnp.sum(x, dtype=jnp.int32) for x in (~finite.policy, ~finite.draft & train_draft))),
        empty=jnp.sum(finite.policy & (norms.policy == 0), dtype=jnp.int32),
    )
    return params, states, report
