"""Schedule of draft training, and the comparison of measured acceptance with the acceptance that training predicts.

The training forward knows the probability that position 1 of a draft is accepted: sum_v min(p, q) of the laws at that
token. Over the tokens at position 1, the number accepted differs from the sum of these probabilities by sampling noise
alone, whatever the draft, the policy and the text. A larger difference is a fault in decoding. (The mean over all
tokens would be biased: a round that accepts little is soon followed by another one at the same difficult place.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.options import NonNegative, Options, Positive, at_least, below
from specjax.train.batch import ScoredSequences, Sequences
from specjax.train.loss_sums import DraftSums
from specjax.types import TrainState, pytree

# Each step multiplies the counts of the steps before it by this.
COUNT_DECAY = 0.8

# The alarm is raised when the acceptance at position 1 is below the expected one by more than ALARM_MARGIN plus
# DEVIATIONS standard deviations of the sampling noise, in ALARM_PATIENCE steps in a row. A fall that starts training
# (`fall`) must exceed DEVIATIONS too.
ALARM_MARGIN, DEVIATIONS, ALARM_PATIENCE = 0.1, 2.0, 3

# Predicted acceptance holds while a running mean of it neither rises above a slower one, nor is below the highest it
# has been, by more than HELD plus DEVIATIONS standard deviations of its noise. The means forget at the rates FAST and
# SLOW; FAST_NOISE is the noise of the fast one relative to that of a single value. The slow one starts at 0, as if
# acceptance had risen from there: the first 30 trainings or so come at the full rate. The highest falls by FORGET in
# each training: what training does not bring back for long is given up.
FAST, SLOW, HELD, FORGET = 0.8, 0.9, 0.02, 0.0002
FAST_NOISE = ((1 - FAST) / (1 + FAST)) ** 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class DraftTrainingConfig(Options):
    """Schedule of draft training, and the rollouts it uses.

    A step that trains the draft also measures its predicted acceptance. With a frozen draft it measures alone.

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
class Replay:
    """The last n rollouts; each overwrites the one n steps before it.

    tokens: int32 [n, R, S], as those of `Sequences`. start, end: int32 [n, R], where the completion begins, and ends.
    """

    tokens: Int[Array, "n R S"]
    start: Int[Array, "n R"]
    end: Int[Array, "n R"]

    def rows(self) -> Sequences:
        """Return the rollouts as rows [n, R, ..]."""
        column = jnp.arange(self.tokens.shape[-1])[None, None]
        return Sequences(self.tokens, (column >= self.start[..., None]) & (column < self.end[..., None]))

    def keep(self, sequences: Sequences, step: Int[Array, ""]) -> "Replay":
        """Overwrite the oldest rollout."""
        end = sequences.lengths
        new = Replay(sequences.tokens, end - jnp.sum(sequences.completion, axis=1, dtype=jnp.int32), end)
        at = step % len(self.tokens)
        return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, at, 0), self, new)


@pytree
class Adaptation:
    """State of draft training: scalars that count at position 1 of drafts, the schedule, and the rollouts kept.

    Attributes:
        drafted:  float32, decayed count since the draft was last trained.
        accepted: float32, likewise.
        best:     float32, highest ratio accepted / drafted since then.
        short:    int32, steps in a row that accepted less than expected.
        interval: int32, steps from the last training to the next; 0 before the first.
        wait:     int32, steps until the next.
        fast:     float32, running mean of predicted acceptance.
        slow:     float32, likewise, over more of the past.
        highest:  float32, highest value of `fast`; falls by FORGET in each training.
        replay:   The rollouts kept, or None.
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


def init_adaptation(config: DraftTrainingConfig, rows: tuple[int, int] | None) -> Adaptation:
    """Return the adaptation before the first step. rows: (R, S) of a step, needed to keep rollouts."""

    # Separate arrays: a state is donated, and no buffer can be donated twice.
    def zeros(dtype: str, *shape: int) -> Array:
        return jnp.zeros(shape, dtype)

    replay, n = None, config.replay
    if config.mode == "online" and n:
        if rows is None:
            raise ValueError(f"replay = {n}: to keep rollouts, the shape of the prompts must be given")
        replay = Replay(zeros("int32", n, *rows), zeros("int32", n, rows[0]), zeros("int32", n, rows[0]))
    counts = {name: zeros("float32") for name in ("drafted", "accepted", "best", "fast", "slow", "highest")}
    return Adaptation(**counts, short=zeros("int32"), interval=zeros("int32"), wait=zeros("int32"), replay=replay)


def draft_is_due(config: DraftTrainingConfig, state: TrainState, sequences: ScoredSequences) -> bool | Bool[Array, ""]:
    """Return whether this step trains or measures the draft: a Python bool if it is known when the step is traced."""
    if not jax.tree.leaves(state.params.draft):
        return False
    if state.adaptation is None and (config.replay or not config.always):
        raise ValueError(f"draft_training = {config}: the state was not made for it")
    if state.adaptation is None or config.always:
        return True
    due, counts = state.adaptation.wait <= 0, _position_1(sequences)
    if config.fall and counts is not None:
        drafted, accepted = counts
        best = state.adaptation.best
        due |= best - accepted / drafted > config.fall * best + DEVIATIONS * _noise(best, drafted)
    return due


def maybe_cond(condition: bool | Bool[Array, ""], yes: Callable[..., T], no: Callable[..., T], *args: object) -> T:
    """Call one of the two functions; use `jax.lax.cond` only if the condition is traced."""
    if isinstance(condition, bool):
        return (yes if condition else no)(*args)
    return jax.lax.cond(condition, yes, no, *args)


def replay_rows(state: TrainState) -> Sequences | None:
    """Return the rows of earlier rollouts to train on, [n, R, ..], or None."""
    kept = None if state.adaptation is None else state.adaptation.replay
    return None if kept is None else kept.rows()


def adapt(
    config: DraftTrainingConfig,
    state: TrainState,
    sequences: ScoredSequences,
    sums: DraftSums,
    due: bool | Bool[Array, ""],
    *,
    comparable: bool = True,
) -> tuple[TrainState, dict[str, Array]]:
    """Return the state with its adaptation updated after a step on `sequences`, and metrics.

    sums:       of the draft, under the weights that generated the sequences.
    due:        whether the step trained or measured the draft.
    comparable: the rollout's law is the one that the sums were computed under.
    """
    seen, counts = state.adaptation, _position_1(sequences)
    if seen is None:
        return state, {}
    if seen.replay is not None:
        seen = replace(seen, replay=seen.replay.keep(sequences, state.step))
    metrics = {}
    if counts is not None and comparable:
        drafted = sums.drafted
        mean, measured = sums.expected / drafted, sums.accepted / drafted
        fell = mean - measured > ALARM_MARGIN + DEVIATIONS * _noise(mean, drafted)
        # A step that compared nothing leaves the count of short steps unchanged.
        short = jnp.where(drafted > 0, jnp.where(fell, seen.short + 1, 0), seen.short)
        seen = replace(seen, short=short)
        metrics = {
            "draft/promised_acceptance": mean,
            "draft/measured_acceptance": measured,
            "draft/alarm": (short >= ALARM_PATIENCE).astype(jnp.int32),
        }
    if counts is not None:
        drafted, accepted = COUNT_DECAY * seen.drafted + counts[0], COUNT_DECAY * seen.accepted + counts[1]
        best = jnp.maximum(seen.best, accepted / jnp.maximum(drafted, 1.0))
        drafted, accepted, best = (jnp.where(due, 0.0, x) for x in (drafted, accepted, best))
        seen = replace(seen, drafted=drafted, accepted=accepted, best=best)
    return replace(state, adaptation=_reschedule(config, seen, sums, due)), metrics


def _reschedule(
    config: DraftTrainingConfig, seen: Adaptation, sums: DraftSums, due: bool | Bool[Array, ""]
) -> Adaptation:
    """Return the state with the next training set, and predicted acceptance added to its running means."""
    predicted, first = sums.overlap / sums.tokens, seen.interval == 0
    fast = jnp.where(first, predicted, FAST * seen.fast + (1 - FAST) * predicted)
    slow = SLOW * seen.slow + (1 - SLOW) * predicted
    highest = jnp.maximum(fast, seen.highest - FORGET)
    margin = HELD + DEVIATIONS * FAST_NOISE * _noise(predicted, sums.measured)
    held = (fast - slow <= margin) & (highest - fast <= margin)
    # A step that was due before its time fell short of the best.
    held &= (seen.wait <= 0) & ~first
    interval = jnp.where(held, jnp.minimum(2 * seen.interval, config.max_every), config.every)
    changed = replace(seen, interval=interval, wait=interval, fast=fast, slow=slow, highest=highest)
    # Without a completion token nothing was measured. A NaN would stay in the means for good.
    measured = due & (sums.measured > 0) & jnp.isfinite(predicted)
    adapted = jax.tree.map(partial(jnp.where, measured), changed, seen)
    return replace(adapted, wait=adapted.wait - 1)


def _noise(mean: Array, drafted: Array) -> Array:
    """Return the standard deviation of the acceptance rate over `drafted` tokens whose expected rate is `mean`."""
    return jnp.sqrt(jnp.maximum(mean * (1 - mean), 0.0) / drafted)


def _position_1(sequences: ScoredSequences) -> tuple[Float[Array, ""], Float[Array, ""]] | None:
    """Return how many tokens stood at position 1 of a draft and how many were accepted; None if not recorded."""
    if sequences.proposed is None or sequences.accepted is None:
        return None
    return jnp.sum(sequences.proposed, dtype=jnp.float32), jnp.sum(sequences.accepted, dtype=jnp.float32)
