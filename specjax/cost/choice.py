"""Choice of the draft length, from the seconds that a round takes and the progress that it brings a batch."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.types import Rollout, pytree

# Pseudo-counts: predicted acceptance counts as PRIOR_DRAFTED drafted tokens, predicted batch gain as PRIOR_ROUNDS
# rounds. Older counts are multiplied by COUNT_DECAY in each step.
PRIOR_DRAFTED, PRIOR_ROUNDS, COUNT_DECAY = 32.0, 8.0, 0.8

# Expected speed over a shorter draft length, in tokens/s, from which a length is chosen: before it has run, and after.
# Before, the expectation is too high: a batch waits for the row that is accepted least. After, round times of different
# lengths still vary by a tenth where other jobs use the machine's memory (`benchmarks.never_slower`).
UNTRIED_MARGIN, TRIED_MARGIN = 1.15, 1.08


@pytree
class Acceptance:
    """Running counts of what was drafted and accepted, older steps weighing less.

    drafted:   float32 [K], rounds that drafted position i. accepted: float32 [K], those that emitted it.
    predicted: float32 scalar, acceptance at position 1 that the draft's loss predicts; 0 before there was one.
    """

    drafted: Float[Array, "K"]
    accepted: Float[Array, "K"]
    predicted: Float[Array, ""]


@pytree
class BatchProgress:
    """Running counts of the progress of whole batches in each phase at each draft length, float32 [phases, lengths].

    gained: rounds that draft length 0 would have taken. trips: rounds that were run.
    """

    gained: Float[Array, "phases lengths"]
    trips: Float[Array, "phases lengths"]


# Seconds of a round in each phase at each draft length.
Seconds = Float[np.ndarray | Array, "phases lengths"]


@pytree
class Drafting:
    """State from which draft lengths are chosen.

    seconds: float32 [phases, lengths], seconds per round; `unmeasured` until they are measured.
    """

    acceptance: Acceptance
    progress: BatchProgress
    seconds: Float[Array, "phases lengths"]


def unmeasured(phases: int, draft_lengths: Sequence[int]) -> Float[np.ndarray, "phases lengths"]:
    """Return seconds per round with which `choose` returns length 0, the first: all others take infinitely long."""
    return np.tile(np.where(np.array(draft_lengths) > 0, np.inf, 1).astype(np.float32), (phases, 1))


def init_drafting(draft_lengths: Sequence[int], seconds: Seconds) -> Drafting:
    """Return a state with these seconds per round and all counts zero."""

    # Separate arrays: a state is donated, and no buffer can be donated twice.
    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.float32)

    longest = max(draft_lengths)
    progress = BatchProgress(zeros(*seconds.shape), zeros(*seconds.shape))
    acceptance = Acceptance(zeros(longest), zeros(longest), zeros())
    return Drafting(acceptance, progress, jnp.asarray(seconds, jnp.float32))


def update_drafting(
    before: Drafting, rollout: Rollout, predicted: Float[Array, ""] | None, draft_lengths: Sequence[int]
) -> Drafting:
    """Return `before` with the counts of one more rollout added, as far as the rollout has them.

    `lookup_counts` take precedence over `drafted` and `accepted`: a lookup drafts only where it finds a match.

    predicted: acceptance at position 1 that the training step after the rollout predicts; None or NaN keeps the last.
    """
    acceptance, progress = before.acceptance, before.progress

    def add(old: Array, new: Array) -> Array:
        return COUNT_DECAY * old + jnp.sum(new, axis=0, dtype=jnp.float32)

    drafted, accepted = rollout.drafted, rollout.accepted
    if rollout.lookup_counts is not None:
        drafted, accepted = rollout.lookup_counts[:, 0], rollout.lookup_counts[:, 1]
    if drafted is not None and accepted is not None:
        acceptance = replace(
            acceptance, drafted=add(acceptance.drafted, drafted), accepted=add(acceptance.accepted, accepted)
        )
    if predicted is not None:
        # NaN if there was no token to predict. Never the metric itself, which must survive the donation of the state.
        newest = jnp.where(jnp.isfinite(predicted), predicted, acceptance.predicted)
        acceptance = replace(acceptance, predicted=newest)
    if rollout.loop_rounds is not None and rollout.plain_rounds is not None and rollout.draft_length is not None:
        if rollout.plain_rounds.shape[1] != len(before.seconds):
            raise ValueError(
                f"plain_rounds: {rollout.plain_rounds.shape[1]} phases; must be the {len(before.seconds)} laid out"
            )
        ran = (rollout.draft_length[..., None] == jnp.array(draft_lengths)[None, None]) & (
            rollout.plain_rounds[..., None] > 0
        )
        gained, trips = (jnp.where(ran, x[..., None], 0) for x in (rollout.plain_rounds, rollout.loop_rounds))
        progress = BatchProgress(add(progress.gained, gained), add(progress.trips, trips))
    return replace(before, acceptance=acceptance, progress=progress)


def rates(acceptance: Acceptance) -> Float[Array, "K"]:
    """Return the acceptance rate of position 1, 2, .. of a draft, over the rounds that drafted it.

    Measured where there is data. Elsewhere geometric: the conditional rate of the position before, and at the first
    position the predicted acceptance.
    """
    by_position, reached, onwards = [], jnp.float32(1), acceptance.predicted
    for drafted, accepted in zip(acceptance.drafted, acceptance.accepted, strict=True):
        rate = (accepted + PRIOR_DRAFTED * reached * onwards) / (drafted + PRIOR_DRAFTED)
        # A lookup's drafts vary in length. The few that reach a position may be accepted there at a higher rate than
        # all drafts at the position before, hence the cap at 1.
        onwards, reached = jnp.minimum(rate / jnp.maximum(reached, 1e-6), 1.0), rate
        by_position.append(rate)
    return jnp.stack(by_position) if by_position else jnp.zeros(0, jnp.float32)


def acceptance_length(acceptance: Acceptance, draft_lengths: Sequence[int]) -> Float[Array, "lengths"]:
    """Return the expected tokens per row and round at each draft length; a lookup that finds nothing emits fewer."""
    gained = jnp.concatenate([jnp.ones(1), 1 + jnp.cumsum(rates(acceptance))])
    return gained[jnp.array(draft_lengths)]


def batch_gain(drafting: Drafting, draft_lengths: Sequence[int]) -> Float[Array, "phases lengths"]:
    """Return how many rounds at draft length 0 a round at each length replaces for a batch.

    Measured where the length has run. Elsewhere 1 + the expected accepted tokens, scaled by the fraction of them that
    the other lengths of the phase reached: a batch waits for its row with the fewest accepted tokens, so it gains less
    than a mean row.
    """
    expected, progress = acceptance_length(drafting.acceptance, draft_lengths)[None] - 1, drafting.progress
    prior = PRIOR_ROUNDS * jnp.max(expected)
    measured = jnp.sum(progress.gained - progress.trips, axis=1, keepdims=True) + prior
    predicted = jnp.sum(expected * progress.trips, axis=1, keepdims=True) + prior
    fraction = jnp.where(prior > 0, measured / predicted, 1.0)
    return (progress.gained + PRIOR_ROUNDS * (1 + fraction * expected)) / (progress.trips + PRIOR_ROUNDS)


def expected_speedup(drafting: Drafting, draft_lengths: Sequence[int]) -> Float[Array, "phases lengths"]:
    """Return the expected speed of each draft length relative to the first one listed, in each phase."""
    speed = batch_gain(drafting, draft_lengths) / drafting.seconds
    return speed / speed[:, :1]


def choose(drafting: Drafting, draft_lengths: Sequence[int]) -> Int[Array, "phases"]:
    """Return for each phase the index of the shortest draft length that no other is expected to beat by its margin.

    The margin of a length shrinks from UNTRIED_MARGIN to TRIED_MARGIN as that length runs. Length 0 always has
    TRIED_MARGIN. Draft lengths must ascend.
    """
    untried = jnp.where(
        jnp.array(draft_lengths)[None] > 0, PRIOR_ROUNDS / (drafting.progress.trips + PRIOR_ROUNDS), 0.0
    )
    speed = expected_speedup(drafting, draft_lengths) / (UNTRIED_MARGIN / TRIED_MARGIN) ** untried
    near = TRIED_MARGIN * speed >= jnp.max(speed, axis=1, keepdims=True)
    return jnp.argmax(near, axis=1).astype(jnp.int32)


def could_pay(drafting: Drafting, draft_lengths: Sequence[int]) -> Bool[Array, ""]:
    """Return whether any phase would draft if a round took as long at every draft length.

    Until then measured seconds change no choice: rounds that draft are slower.
    """
    chosen = choose(replace(drafting, seconds=jnp.ones_like(drafting.seconds)), draft_lengths)
    return jnp.any(jnp.array(draft_lengths)[chosen] > 0)
