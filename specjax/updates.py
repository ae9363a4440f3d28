"""From one rollout to one or several updates of both networks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from specjax.batch import Batch, split
from specjax.gradients import Sums
from specjax.optimizer import apply_gradients
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
    def several(self) -> bool:
        return self.minibatches * self.epochs > 1


class Report(NamedTuple):
    """sums: over all `updates`. first: those of the first update, whose policy is the one that generated.

    promised: of the first epoch, which sees each token once. norms: of the gradients before clipping, means over the
    updates, and skipped: how many updates of each network found a gradient that is not finite.
    """

    updates: int
    sums: Sums
    first: Sums
    promised: Array
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
        params, states, norms = apply_gradients(optimizers, found, states, params, train_draft)
        return (params, states), (sums, norms)

    def epoch(carry: tuple[Params, Params], _: None) -> tuple[tuple[Params, Params], tuple]:
        return jax.lax.scan(one, carry, (split(batch, config.minibatches), old))

    old = None
    if replay is not None:
        old = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), jax.vmap(partial(split, parts=config.minibatches))(replay))
    (params, states), (sums, norms) = jax.lax.scan(epoch, (params, states), None, length=config.epochs)
    totals = {name: (jnp.max if name.endswith("_max") else jnp.sum)(value) for name, value in sums._asdict().items()}
    return (
        params,
        states,
        Report(
            updates=config.minibatches * config.epochs,
            sums=Sums(**totals),
            first=jax.tree.map(lambda x: x[0, 0], sums),
            promised=jnp.sum(sums.promised[0]),
            norms=jax.tree.map(jnp.mean, norms),
            skipped=jax.tree.map(lambda norm: jnp.sum(~jnp.isfinite(norm), dtype=jnp.int32), norms),
        ),
    )
