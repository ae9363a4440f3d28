"""When the draft is trained and on which rollouts, and whether the rollout accepts what its training promises.

Position 1 of a draft is accepted with a probability that the training forward knows: sum_v min(p, q) of the laws at
that very token. Over the tokens that stood at position 1, what was accepted differs from the sum of these by sampling
noise alone, whatever the draft, the policy and the text. More than that is a fault of the program that decodes. (The
mean over all tokens would not do: a round that accepts little is soon followed by another one at the same hard place.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from specjax.choices import check_choices
from specjax.parallel.mesh import BATCH_AXES
from specjax.train.batch import Batch
from specjax.types import TrainState, pytree

# What a step leaves of the counts before it.
DECAY = 0.8

# The alarm is raised when position 1 is accepted less often than promised by more than MARGIN and so many standard
# deviations of the sampling noise, PATIENCE times in a row. A fall has to be as clear of the noise.
MARGIN, DEVIATIONS, PATIENCE = 0.1, 2.0, 3

T = TypeVar("T")


@dataclass(frozen=True)
class DraftTrainingConfig:
    """When the draft is distilled from the policy, and from which rollouts.

    Attributes:
        mode:   online trains it on the run's own rollouts, from whatever weights it starts with: random ones too;
                frozen leaves it as it is.
        every:  train in the first step and every n-th behind it.
        fall:   train as well in a step that accepted, at position 1 of its drafts, less by more than this share and two
                standard deviations of its sampling noise than the best running mean since the draft was last trained; 0
                never.
        replay: rollouts before this one that are trained on too, each token weighing the same. They are kept as tokens,
                and run through the policy as it is by then. 0 keeps none.
    """

    mode: Literal["online", "frozen"] = "online"
    every: int = 1
    fall: float = 0.0
    replay: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if self.every < 1:
            raise ValueError(f"every = {self.every}: must be at least 1")
        if not 0 <= self.fall < 1:
            raise ValueError(f"fall = {self.fall}: must be a share, at least 0 and below 1")
        if self.replay < 0:
            raise ValueError(f"replay = {self.replay}: must be at least 0")


@pytree
class Replay:
    """The last n rollouts, each in the place of the one n steps before it.

    tokens: int32 [n, R, S], as those of a `Batch`. start, end: int32 [n, R], where the completion begins, and ends.
    """

    tokens: Int[Array, "n R S"]
    start: Int[Array, "n R"]
    end: Int[Array, "n R"]

    def rows(self) -> Batch:
        """As [n, R, ..] of what trains the draft alone."""
        column = jnp.arange(self.tokens.shape[-1])[None, None]
        completion = (column >= self.start[..., None]) & (column < self.end[..., None])
        return Batch(self.tokens, completion)

    def keep(self, batch: Batch, step: Int[Array, ""]) -> "Replay":
        """With the rows of one more rollout over the oldest."""
        end = batch.lengths
        new = Replay(batch.tokens, end - jnp.sum(batch.completion, axis=1, dtype=jnp.int32), end)
        at = step % len(self.tokens)
        return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, at, 0), self, new)


@pytree
class Adaptation:
    """What draft training goes by from step to step; scalars, counts of position 1 of the drafts.

    drafted, accepted: float32, running counts since the draft was last trained, older steps weighing less.
    best:              float32, the highest share accepted that they came to.
    short:             int32, steps in a row that fell short of what was promised.
    replay:            the rollouts kept, or None.
    """

    drafted: Float[Array, ""]
    accepted: Float[Array, ""]
    best: Float[Array, ""]
    short: Int[Array, ""]
    replay: Replay | None


def nothing_seen(config: DraftTrainingConfig, rows: tuple[int, int] | None, mesh: Mesh) -> Adaptation:
    """Before the first step. rows: (R, S) of a step's batch, needed where rollouts are kept."""

    # Arrays of their own: a state is donated, and no buffer can be given away twice.
    def none(dtype: jnp.dtype, *shape: int) -> Array:
        spec = P(None, BATCH_AXES) if shape else P()
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    drafted, accepted, best = (none(jnp.dtype("float32")) for _ in range(3))
    whole, replay, n = jnp.dtype("int32"), None, config.replay
    if config.mode == "online" and n:
        if rows is None:
            raise ValueError(f"replay = {n}: to keep rollouts, the shape of the prompts must be given")
        replay = Replay(none(whole, n, *rows), none(whole, n, rows[0]), none(whole, n, rows[0]))
    return Adaptation(drafted, accepted, best, none(whole), replay)


def due(config: DraftTrainingConfig, state: TrainState, batch: Batch) -> bool | Bool[Array, ""]:
    """Whether this step trains the draft: a bool where that is known before any step has run."""
    if config.mode == "frozen" or not jax.tree.leaves(state.params.draft):
        return False
    if state.adaptation is None and (config.fall or config.replay):
        raise ValueError(f"draft_training = {config}: the state was not made for it")
    if config.every == 1:
        return True
    train, counts = state.step % config.every == 0, _position_1(batch)
    if config.fall and state.adaptation is not None and counts is not None:
        drafted, accepted = counts
        best = state.adaptation.best
        train |= best - accepted / drafted > config.fall * best + DEVIATIONS * _noise(best, drafted)
    return train


def when(condition: bool | Bool[Array, ""], yes: Callable[..., T], no: Callable[..., T], *args: object) -> T:
    """`jax.lax.cond`, but what is known never to run is no part of the program."""
    if isinstance(condition, bool):
        return (yes if condition else no)(*args)
    return jax.lax.cond(condition, yes, no, *args)


def replayed(state: TrainState) -> Batch | None:
    """The rows of earlier rollouts to train on, [n, R, ..], or None."""
    kept = None if state.adaptation is None else state.adaptation.replay
    return None if kept is None else kept.rows()


def adapt(
    state: TrainState,
    batch: Batch,
    promised: Float[Array, ""] | None,
    trained: bool | Bool[Array, ""],
    first: Batch | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """The state with what the next step goes by, and metrics, after a step on `batch`.

    promised: the sum of what was to be accepted over the tokens that stood at position 1, by the weights that generated
              them; None where the rollout's law is not the one that it was computed under.
    first:    the rows that it is of, those of the first update; None for all.
    """
    seen, counts = state.adaptation, _position_1(batch)
    watched = _position_1(batch if first is None else first)
    if seen is None:
        return state, {}
    if seen.replay is not None:
        seen = replace(seen, replay=seen.replay.keep(batch, state.step))
    metrics = {}
    if watched is not None and promised is not None:
        short, mean = _held_against(seen.short, *watched, promised)
        seen = replace(seen, short=short)
        metrics = {
            "draft/promised_acceptance": mean,
            "draft/measured_acceptance": watched[1] / watched[0],
            "draft/alarm": (short >= PATIENCE).astype(jnp.int32),
        }
    if counts is not None:
        drafted, accepted = DECAY * seen.drafted + counts[0], DECAY * seen.accepted + counts[1]
        best = jnp.maximum(seen.best, accepted / jnp.maximum(drafted, 1.0))
        drafted, accepted, best = (jnp.where(trained, 0.0, x) for x in (drafted, accepted, best))
        seen = replace(seen, drafted=drafted, accepted=accepted, best=best)
    return replace(state, adaptation=seen), metrics


def _held_against(before: Array, drafted: Array, accepted: Array, promised: Array) -> tuple[Array, Array]:
    """(steps in a row that fell short, the mean promised). What was found stands where nothing was drafted."""
    mean = promised / drafted
    short = mean - accepted / drafted > MARGIN + DEVIATIONS * _noise(mean, drafted)
    return jnp.where(drafted > 0, jnp.where(short, before + 1, 0), before), mean


def _noise(mean: Array, drafted: Array) -> Array:
    """The standard deviation of the share that is accepted of so many drafts, where `mean` is to be expected."""
    return jnp.sqrt(jnp.maximum(mean * (1 - mean), 0.0) / drafted)


def _position_1(batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]] | None:
    """How many tokens stood at position 1 of a draft, and how many of these were accepted; None if not recorded."""
    if batch.proposed is None or batch.accepted is None:
        return None
    return jnp.sum(batch.proposed, dtype=jnp.float32), jnp.sum(batch.accepted, dtype=jnp.float32)
