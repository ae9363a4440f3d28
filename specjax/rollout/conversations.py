"""The host's part of a rollout with an environment there: the episodes of its rows, and their answers."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from specjax.environments import Answer, Episode, HostEnvironment, at_once
from specjax.types import Ending

logger = logging.getLogger(__name__)


class Rows(NamedTuple):
    """Part of a rollout's rows that the host reads, as numpy arrays.

    done:    bool [R], ended. waiting: bool [R], the turn has ended and the environment has not answered.
    began:   int32 [R], completion tokens before the turn. emitted: int32 [R], completion tokens.
    tokens:  int32 [R, C], of the completions.
    """

    done: np.ndarray
    waiting: np.ndarray
    began: np.ndarray
    emitted: np.ndarray
    tokens: np.ndarray


class Conversations:
    """The episodes of a rollout's rows, a context in which they run.

    Args:
        problems:   int32 [R], `Prompts.id` of each row. Rows of filler prompts, below 0, have no episode: they end
                    with their first turn.
        seeds:      uint32 [R, 2], the key of each row's environment.
        vocab_size: ids of observations are below it.
        batch:      rows that are answered at a time while others decode: an answer takes a forward of all rows.

    Attributes:
        seconds:    by metric, as in `HostTurns`.
    """

    def __init__(
        self, environment: HostEnvironment, problems: np.ndarray, seeds: np.ndarray, vocab_size: int, batch: int
    ) -> None:
        self._environment, self._width, self._vocab_size = environment, environment.width, vocab_size
        self._problems, self._seeds, self._batch = problems, seeds, batch
        self._episodes: dict[int, Episode] = {}
        self._asked: dict[int, Future[Answer]] = {}
        self._ends: dict[int, Future[float]] = {}
        self._reported = False
        self.seconds = {"time/tools": 0.0, "time/waiting": 0.0}

    def __enter__(self) -> "Conversations":
        with self._timed("time/tools"):
            try:
                for row in np.flatnonzero(self._problems >= 0).tolist():
                    high, low = map(int, self._seeds[row])
                    self._episodes[row] = self._environment.begin(int(self._problems[row]), high << 32 | low)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end(self._episodes.keys() - self._ends.keys())

    def answers(self, rows: Rows) -> dict[int, Answer]:
        """Start to answer the turns that have ended. Return by row the answers that have come, if they are enough.

        If no row can decode, it waits for them.
        """
        with self._timed("time/tools"):
            waiting = np.flatnonzero(rows.waiting & ~rows.done).tolist()
            for row in waiting:
                if row not in self._asked:
                    self._asked[row] = self._step(row, rows.tokens[row, rows.began[row] : rows.emitted[row]].tolist())
            self._end(set(np.flatnonzero(rows.done).tolist()) & self._episodes.keys() - self._ends.keys())
        enough, decodes = min(self._batch, len(waiting)), len(waiting) < np.sum(~rows.done)
        with self._timed("time/waiting"):
            while not decodes and len(self._unanswered()) > len(waiting) - enough:
                wait(self._unanswered(), return_when=FIRST_COMPLETED)
        with self._timed("time/tools"):
            come = [row for row, future in self._asked.items() if future.done()]
            return {row: self._checked(self._asked.pop(row).result()) for row in come if len(come) >= enough}

    def last_rewards(self) -> np.ndarray:
        """Return the rewards that the ends of the episodes gave, float32 [R], when all have ended."""
        with self._timed("time/tools"):
            self._end(self._episodes.keys() - self._ends.keys())
        rewards = np.zeros(len(self._problems), np.float32)
        with self._timed("time/waiting"):
            for row, future in self._ends.items():
                rewards[row] = future.result()
        return rewards

    def _step(self, row: int, turn: Sequence[int]) -> Future[Answer]:
        if row in self._episodes:
            return self._episodes[row].step(turn)
        return at_once(Answer(ending=Ending.STOP))

    def _end(self, rows: set[int]) -> None:
        self._ends |= {row: self._episodes[row].end() for row in rows}

    def _unanswered(self) -> list[Future[Answer]]:
        return [future for future in self._asked.values() if not future.done()]

    def _checked(self, answer: Answer) -> Answer:
        """Return the answer, or a failure in place of one that no sequence can take."""
        fits = len(answer.tokens) <= self._width and all(0 <= token < self._vocab_size for token in answer.tokens)
        if fits and math.isfinite(answer.reward):
            return answer
        if not self._reported:
            self._reported = True
            logger.warning(
                "environment: an answer of %d tokens, ids %s, reward %s: must be at most %d ids below %d and a finite "
                "reward; the sequence has no reward (shown once; rollout/failed counts them)",
                *(len(answer.tokens), list(answer.tokens[:8]), answer.reward, self._width, self._vocab_size),
            )
        return Answer(ending=Ending.FAILED)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
