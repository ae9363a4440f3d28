"""Scorers of token ids on the host, which read completions and score their texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from configs.schema import RewardConfig
from configs.schema.rewards import LengthConfig
from launch.data.json_lines import json_text
from launch.data.problems import Problem
from launch.data.prompts import prompt_fields
from launch.errors import ConfigError, first_line
from launch.rewards.answers import Completion
from launch.rewards.reader import AnswerReader
from launch.rewards.scorers import FUNCTION, NotANumber, NoValue, as_number, scorer_of
from launch.rewards.workers import Result, as_values, log_failures


class TextScorer(Protocol):
    """Scores texts, as `RewardPool` does: one column of values for each of `scorers`."""

    scorers: list[str]

    def score(self, completions: Sequence[Completion], problems: Sequence[dict[str, Any]]) -> np.ndarray: ...

    def results(self, completions: Sequence[Completion], problems: Sequence[dict[str, Any]]) -> list[Result]: ...


@dataclass(frozen=True)
class HostScorer:
    """Callable that scores token ids: (tokens [r, C], lengths [r], ids [r]) -> (value [r], correct [r]), float32.

    `value` is the weighted sum of all scorers; with several, a third array holds their own values, [r, scorers].
    `correct` is 1.0 where the first scorer's value is above 0.5. A sum that float32 cannot hold is NaN, and not
    correct. `ids` are indices into the reader's problems; rows with a negative id are padding and get NaN.

    Attributes:
        texts:  scores completions.
        reader: reads them from token ids.
        config: names and weights of the scorers.
    """

    texts: TextScorer
    reader: AnswerReader
    config: RewardConfig

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        rows, config = np.flatnonzero(ids >= 0), self.config
        completions = [self.reader.read(tokens[row, : lengths[row]].tolist(), int(ids[row])) for row in rows]
        objects = {number: as_object(self.reader.problems[number]) for number in {*ids[rows].tolist()}}
        scored = self.texts.score(completions, [objects[ids[row]] for row in rows])
        values = np.full((len(ids), len(config.names)), np.nan, np.float32)
        values[rows] = self._columns(scored, lengths[rows])
        total = self.total(values)
        correct = ((values[:, 0] > 0.5) & np.isfinite(total)).astype(np.float32)
        return (total, correct, values) if config.parts else (total, correct)

    def results(self, completions: Sequence[Sequence[int]], problem: int) -> list[float | str]:
        """Return the rewards of completions of one problem, or the reasons why there are none. Logs nothing.

        completions: token ids, with the stop token.
        """
        texts = [self.reader.read(ids, problem) for ids in completions]
        results = self.texts.results(texts, [as_object(self.reader.problems[problem])] * len(texts))
        scored = as_values(results, len(self.texts.scorers))
        totals = self.total(self._columns(scored, np.array(list(map(len, completions))))).tolist()
        return [result if isinstance(result, str) else total for result, total in zip(results, totals, strict=True)]

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sums of values [r, scorers], rounded once; NaN where float32 cannot hold them."""
        weights = np.array(self.config.weights or [1.0] * len(self.config.names), np.float64)
        return as_values([[total] for total in (values.astype(np.float64) @ weights).tolist()], 1)[:, 0]

    def _columns(self, scored: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the values of all scorers in the order of their names; `length` needs no text."""
        columns = dict(zip(self.texts.scorers, scored.T, strict=True))
        if "length" in self.config.names:
            columns["length"] = length_penalty(lengths, self.config.length)
        return np.stack([columns[name] for name in self.config.names], axis=1)


class FunctionScorer:
    """Scores texts by a function of this process, without a time limit.

    A completion on which it raises an exception, or returns no finite number, has no reward. The first failure of each
    kind is logged. Completions of the same problem share the object, so the function must not change it.

    function: (completion, answer) or (completion, problem) -> number.
    name:     of the function, for messages.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._owner = f"reward = {name}"
        self.scorers, self._scorer = [f"{FUNCTION}{name}"], scorer_of(function, owner=self._owner)
        self._logged = set[str]()

    def check_type(self, completion: str, problem: dict[str, Any]) -> None:
        """Raise ConfigError if the function returns what is never a reward. It may not be made for the completion."""
        try:
            as_number(self._scorer(Completion(completion, completion), problem))
        except NotANumber as error:
            raise ConfigError(f"{self._owner}: {error}") from None
        except Exception:
            pass

    def results(self, completions: Sequence[Completion], problems: Sequence[dict[str, Any]]) -> list[Result]:
        """Return the value of each completion, or the reason why there is none."""
        return list(map(self._result, completions, problems))

    def score(self, completions: Sequence[Completion], problems: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the values, float32 [completions, 1]; NaN for those without one."""
        results = self.results(completions, problems)
        log_failures(self._owner, results, self._logged)
        return as_values(results, 1)

    def _result(self, completion: Completion, problem: dict[str, Any]) -> Result:
        try:
            value = as_number(self._scorer(completion, problem))
        except (NoValue, NotANumber) as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        return [value] if abs(value) <= np.finfo(np.float32).max else f"returned {value}"


def as_object(problem: Problem) -> dict[str, Any]:
    """Return a problem as scorers of one's own get it."""
    columns = json.loads(json_text(dict(problem.columns)))
    return {"prompt": prompt_fields(problem.prompt), "answer": problem.answer, "columns": columns}


def length_penalty(lengths: np.ndarray, config: LengthConfig) -> np.ndarray:
    """Return a reward in -1 .. 0 that depends only on the length of a completion in tokens."""
    assert config.most is not None
    outside = np.maximum(np.maximum(config.least - lengths, lengths - config.most), 0)
    return -np.minimum(outside / config.slack, 1.0)
