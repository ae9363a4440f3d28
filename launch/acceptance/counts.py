"""Counts of drafted and accepted tokens, of all sequences or by their length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specjax.parallel import processes
from specjax.types import Rollout

# Largest length of the first bucket.
SHORTEST_BUCKET = 16


@dataclass(frozen=True)
class DraftCounts:
    """Drafted and accepted tokens of a set of sequences, over the rounds in which each was active.

    Attributes:
        sequences: number of sequences.
        tokens:    number of tokens emitted by verifications. The first token of a sequence, from its prefill, is none.
        rounds:    number of verifications.
        ended:     number of verifications in which an accepted drafted token ended the sequence, so none followed it.
        drafted:   [K], number of rounds that could emit position i of their proposal.
        accepted:  [K], number of rounds that emitted it.
        alpha:     acceptance length, 1 + (sum of accepted - ended) / rounds; None without rounds.
        rates:     [K], accepted / drafted, not conditional on earlier positions; None where nothing was drafted.
    """

    sequences: int
    tokens: int
    rounds: int
    ended: int
    drafted: list[int]
    accepted: list[int]
    alpha: float | None
    rates: list[float | None]


class DraftRecords(NamedTuple):
    """Lengths, rounds, and drafted and accepted tokens of each sequence: int32 [R], the last two [R, K]."""

    lengths: np.ndarray
    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, rollout: Rollout, which: np.ndarray) -> "DraftRecords":
        """Return the records of the rows selected by `which`, bool [R]. The rollout must have recorded its drafts."""
        records = rollout.lengths, rollout.row_rounds, rollout.drafted, rollout.accepted
        return cls(*processes.fetch(records)).select(which)

    @classmethod
    def join(cls, parts: Sequence["DraftRecords"]) -> "DraftRecords":
        """Concatenate the rows of all parts."""
        return cls(*(np.concatenate(rows) for rows in zip(*parts, strict=True)))

    def select(self, which: np.ndarray) -> "DraftRecords":
        """Return the rows selected by `which`, bool [R]."""
        return DraftRecords(*(x[which] for x in self))


def count_drafts(records: DraftRecords) -> DraftCounts:
    """Return the counts over all sequences."""
    tokens, rounds = int(records.lengths.sum() - len(records.lengths)), int(records.rounds.sum())
    drafted, accepted = records.drafted.sum(axis=0).tolist(), records.accepted.sum(axis=0).tolist()
    return DraftCounts(
        sequences=len(records.lengths),
        tokens=tokens,
        rounds=rounds,
        ended=sum(accepted) + rounds - tokens,
        drafted=drafted,
        accepted=accepted,
        alpha=tokens / rounds if rounds else None,
        rates=[a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
    )


def length_buckets(lengths: np.ndarray) -> np.ndarray:
    """Return the bucket of each length, named by its largest one: 16, 32, 64, .."""
    return np.array([max(SHORTEST_BUCKET, 2 ** math.ceil(math.log2(max(length, 1)))) for length in lengths.tolist()])


def first_length(bucket: int) -> int:
    """Return the smallest length of a bucket that is named by its largest one."""
    return 1 if bucket <= SHORTEST_BUCKET else bucket // 2 + 1
