"""What a round costs and how much of a draft is accepted, and from the two which draft length to run.

One model of a round's seconds for the choice of draft lengths and for whoever asks what another would cost: linear in
a handful of quantities that weights, tokens, cached positions and draft steps are paid by, fitted to measured rounds.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.plan import Phase
from specjax.types import pytree

# How many drafted tokens the prediction weighs as much as, and what a step leaves of the counts before it.
PRIOR, DECAY = 32.0, 0.8

# What a longer draft must promise over a shorter one, as a ratio of tokens a second. Promises are too high: a batch
# waits for the row that is accepted least, and costs are measured with an error of some percent.
MARGIN = 1.1


class Cell(NamedTuple):
    """A measured round: `slots` rows of `window` positions at a draft length, in seconds.

    step: the training step before which it was measured; 0 at the start.
    """

    slots: int
    window: int
    draft_length: int
    seconds: float
    step: int = 0


class CostModel(NamedTuple):
    """Seconds of a round: fixed + token * B (K + 1) + cached * B S + step * K + drafted * B K, none below 0.

    B slots, draft length K, window of S positions. fixed: weights and launches. token: a token verified. cached: a
    position read. step: a draft step's weights and launches. drafted: a token drafted.
    """

    fixed: float
    token: float
    cached: float
    step: float
    drafted: float

    def seconds(self, slots: int, window: int, draft_length: int) -> float:
        """Of one round."""
        return float(np.dot(self, _quantities(slots, window, draft_length)))

    def table(self, phases: Sequence[Phase], draft_lengths: Sequence[int]) -> Float[np.ndarray, "phases lengths"]:
        """Seconds of a round of each phase at each draft length, float32."""
        return np.array([[self.seconds(*phase, k) for k in draft_lengths] for phase in phases], np.float32)


def _quantities(slots: int, window: int, k: int) -> tuple[float, ...]:
    return 1.0, slots * (k + 1.0), float(slots * window), float(k), float(slots * k)


def fit(cells: Sequence[Cell]) -> CostModel:
    """The constants with the least squared relative error over the cells, each at least 0. Needs two cells."""
    seconds = np.array([cell.seconds for cell in cells])
    table = np.array([_quantities(cell.slots, cell.window, cell.draft_length) for cell in cells]) / seconds[:, None]
    best, least = np.zeros(table.shape[1]), np.inf
    # Every choice of constants that are not 0: of five there are few enough to try, and one of them is the optimum.
    for used in itertools.product((False, True), repeat=table.shape[1]):
        if not any(used):
            continue
        columns = np.flatnonzero(used)
        some, *_ = np.linalg.lstsq(table[:, columns], np.ones(len(cells)), rcond=None)
        error = float(np.sum((table[:, columns] @ some - 1) ** 2))
        if (some >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(table.shape[1]), error
            best[columns] = some
    return CostModel(*best.tolist())


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
class Drafting:
    """What the choice of draft lengths rests on. seconds: float32 [phases, lengths], a round's, by the cost model."""

    acceptance: Acceptance
    seconds: Float[Array, "phases lengths"]


def no_acceptance(draft_length: int) -> Acceptance:
    """Nothing drafted yet, nothing expected."""
    # Arrays of their own: a state is donated, and no buffer can be given away twice.
    return Acceptance(jnp.zeros(draft_length, jnp.float32), jnp.zeros(draft_length, jnp.float32), jnp.float32(0))


def remember(
    before: Acceptance, drafted: Int[Array, "R K"], accepted: Int[Array, "R K"], predicted: Float[Array, ""]
) -> Acceptance:
    """The counts with one more rollout's; `predicted` is that of the training step behind it."""

    def add(old: Array, new: Array) -> Array:
        return DECAY * old + jnp.sum(new, axis=0, dtype=jnp.float32)

    # The prediction is a metric too: copied, so that donating the state to the next step leaves the metric be.
    return Acceptance(add(before.drafted, drafted), add(before.accepted, accepted), jnp.copy(predicted))


def rates(acceptance: Acceptance) -> Float[Array, "K"]:
    """Share of rounds in which position 1, 2, .. of a draft is accepted.

    Measured where there is data. What is missing follows a geometric law: the share that goes on from one position to
    the next is that of the position before, and at the first the prediction.
    """
    found, reached, onwards = [], jnp.float32(1), acceptance.predicted
    for drafted, accepted in zip(acceptance.drafted, acceptance.accepted, strict=True):
        rate = (accepted + PRIOR * reached * onwards) / (drafted + PRIOR)
        onwards, reached = rate / jnp.maximum(reached, 1e-6), rate
        found.append(rate)
    return jnp.stack(found) if found else jnp.zeros(0, jnp.float32)


def acceptance_length(acceptance: Acceptance, draft_lengths: Sequence[int]) -> Float[Array, "lengths"]:
    """Tokens emitted a round to expect at each draft length."""
    gained = jnp.concatenate([jnp.ones(1), 1 + jnp.cumsum(rates(acceptance))])
    return gained[jnp.array(draft_lengths)]


def promised(drafting: Drafting, draft_lengths: Sequence[int]) -> Float[Array, "phases lengths"]:
    """How many times the tokens a second of the first draft length each should give, in each phase."""
    speed = acceptance_length(drafting.acceptance, draft_lengths)[None] / drafting.seconds
    return speed / speed[:, :1]


def choose(drafting: Drafting, draft_lengths: Sequence[int], margin: float = MARGIN) -> Int[Array, "phases"]:
    """For each phase the index of the shortest draft length whose promise no other outdoes by more than the margin.

    Draft lengths ascend.
    """
    speed = promised(drafting, draft_lengths)
    near = margin * speed >= jnp.max(speed, axis=1, keepdims=True)
    return jnp.argmax(near, axis=1).astype(jnp.int32)
