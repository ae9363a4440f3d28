"""The final answers of completions, for those scorers that have a notion of one."""

import importlib
from collections.abc import Callable

from configs.schema.rewards import TRACED, RewardConfig
from launch.rewards.patterns import final_answer
from launch.rewards.worker import NAMED, OF_PATTERN

FinalAnswer = Callable[[str], str | None]


def final_answer_of(config: RewardConfig) -> FinalAnswer | None:
    """completion -> its answer, or None where it gives none: of `regex` the group of its pattern, of other scorers the
    function `final_answer` beside the scorer's own.

    None where the scorer has no notion of an answer: its pattern has no group, or its module no such function. It runs
    here and without a time limit, and so is for completions that the scorer has scored; one at which it raises gives no
    answer.
    """
    function = _function(config)
    if function is None:
        return None

    def answer(completion: str) -> str | None:
        try:
            return function(completion)
        except Exception:
            return None

    return answer


def _function(config: RewardConfig) -> FinalAnswer | None:
    name = "exact" if config.scorer == TRACED else config.scorer
    if name in OF_PATTERN:
        return final_answer(config.pattern) if name == "regex" and config.pattern is not None else None
    return getattr(importlib.import_module(NAMED.get(name, name).partition(":")[0]), "final_answer", None)
