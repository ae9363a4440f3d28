"""Carry-over: a rollout ends before its last sequences, which go on in the next step under the newer policy.

Groups of which a sequence is unfinished keep their rows: their finished samples wait, their unfinished ones go on. They
are trained on in the step in which the last one ends. Fresh prompts take the other rows. Every token keeps the log-prob
under the policy that wrote it, which is all that the importance weight old / mu needs, and the version of that policy.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.drafters import Drafter
from specjax.parallel import processes
from specjax.rollout.plan import RolloutConfig
from specjax.types import Carried, CarryOver, Prompts, Reward, Rollout

# (number of prompts, ids that they must not have) -> fresh prompts.
Take = Callable[[int, frozenset[int]], Prompts]


class UnfinishedGroups(NamedTuple):
    """Groups of which a sequence is unfinished, bool [N]: those that go on, and those that are too old to."""

    kept: Bool[Array, "N"]
    too_old: Bool[Array, "N"]


def check_carry_over(config: RolloutConfig, drafter: Drafter) -> None:
    """Raise ValueError for a drafter that keeps completions, which carry-over would give it in parts."""
    if config.carry_over is not None and drafter.memory is not None:
        raise ValueError(
            f"rollout.carry_over = {config.carry_over}: must be None with a history lookup, which keeps completions"
        )


def nothing_carried(config: RolloutConfig, prompts: int, width: int) -> CarryOver:
    """Return the state before the first rollout. width: padded length of the prompts."""

    # Separate arrays: a state is donated, and no buffer can be donated twice.
    def zeros(dtype: str, *shape: int) -> Array:
        return jnp.zeros(shape, dtype)

    rows, columns = prompts * config.group_size, config.max_new_tokens
    by_row = {"lengths": zeros("int32", rows)} | {name: zeros("bool", rows) for name in ("stopped", "done")}
    dtypes = {"tokens": "int32", "law": "float32", "full": "float32", "writer": "int8", "versions": "int32"}
    sequences = Carried(**by_row, **{name: zeros(dtype, rows, columns) for name, dtype in dtypes.items()})
    own = Prompts(zeros("int32", prompts, width), zeros("int32", prompts), zeros("int32", prompts))
    return CarryOver(own, zeros("bool", prompts), sequences)


def next_prompts(carried: CarryOver, take: Take) -> Prompts:
    """Return the prompts of the next step, as numpy arrays: those that go on, in their rows, and fresh ones.

    Waits for the rollout before, which decides how many are fresh.
    """
    kept, before = processes.fetch((carried.kept, carried.prompts))
    fresh = take(int(np.sum(~kept)), frozenset(before.id[kept].tolist()))

    def put(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        joined = old.copy()
        joined[~kept] = new
        return joined

    return jax.tree.map(put, before, fresh)


def with_carried(prompts: Prompts, carried: CarryOver) -> Prompts:
    """Return the prompts with what earlier rollouts wrote of them. Those with another id than before begin."""
    goes_on = carried.kept & (prompts.id == carried.prompts.id)
    rows = jnp.repeat(goes_on, len(carried.sequences.lengths) // len(goes_on))

    def keep(x: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    return replace(prompts, carried=jax.tree.map(keep, carried.sequences))


def with_versions(rollout: Rollout, before: Carried, version: Int[Array, ""]) -> Rollout:
    """Return the rollout with its versions. before: what it went on with. version: that of its policy.

    Raises ValueError if a rollout function of your own leaves out what goes on in the next step.
    """
    names = [each.name for each in fields(Carried) if each.name != "versions"]
    if missing := [name for name in names if getattr(rollout, name) is None]:
        raise ValueError(f"carry_over: the rollout leaves out {missing[0]}, with which the next step goes on")
    column = jnp.arange(rollout.tokens.shape[1])[None]
    versions = jnp.where(column < before.lengths[:, None], before.versions, version)
    return replace(
        rollout,
        resumed_at=before.lengths,
        versions=jnp.where(column < rollout.lengths[:, None], versions, 0),
    )


def whole_groups(done: Bool[Array, "R"], groups: int) -> Bool[Array, "N"]:
    """Return for each group whether all of its sequences are done."""
    return jnp.all(done.reshape(groups, -1), axis=1)


def unfinished_groups(rollout: Rollout, groups: int, max_age: int | None) -> UnfinishedGroups:
    """Return the unfinished groups. max_age: most updates between the first token of a group and the next rollout.

    All samples of a group begin in one rollout, so that a group is as old as the first token of any of them.
    """
    assert rollout.done is not None and rollout.versions is not None
    unfinished = ~whole_groups(rollout.done, groups)
    if max_age is None:
        return UnfinishedGroups(unfinished, jnp.zeros_like(unfinished))
    began = rollout.versions[:, 0].reshape(groups, -1)[:, 0]
    # A rollout writes at least one token.
    newest = jnp.max(rollout.versions)
    too_old = unfinished & (newest + 1 - began > max_age)
    return UnfinishedGroups(unfinished & ~too_old, too_old)


def carry_over_of(config: RolloutConfig, prompts: Prompts, rollout: Rollout) -> CarryOver:
    """Return what the next rollout goes on with."""
    kept = unfinished_groups(rollout, len(prompts.lengths), config.max_age).kept
    written: dict[str, Any] = {each.name: getattr(rollout, each.name) for each in fields(Carried)}
    return CarryOver(replace(prompts, carried=None), kept, Carried(**written))


def withhold_rewards(scores: Reward, rollout: Rollout, group_size: int) -> Reward:
    """Return the rewards with NaN in groups that are not whole, so that these enter no statistics and train nothing.

    Unchanged without carry-over.
    """
    if rollout.done is None:
        return scores
    whole = jnp.repeat(whole_groups(rollout.done, len(rollout.done) // group_size), group_size)
    return replace(scores, value=jnp.where(whole, scores.value, jnp.nan))


def carry_over_metrics(rollout: Rollout, groups: int, max_age: int | None) -> dict[str, Array]:
    """Return the metrics of carry-over, none without it. Ages are those of the tokens of whole groups."""
    if rollout.done is None or rollout.versions is None or rollout.resumed_at is None:
        return {}
    kept, too_old = unfinished_groups(rollout, groups, max_age)
    whole = jnp.repeat(~kept & ~too_old, len(rollout.lengths) // groups)
    trained = (jnp.arange(rollout.tokens.shape[1])[None] < rollout.lengths[:, None]) & whole[:, None]
    ages = jnp.where(trained, jnp.max(rollout.versions) - rollout.versions, 0).astype(jnp.float32)
    return {
        "groups/unfinished": jnp.sum(kept),
        "groups/too_old": jnp.sum(too_old),
        "rollout/unfinished": jnp.sum(~rollout.done),
        "rollout/age_mean": jnp.sum(ages) / jnp.sum(trained, dtype=jnp.float32),
        "rollout/age_max": jnp.where(jnp.any(trained), jnp.max(ages), jnp.nan),
    }
