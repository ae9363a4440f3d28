"""Simulate one rollout: sequences that wait for slots, rounds, phases, and what is left when the step ends.

Rows advance by their expected tokens per round, so that one event is the end of a row, not a round. Replicas decode on
their own, each with its share of the sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.surface import Surface

# Positions by which a row may advance between two looks at the cost of a round.
_STRIDE = 2048.0
_DONE = 1e-6


@dataclass(frozen=True)
class SlotLayout:
    """Slots of a replica.

    Attributes:
        slots:  Sequences decoded together; others wait.
        phases: Slots that the batch shrinks to, once no more rows are live. Empty: a row leaves as it ends.
    """

    slots: int
    phases: tuple[int, ...] = ()

    def paid(self, live: np.ndarray) -> np.ndarray:
        """Return the rows whose rounds are paid for when `live` rows are live."""
        sizes = np.array(sorted({self.slots, *self.phases}))
        return sizes[np.minimum(np.searchsorted(sizes, live), len(sizes) - 1)] if self.phases else live


class Moment(NamedTuple):
    """A stretch of a replica's rollout: when it began, in seconds, the live rows, and the draft length."""

    seconds: float
    live: int
    draft_length: int


class SimulatedRollout(NamedTuple):
    """Outcome of a simulated rollout.

    begun, ended: float64 [replicas, sequences], seconds at which each sequence got its slot and finished.
    rounds:       float64 [replicas].
    verified:     tokens per verification, over all sequences.
    timeline:     of the replica that ended last.
    """

    begun: np.ndarray
    ended: np.ndarray
    rounds: np.ndarray
    verified: float
    timeline: list[Moment]

    @property
    def seconds(self) -> float:
        """Seconds until every sequence has finished."""
        return float(self.ended.max())

    def left(self, at: float) -> np.ndarray:
        """Return the share of each sequence that is not generated at a time, [replicas, sequences]."""
        span = np.maximum(self.ended - self.begun, 1e-12)
        return np.clip((self.ended - at) / span, 0.0, 1.0)


def simulate(
    lengths: np.ndarray, gains: np.ndarray, surface: Surface, layout: SlotLayout, start: float | np.ndarray
) -> SimulatedRollout:
    """Simulate the rollout of `lengths` tokens, float64 [replicas, sequences], in the order in which they get slots.

    gains:   tokens that each sequence gains in a round, float64 [draft lengths, replicas, sequences].
    surface: seconds of a round. Of its draft lengths, each replica takes the one of the most tokens per second.
    start:   positions that each sequence holds before: its prompt, and what an earlier step generated.
    """
    replicas, sequences = lengths.shape
    slots, every = min(layout.slots, sequences), np.arange(replicas)
    prefix = np.broadcast_to(np.array(start, np.float64), lengths.shape)
    row = np.tile(np.arange(slots), (replicas, 1))
    waiting = np.full(replicas, slots)
    remaining, position = lengths[:, :slots].copy(), prefix[:, :slots].copy()
    clock, rounds, verified = np.zeros(replicas), np.zeros(replicas), 0.0
    starts, ends = np.zeros(lengths.shape), np.zeros(lengths.shape)
    moments: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    live = np.ones((replicas, slots), bool)
    while live.any():
        count = live.sum(1)
        some = np.maximum(count, 1)
        speed = np.where(live, gains[:, every[:, None], row], 0.0)
        gain = speed.sum(2) / some
        mean = np.where(live, position, 0.0).sum(1) / some
        round_seconds = surface.of_rows(layout.paid(some))
        choice = np.argmax(gain / round_seconds(mean), axis=0)
        advance, ahead = speed[choice, every], gain[choice, every]
        span = np.where(live, remaining / np.maximum(advance, 1e-12), np.inf).min(1)
        span = np.where(count > 0, np.minimum(span, _STRIDE / np.maximum(ahead, 1.0)), 0.0)
        cost = round_seconds(mean + span * ahead / 2)[choice, every]
        moments.append((clock.copy(), count, choice))
        clock, rounds = clock + span * cost, rounds + span
        verified += float((span * count).sum())
        remaining, position = remaining - advance * span[:, None], position + advance * span[:, None]
        finished = live & (remaining <= _DONE * np.maximum(position, 1.0))
        replica, slot = np.nonzero(finished)
        ends[replica, row[replica, slot]] = clock[replica]
        turn = waiting[:, None] + np.cumsum(finished, axis=1) - 1
        replica, slot = np.nonzero(finished & (turn < sequences))
        entered = turn[replica, slot]
        row[replica, slot], starts[replica, entered] = entered, clock[replica]
        remaining[replica, slot], position[replica, slot] = lengths[replica, entered], prefix[replica, entered]
        live &= ~finished
        live[replica, slot] = True
        waiting = np.minimum(waiting + finished.sum(1), sequences)
    last = int(ends.max(1).argmax())
    timeline = [
        Moment(float(when[last]), int(count[last]), surface.draft_lengths[choice[last]])
        for when, count, choice in moments
        if count[last]
    ]
    return SimulatedRollout(starts, ends, rounds, float(lengths.sum()) / verified, timeline)


def carry_over(
    fresh: np.ndarray,
    gains: np.ndarray,
    surface: Surface,
    layout: SlotLayout,
    prompt: float,
    share: float,
    steps: int = 6,
) -> float:
    """Return the seconds of a step that ends when `1 - share` of its sequences have finished, in the steady state.

    fresh: lengths of the sequences of a step; each step goes on with what the one before left.
    """
    lengths, prefix, gained = fresh.copy(), np.full(fresh.shape, prompt), gains
    seconds: list[float] = []
    for _ in range(steps):
        rollout = simulate(lengths, gained, surface, layout, prefix)
        at = float(np.quantile(rollout.ended, 1 - share, method="lower"))
        seconds.append(at)
        remaining = rollout.left(at)
        going = remaining > 0
        prefix = np.where(going, prefix + (1 - remaining) * lengths, prompt)
        lengths = np.where(going, np.maximum(remaining * lengths, 1.0), fresh)
        gained = np.where(going, gained, gains)
        order = np.argsort(~going, axis=1, kind="stable")  # what was begun gets the first slots
        lengths, prefix = (np.take_along_axis(each, order, 1) for each in (lengths, prefix))
        gained = np.take_along_axis(gained, order[None], 2)
    return float(np.mean(seconds[steps // 2 :]))
