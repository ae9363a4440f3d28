"""Parts of a completion with an environment: what the policy wrote, and what it observed."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from launch.data.tokenizers import Tokenizer
from launch.rewards.answers import before_stop
from specjax.types import Ending

SAMPLED, OBSERVED = "sampled", "observed"
# What the names of `Ending` say, in lower case as records have them.
ENDINGS = {
    "stop": "ended by the environment",
    "length": "cut off at the length budget",
    "turns": "ended at the limit of turns",
    "failed": "the environment failed",
    "timed_out": "the environment took too long",
    "full": "cut off: an answer did not fit into the length budget",
}


def parts_of(ids: Sequence[int], sampled: Sequence[bool]) -> Iterator[tuple[str, list[int]]]:
    """Yield (SAMPLED or OBSERVED, token ids) of each part of a completion, in order. sampled: of each token."""
    for drawn, pairs in groupby(zip(ids, sampled, strict=True), key=lambda pair: pair[1]):
        yield SAMPLED if drawn else OBSERVED, [token for token, _ in pairs]


def conversation_record(
    tokenizer: Tokenizer, ids: Sequence[int], sampled: Sequence[bool], ending: int, turns: int, returns: float
) -> dict[str, Any]:
    """Return the fields that JSON records of completions with an environment have beside others.

    They are {"ending", "turns", "environment_reward", "parts": [["sampled", text], ["observed", text], ..]}. Texts hold
    all special tokens. The reward is null if the environment failed.

    ending, turns, returns: of the completion, as in `Rollout`.
    """
    return {
        "ending": Ending(ending).name.lower(),
        "turns": turns,
        "environment_reward": returns if math.isfinite(returns) else None,
        "parts": [[kind, tokenizer.with_special_tokens(part)] for kind, part in parts_of(ids, sampled)],
    }


def conversation_text(
    tokenizer: Tokenizer, ids: Sequence[int], sampled: Sequence[bool], stop_strings: Sequence[str] = ()
) -> str:
    """Return a completion as text for people: observed lines begin with "> ", and turns end before stop strings."""
    texts = list[str]()
    for kind, part in parts_of(ids, sampled):
        text = tokenizer.decode(part)
        if kind == OBSERVED:
            lines = [line for line in text.splitlines() if line.strip()]
            texts.append("".join(f"\n> {line}" for line in lines) + "\n")
        else:
            texts.append(before_stop(text, stop_strings))
    return "".join(texts)
