"""When the draft is trained in a run, and the state from which it is decided."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.options import NonNegative, Options, Positive, at_least, below
from specjax.train.batch import ScoredSequences
from specjax.train.draft.alarm import DEVIATIONS, check_acceptance, noise
from specjax.train.draft.loss import DraftSums
from specjax.train.draft.replay import Replay
from specjax.types import TrainState, pytree

# Each step multiplies the counts of the steps before it by this. A fall that starts training (`fall`) must exceed
# DEVIATIONS standard deviations too.
COUNT_DECAY = 0.8

# Predicted acceptance is steady while a running mean of it neither rises above a slower one, nor is below the highest
# it has been, by more than TOLERANCE plus DEVIATIONS standard deviations of its noise. The means forget at the rates
# FAST and SLOW; FAST_NOISE is the noise of the fast one relative to that of a single value. The slow one starts at 0,
# as if acceptance had risen from there: the first 30 trainings or so come at the full rate. The highest falls by FORGET
# in each training: what training does not bring back for long is given up.
FAST, SLOW, TOLERANCE, FORGET = 0.8, 0.9, 0.02, 0.0002
FAST_NOISE = ((1 - FAST) / (1 + FAST)) ** 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class DraftTrainingConfig(Options):
    """Schedule of draft training, and the rollouts it uses.

    A step that trains the draft also measures its predicted acceptance. With a frozen draft it only measures. While
    rollouts do not use the draft, it is trained after `every` steps, then twice as many, up to once in `max_every`, to
    see whether it has become worth using.

    Attributes:
        mode:      online trains it on the run's own rollouts; frozen leaves it as it is.
        anchors:   Completion tokens of each sequence, drawn again in each step, at which it learns; 0: all.
        every:     Fewest steps from one training to the next.
        max_every: Most steps. They double from `every` to this while predicted acceptance holds, and return to `every`
                   when it changes.
        fall:      Train also when measured acceptance at position 1 has fallen by more than this share, and 2 standard
                   deviations, below its best running mean since the last training; 0: never.
        replay:    Earlier rollouts to train on too, each token with equal weight; 0: none.
    """

    mode: Literal["online", "frozen"] = "online"
    anchors: NonNegative = 32
    every: Positive = 1
    max_every: Positive = 32
    fall: Annotated[float, at_least(0), below(1)] = 0.1
    replay: NonNegative = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_every < self.every:
            raise ValueError(f"max_every = {self.max_every}: must be at least every = {self.every}")

    @property
    def always(self) -> bool:
        """Return whether every step trains or measures the draft."""
        return self.max_every == 1


@pytree
class DraftTrainingState:
    """State of draft training: counts at position 1 of drafts, the alarm, the schedule, and rollouts to train on again.

    Attributes:
        drafted:  float32, decayed count since the draft was last trained.
        accepted: float32, likewise.
        best:     float32, highest ratio accepted / drafted since then.
        short:    int32, steps in a row that accepted less than expected.
        interval: int32, steps from the last training to the next; 0 before the first, negative while unused.
        wait:     int32, steps until the next.
        fast:     float32, running mean of predicted acceptance.
        slow:     float32, likewise, over more of the past.
        highest:  float32, highest value of `fast`; falls by FORGET in each training.
        replay:   Earlier rollouts, or None.
    """

    drafted: Float[Array, ""]
    accepted: Float[Array, ""]
    best: Float[Array, ""]
    short: Int[Array, ""]
    interval: Int[Array, ""]
    wait: Int[Array, ""]
    fast: Float[Array, ""]
    slow: Float[Array, ""]
    highest: Float[Array, ""]
    replay: Replay | None


def init_draft_training(
    config: DraftTrainingConfig, rows: tuple[int, int] | None, turns: bool = False
) -> DraftTrainingState:
    """Return the state before the first step.

    rows: (R, S) of a step, needed to replay rollouts. turns: rollouts have observed tokens.
    """
    replay = None
    if config.mode == "online" and config.replay:
        if rows is None:
            raise ValueError(f"replay = {config.replay}: to keep rollouts, the shape of the prompts must be given")
        replay = Replay.empty(config.replay, rows, turns)
    # Separate arrays: a state is donated, and no buffer can be donated twice.
    means = {name: jnp.zeros((), jnp.float32) for name in ("drafted", "accepted", "best", "fast", "slow", "highest")}
    counts = {name: jnp.zeros((), jnp.int32) for name in ("short", "interval", "wait")}
    return DraftTrainingState(**means, **counts, replay=replay)


def draft_is_due(config: DraftTrainingConfig, state: TrainState, sequences: ScoredSequences) -> bool | Bool[Array, ""]:
    """Return whether this step trains or measures the draft: a Python bool if it is known when the step is traced."""
    if not jax.tree.leaves(state.params.draft):
        return False
    if state.adaptation is None and (config.replay or not config.always):
        raise ValueError(f"draft_training = {config}: the state was not made for it")
    if state.adaptation is None or config.always:
        return True
    due, counts = state.adaptation.wait <= 0, _position_1(sequences)
    if counts is None:
        return due
    drafted, accepted = counts
    # Drafting was off at the last training, and is on now.
    due |= (state.adaptation.interval <= 0) & (drafted > 0)
    if config.fall:
        best = state.adaptation.best
        due |= best - accepted / drafted > config.fall * best + DEVIATIONS * noise(best, drafted)
    return due


def unused_draft_is_due(config: DraftTrainingConfig, step: int) -> bool:
    """Return whether the step, from 1, trains or measures a draft that no rollout has used. Needs no state."""
    due, interval = 1, config.every
    while due < step:
        due, interval = due + interval, min(2 * interval, config.max_every)
    return due == step


def maybe_cond(condition: bool | Bool[Array, ""], yes: Callable[..., T], no: Callable[..., T], *args: object) -> T:
    """Call one of the two functions; use `jax.lax.cond` only if the condition is traced."""
    if isinstance(condition, bool):
        return (yes if condition else no)(*args)
    return jax.lax.cond(condition, yes, no, *args)


def update_schedule(
    config: DraftTrainingConfig,
    state: TrainState,
    sequences: ScoredSequences,
    sums: DraftSums,
    due: bool | Bool[Array, ""],
    *,
    may_draft: bool = True,
    comparable: bool = True,
) -> tuple[TrainState, dict[str, Array]]:
    """Return the state after a step on `sequences`, and the metrics of the acceptance alarm.

    sums:       of the draft, under the weights that generated the sequences.
    due:        whether the step trained or measured the draft.
    may_draft:  rollouts have a draft length above 0.
    comparable: the rollout's law is the one that the sums were computed under.
    """
    training: DraftTrainingState | None = state.adaptation
    if training is None:
        return state, {}
    if training.replay is not None:
        training = replace(training, replay=training.replay.add(sequences, state.step))
    counts, metrics = _position_1(sequences), {}
    if counts is not None and comparable:
        short, metrics = check_acceptance(training.short, sums)
        training = replace(training, short=short)
    if counts is not None:
        drafted, accepted = COUNT_DECAY * training.drafted + counts[0], COUNT_DECAY * training.accepted + counts[1]
        best = jnp.maximum(training.best, accepted / jnp.maximum(drafted, 1.0))
        drafted, accepted, best = (jnp.where(due, 0.0, x) for x in (drafted, accepted, best))
        training = replace(training, drafted=drafted, accepted=accepted, best=best)
    used = may_draft if counts is None else counts[0] > 0
    return replace(state, adaptation=_reschedule(config, training, sums, due, used)), metrics


def _reschedule(
    config: DraftTrainingConfig,
    training: DraftTrainingState,
    sums: DraftSums,
    due: bool | Bool[Array, ""],
    used: bool | Bool[Array, ""],
) -> DraftTrainingState:
    """Return the state with the next training set, and predicted acceptance added to its running means.

    used: the rollout drafted.
    """
    predicted, first = sums.overlap / sums.tokens, training.interval <= 0
    fast = jnp.where(first, predicted, FAST * training.fast + (1 - FAST) * predicted)
    slow = SLOW * training.slow + (1 - SLOW) * predicted
    highest = jnp.maximum(fast, training.highest - FORGET)
    margin = TOLERANCE + DEVIATIONS * FAST_NOISE * noise(predicted, sums.measured)
    steady = (fast - slow <= margin) & (highest - fast <= margin)
    # A step that was due before its time fell short of the best.
    steady &= (training.wait <= 0) & ~first
    grows = jnp.where(used, steady, training.interval < 0)
    wait = jnp.where(grows, jnp.minimum(2 * jnp.abs(training.interval), config.max_every), config.every)
    interval = jnp.where(used, wait, -wait)
    changed = replace(training, interval=interval, wait=wait, fast=fast, slow=slow, highest=highest)
    # Without a completion token nothing was measured. A NaN would stay in the means for good.
    measured = due & (sums.measured > 0) & jnp.isfinite(predicted)
    rescheduled = jax.tree.map(partial(jnp.where, measured), changed, training)
    return replace(rescheduled, wait=rescheduled.wait - 1)


def _position_1(sequences: ScoredSequences) -> tuple[Float[Array, ""], Float[Array, ""]] | None:
    """Return how many tokens stood at position 1 of a draft and how many were accepted; None if not recorded."""
    if sequences.proposed is None or sequences.accepted is None:
        return None
    return jnp.sum(sequences.proposed, dtype=jnp.float32), jnp.sum(sequences.accepted, dtype=jnp.float32)
