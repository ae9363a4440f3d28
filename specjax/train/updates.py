"""From one rollout to one or several updates of both networks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from specjax.train.batch import Batch, split
from specjax.train.gradients import Sums
from specjax.train.optimizer import apply_gradients, usable
from specjax.types import Params

Gradients = Callable[[Params, Batch, Batch | None], tuple[Params, Sums]]


@dataclass(frozen=True)
class UpdateConfig:
    """How often a rollout is learnt from.

    With one update the policy that generated is the one that is trained: it anchors the ratio itself. With several, the
    anchor is what generated (`mu`), or with recompute_old what the training forward makes of it.

    Attributes:
        minibatches:   updates in an epoch. Each takes every n-th sequence of a data shard, samples of all prompts, and
                       normalises its losses by its own tokens. Optimisers and schedules count updates.
        epochs:        how often all are gone through.
        recompute_old: anchor the ratio at the policy before the first update, by one more forward, so that the weight
                       old / mu corrects for what rounding makes of the rollout's log-probs.
    """

    minibatches: int = 1
    epochs: int = 1
    recompute_old: bool = False

    def __post_init__(self) -> None:
        for name in ("minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")

    @property
    def count(self) -> int:
        """Updates a rollout."""
        return self.minibatches * self.epochs

    @property
    def several(self) -> bool:
        return self.count > 1


class Report(NamedTuple):
    """sums: over all `updates`. first: those of the first update, whose policy is the one that generated.

    norms: of the gradients before clipping, means over the updates. skipped: how many updates of each network were, for
    a loss or a gradient that is not finite.
    """

    updates: int
    sums: Sums
    first: Sums
    norms: Params
    skipped: Params


def run_updates(
    gradients: Gradients,
    optimizers: Params,
    params: Params,
    states: Params,
    batch: Batch,
    replay: Batch | None,
    train_draft: bool | Bool[Array, ""],
    config: UpdateConfig,
) -> tuple[Params, Params, Report]:
    """(params, optimiser states, what was seen) after all updates.

    gradients: (params, minibatch, its part of the replay) -> both gradients and their sums.
    replay:    rows of earlier rollouts, [n, R, ..], which are shared out as the batch is.
    """

    def one(carry: tuple[Params, Params], part: tuple[Batch, Batch | None]) -> tuple[tuple[Params, Params], tuple]:
        params, states = carry
        found, sums = gradients(params, *part)
        norms = Params(optax.tree.norm(found.policy), optax.tree.norm(found.draft))
        finite = Params(usable(found.policy, sums.policy_loss), usable(found.draft, sums.draft_loss))
        params, states = apply_gradients(optimizers, found, states, params, finite, train_draft)
        return (params, states), (sums, norms, finite)

    def epoch(carry: tuple[Params, Params], _: None) -> tuple[tuple[Params, Params], tuple]:
        return jax.lax.scan(one, carry, (split(batch, config.minibatches), old))

    old = None
    if replay is not None:
        old = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), jax.vmap(partial(split, parts=config.minibatches))(replay))
    (params, states), (sums, norms, finite) = jax.lax.scan(epoch, (params, states), None, length=config.epochs)
    totals = {name: (jnp.max if name.endswith("_max") else jnp.sum)(value) for name, value in sums._asdict().items()}
    return (
        params,
        states,
        Report(
            updates=config.count,
            sums=Sums(**totals),
            first=jax.tree.map(lambda x: x[0, 0], sums),
            norms=jax.tree.map(jnp.mean, norms),
            # A draft that rests has no update to skip, whatever its loss.
            skipped=Params(*(jnp.sum(x, dtype=jnp.int32) for x in (~finite.policy, ~finite.draft & train_draft))),
        ),
    )
