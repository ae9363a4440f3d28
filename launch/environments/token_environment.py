"""Environments in text as a rollout calls them: token ids in, token ids out."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.environments.answers import Failure, Step
from launch.environments.joint import Joint
from launch.environments.limited import LimitedEpisode, LimitedEpisodes
from launch.errors import ConfigError, one_line
from launch.rewards.host_scorer import as_object
from specjax.environments import Answer
from specjax.types import Ending

logger = logging.getLogger(__name__)

FAILURES = {"failed": Ending.FAILED, "timed_out": Ending.TIMED_OUT}


class Reports:
    """Logs the first failure of each kind. owner: what is named in the log."""

    def __init__(self, owner: str) -> None:
        self._owner, self._kinds = owner, set[str]()

    def report(self, failure: Failure) -> None:
        """Log the failure if it is the first of its kind."""
        if failure.kind not in self._kinds:
            self._kinds.add(failure.kind)
            logger.warning(
                "%s: a completion has no reward: %s (shown once; the metric rollout/failed counts them)",
                *(self._owner, one_line(failure.reason, 300)),
            )


@dataclass(frozen=True, eq=False)
class TokenEnvironment:
    """A `specjax.environments.HostEnvironment` whose episodes run text environments.

    Attributes:
        width:     most tokens of an answer.
        problems:  that the ids of prompts are indices into.
        episodes:  runs the environments.
        read:      token ids of a turn -> its text.
        joint:     the ids that follow a turn.
        reports:   logs failures.
        deterministic: answers follow from problem, seed and turns.
    """

    width: int
    problems: Sequence[Problem]
    episodes: LimitedEpisodes
    read: Callable[[Sequence[int]], str]
    joint: Joint
    reports: Reports
    deterministic: bool = True

    def begin(self, problem: int, seed: int) -> "TokenEpisode":
        return TokenEpisode(self, self.episodes.begin(as_object(self.problems[problem]), seed))


@dataclass(frozen=True, eq=False)
class TokenEpisode:
    """A `specjax.environments.Episode` around an episode in text."""

    environment: TokenEnvironment
    episode: LimitedEpisode

    def step(self, turn: Sequence[int]) -> Future[Answer]:
        return _Read(self.episode.step(self.environment.read(turn)), lambda step: self._answer(step, turn))

    def end(self) -> Future[float]:
        return _Read(self.episode.end(), self._last_reward)

    def _answer(self, step: Step | Failure, turn: Sequence[int]) -> Answer:
        if isinstance(step, Failure):
            return self._failed(step)
        if step.done:
            return Answer(reward=step.reward, ending=Ending.STOP)
        try:
            return Answer(self.environment.joint.ids(step.observation, turn), step.reward)
        except ConfigError as error:
            return self._failed(Failure("failed", str(error)))

    def _failed(self, failure: Failure) -> Answer:
        self.environment.reports.report(failure)
        return Answer(ending=FAILURES[failure.kind])

    def _last_reward(self, last: float | Failure) -> float:
        if isinstance(last, Failure):
            self.environment.reports.report(last)
            return float("nan")
        return last


class _Read(Future[Any]):
    """A future whose result is read by the thread that asks for it: tokenizers are not for several at once."""

    def __init__(self, text: Future[Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read
        text.add_done_callback(lambda done: self.set_result(done.result()))

    def result(self, timeout: float | None = None) -> Any:
        return self._read(super().result(timeout))


def turn_reader(tokenizer: Tokenizer, stop_tokens: Sequence[int], markers: tuple[str, ...]) -> Callable[..., str]:
    """Return the function from the ids of a turn to its text, without stop tokens.

    markers: special tokens that the text keeps.
    """
    decode_keeping = getattr(tokenizer, "decode_keeping", None)

    def read(turn: Sequence[int]) -> str:
        ids = [token for token in turn if token not in stop_tokens]
        return tokenizer.decode(ids) if decode_keeping is None or not markers else decode_keeping(ids, markers)

    return read
