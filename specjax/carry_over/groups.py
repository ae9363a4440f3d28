"""Carry-over: a rollout ends once enough groups are finished. The others go on in the next step under the newer policy.

They keep their rows: their finished samples wait, their unfinished ones go on. A step trains on as many groups as its
rollout has to finish, so that every update has a full batch. Fresh prompts take the other rows. Every token keeps the
log-prob under the policy that wrote it, which is all that the importance weight old / mu needs, and the version of that
policy.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.parallel import processes
from specjax.rollout.plan import RolloutConfig
from specjax.types import CarryOver, Prompts, Rollout

# (number of prompts, ids that they must not have) -> fresh prompts.
Take = Callable[[int, frozenset[int]], Prompts]
# What a rollout must fill in, for the next one to go on with it.
CARRIED = "tokens", "lengths", "stopped", "law", "full", "writer", "done"


def nothing_carried(config: RolloutConfig, shape: tuple[int, int] | None) -> CarryOver | None:
    """Return the state before the first rollout; None without carry-over. shape: of the prompts, with padding."""
    if config.carry_over is None:
        return None
    if shape is None:
        raise ValueError(f"carry_over = {config.carry_over}: the shape of the prompts must be given")

    # Separate arrays: a state is donated, and no buffer can be donated twice.
    def zeros(dtype: str, *shape: int) -> Array:
        return jnp.zeros(shape, dtype)

    prompts, rows, columns = shape[0], shape[0] * config.group_size, config.max_new_tokens
    dtypes = {"tokens": "int32", "law": "float32", "full": "float32", "writer": "int8", "versions": "int32"}
    by_token: dict[str, Any] = {name: zeros(dtype, rows, columns) for name, dtype in dtypes.items()}
    lengths, began, stopped, done = (zeros(dtype, rows) for dtype in ("int32", "int32", "bool", "bool"))
    sequences = Rollout(lengths=lengths, stopped=stopped, done=done, began=began, **by_token)
    own = Prompts(zeros("int32", *shape), zeros("int32", prompts), zeros("int32", prompts))
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


def begun_sequences(prompts: Prompts, carried: CarryOver) -> Rollout:
    """Return what earlier rollouts wrote of the prompts' sequences. Prompts with another id than before begin."""
    goes_on = carried.kept & (prompts.id == carried.prompts.id)
    rows = jnp.repeat(goes_on, len(carried.sequences.lengths) // len(goes_on))
    return jax.tree.map(lambda x: where_rows(rows, x, jnp.zeros((), x.dtype)), carried.sequences)


def where_rows(rows: Bool[Array, "R"], new: Array, old: Array) -> Array:
    """Return `new` in these rows and `old` in the others."""
    return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def with_history(rollout: Rollout, before: Rollout, step: Int[Array, ""], version: Int[Array, ""]) -> Rollout:
    """Return the rollout with the steps in which its sequences began, and the versions of its tokens.

    before: what it went on with. version: that of its policy.

    Raises ValueError if a rollout function of your own leaves out what goes on in the next step.
    """
    if missing := [name for name in CARRIED if getattr(rollout, name) is None]:
        raise ValueError(f"carry_over: the rollout leaves out {missing[0]}, with which the next step goes on")
    assert before.began is not None and before.versions is not None
    began = jnp.where(before.lengths > 0, before.began, step)
    column = jnp.arange(rollout.tokens.shape[1])[None]
    versions = jnp.where(column < before.lengths[:, None], before.versions, version)
    versions = jnp.where(column < rollout.lengths[:, None], versions, 0)
    return replace(rollout, resumed_at=before.lengths, began=began, versions=versions)


class Groups(NamedTuple):
    """Which of the groups of a rollout with carry-over are trained on now, and what becomes of the others.

    trained: bool [N], whole, and among the oldest of these, as many as a rollout finishes.
    waiting: bool [N], whole, but more than that finished together. They are trained on in a later step.
    unfinished: bool [N], some of its sequences go on.
    too_old: bool [N], unfinished, and dropped.
    """

    trained: Bool[Array, "N"]
    waiting: Bool[Array, "N"]
    unfinished: Bool[Array, "N"]
    too_old: Bool[Array, "N"]


def divide_groups(rollout: Rollout, groups: int, config: RolloutConfig) -> Groups | None:
    """Return what becomes of each of so many groups; None without carry-over: all are trained on.

    A group is as old as its first tokens: all of its samples begin in one rollout.
    """
    if rollout.done is None or rollout.versions is None or rollout.began is None:
        return None
    whole = jnp.all(rollout.done.reshape(groups, -1), axis=1)
    order = jnp.lexsort((rollout.began.reshape(groups, -1)[:, 0], ~whole))
    first = jnp.zeros(groups, bool).at[order[: config.finished_groups(groups)]].set(True)
    too_old = jnp.zeros(groups, bool)
    if config.max_age is not None:
        first_version = rollout.versions.reshape(groups, -1, rollout.versions.shape[1])[:, 0, 0]
        # The next rollout's version is at least one more. A rollout writes at least one token.
        too_old = ~whole & (jnp.max(rollout.versions) + 1 - first_version > config.max_age)
    return Groups(whole & first, whole & ~first, ~whole & ~too_old, too_old)


def carry_over_of(config: RolloutConfig, prompts: Prompts, rollout: Rollout) -> CarryOver:
    """Return what the next rollout goes on with."""
    groups = divide_groups(rollout, len(prompts.lengths), config)
    assert groups is not None
    written: dict[str, Any] = {name: getattr(rollout, name) for name in (*CARRIED, "began", "versions")}
    return CarryOver(replace(prompts, carried=None), groups.waiting | groups.unfinished, Rollout(**written))


def carry_over_metrics(rollout: Rollout, groups: Groups) -> dict[str, Array]:
    """Return the metrics of carry-over. Ages are of the tokens that are trained on."""
    assert rollout.done is not None and rollout.versions is not None
    rows = jnp.repeat(groups.trained, len(rollout.lengths) // len(groups.trained))
    trained = (jnp.arange(rollout.tokens.shape[1])[None] < rollout.lengths[:, None]) & rows[:, None]
    ages = jnp.where(trained, jnp.max(rollout.versions) - rollout.versions, 0).astype(jnp.float32)
    return {
        "groups/waiting": jnp.sum(groups.waiting),
        "groups/unfinished": jnp.sum(groups.unfinished),
        "groups/too_old": jnp.sum(groups.too_old),
        "rollout/unfinished": jnp.sum(~rollout.done),
        "rollout/age_mean": jnp.sum(ages) / jnp.sum(trained, dtype=jnp.float32),
        "rollout/age_max": jnp.where(jnp.any(trained), jnp.max(ages), jnp.nan),
    }
