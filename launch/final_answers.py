"""The final answers of completions, for those scorers that have a notion of one."""

import importlib
from collections.abc import Callable

from launch.reward_worker import NAMED
from launch.scoring import TRACED

FinalAnswer = Callable[[str], str | None]


def final_answer_of(scorer: str) -> FinalAnswer | None:
    """completion -> its answer, or None where it gives none: the function `final_answer` beside the scorer's own.

    None where the scorer's module has no such function. It runs here and without a time limit, and so is for
    completions that the scorer has scored; one at which it raises gives no answer.
    """
    name = "exact" if scorer == TRACED else scorer
    function = getattr(importlib.import_module(NAMED.get(name, name).partition(":")[0]), "final_answer", None)
    if function is None:
        return None

    def answer(completion: str) -> str | None:
        try:
            return function(completion)
        except Exception:
            return None

    return answer
