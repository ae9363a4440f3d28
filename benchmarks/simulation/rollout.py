"""Simulate one rollout: sequences that wait for slots, rounds, and phases.

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


class SimulatedRollout(NamedTuple):
    """Outcome of a simulated rollout.

    ended:    float64 [replicas, sequences], seconds at which each sequence finished.
    verified: tokens per verification, over all sequences.
    """

    ended: np.ndarray
    verified: float

    @property
    def seconds(self) -> float:
        """Seconds until every sequence has finished."""
        return float(self.ended.max())


def simulate(
    lengths: np.ndarray, gains: np.ndarray, surface: Surface, layout: SlotLayout, start: float
) -> SimulatedRollout:
    """Simulate the rollout of `lengths` tokens, float64 [replicas, sequences], in the order in which they get slots.

    gains:   tokens that each sequence gains in a round, float64 [draft lengths, replicas, sequences].
    surface: seconds of a round. Of its draft lengths, each replica takes the one of the most tokens per second.
    start:   positions of a prompt.
    """
    replicas, sequences = lengths.shape
    slots, every = min(layout.slots, sequences), np.arange(replicas)
    row = np.tile(np.arange(slots), (replicas, 1))
    waiting = np.full(replicas, slots)
    remaining, position = lengths[:, :slots].copy(), np.full((replicas, slots), float(start))
    clock, ends, verified = np.zeros(replicas), np.zeros(lengths.shape), 0.0
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
        clock = clock + span * cost
        verified += float((span * count).sum())
        remaining, position = remaining - advance * span[:, None], position + advance * span[:, None]
        finished = live & (remaining <= _DONE * np.maximum(position, 1.0))
        replica, slot = np.nonzero(finished)
        ends[replica, row[replica, slot]] = clock[replica]
        turn = waiting[:, None] + np.cumsum(finished, axis=1) - 1
        replica, slot = np.nonzero(finished & (turn < sequences))
        entered = turn[replica, slot]
        row[replica, slot], remaining[replica, slot], position[replica, slot] = (
            entered,
            lengths[replica, entered],
            start,
        )
        live &= ~finished
        live[replica, slot] = True
        waiting = np.minimum(waiting + finished.sum(1), sequences)
    return SimulatedRollout(ends, float(lengths.sum()) / verified)
