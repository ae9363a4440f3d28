"""The tokens that a reduced draft vocabulary is made of."""

from collections.abc import Sequence

import numpy as np

from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer


def frequent_tokens(
    problems: Sequence[Problem], tokenizer: Tokenizer, stop_tokens: Sequence[int], count: int, vocab_size: int
) -> np.ndarray:
    """`most_frequent` of the problems' texts, among the ids below `vocab_size`."""
    counts = np.zeros(vocab_size, np.int64)
    for problem in problems:
        for text in (problem.prompt, problem.solution or "", problem.answer):
            np.add.at(counts, np.asarray(tokenizer.encode(text), np.int64), 1)
    return most_frequent(counts, stop_tokens, count)


def most_frequent(counts: np.ndarray, stop_tokens: Sequence[int], count: int) -> np.ndarray:
    """`count` ids, int32 ascending: the stop tokens and those that `counts`, int [V], says to come most often.

    Where fewer come at all, the lowest of the others fill up what lacks.
    """
    ranked = sorted(range(len(counts)), key=lambda token: (token not in stop_tokens, -counts[token], token))
    return np.array(sorted(ranked[:count]), np.int32)
