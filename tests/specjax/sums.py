"""An environment whose answers follow from sums of tokens: in JAX, and on the host."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from specjax.environments import Answer, Observation, at_once
from specjax.types import Ending, Prompts


@dataclass(frozen=True)
class Sums:
    """Answers with tokens that follow from the sum of the turn's tokens and the number of the turn.

    vocab: tokens of an answer are below it. never: it ends no sequence. ends: it ends all at once.
    """

    vocab: int
    width: int = 3
    ends: bool = False

    def begin(self, prompts: Prompts, keys: jax.Array) -> Any:
        return {"turn": jnp.zeros(len(keys), jnp.int32), "offset": prompts.lengths}

    def step(self, state: Any, tokens: jax.Array, start: jax.Array, end: jax.Array) -> tuple[Any, Observation]:
        column = jnp.arange(tokens.shape[1])[None]
        total = jnp.sum(jnp.where((column >= start[:, None]) & (column < end[:, None]), tokens, 0), axis=1)
        total += state["turn"] + state["offset"]
        answer = jnp.stack([(total * (i + 1) + i) % self.vocab for i in range(self.width)], axis=1)
        failed = (total % 11 == 1) & ~jnp.array(self.ends)
        ending = jnp.where(failed, Ending.FAILED, Ending.STOP).astype(jnp.int8)
        done = failed | (total % 5 == 0) | self.ends
        seen = Observation(answer, total % (self.width + 1), done, (total % 4).astype(jnp.float32), ending)
        return {**state, "turn": state["turn"] + 1}, seen


@dataclass(eq=False)
class HostSums:
    """`Sums` on the host. A thread answers in an order that `seed` shuffles.

    prompts: the batch. last: what the end of each episode adds to its reward.
    turns:   the tokens of each turn, by problem and seed.
    """

    rule: Sums
    prompts: Prompts
    seed: int = 0
    last: float = 0.0
    ended: list[int] = field(default_factory=list)
    turns: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._asked: list[tuple[Future[Answer], Answer]] = []
        self._more, self._order = threading.Condition(), random.Random(self.seed)
        threading.Thread(target=self._resolve, daemon=True).start()

    @property
    def width(self) -> int:
        return self.rule.width

    def begin(self, problem: int, seed: int) -> "SumsEpisode":
        self.turns[problem, seed] = []
        prompt = self.prompts.id.tolist().index(problem)
        return SumsEpisode(self, problem, self.turns[problem, seed], int(self.prompts.lengths[prompt]))

    def later(self, answer: Answer) -> Future[Answer]:
        future = Future[Answer]()
        with self._more:
            self._asked.append((future, answer))
            self._more.notify()
        return future

    def _resolve(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._asked)
                future, answer = self._asked.pop(self._order.randrange(len(self._asked)))
            future.set_result(answer)


@dataclass
class SumsEpisode:
    """An episode of `HostSums`."""

    environment: HostSums
    problem: int
    turns: list[list[int]]
    offset: int

    def step(self, turn: Sequence[int]) -> Future[Answer]:
        rule, total = self.environment.rule, sum(turn) + len(self.turns) + self.offset
        self.turns.append(list(turn))
        if total % 11 == 1:
            return self.environment.later(Answer(ending=Ending.FAILED))
        tokens = [(total * (i + 1) + i) % rule.vocab for i in range(rule.width)][: total % (rule.width + 1)]
        ending = Ending.STOP if total % 5 == 0 else Ending.GOING
        return self.environment.later(Answer(tokens, float(total % 4), ending))

    def end(self) -> Future[float]:
        self.environment.ended.append(self.problem)
        return at_once(self.environment.last)
