"""Selection of the tokens of a reduced draft vocabulary."""

from collections.abc import Sequence

import numpy as np

from launch.data.problems import Problem
from launch.data.prompts import prompt_text
from launch.data.tokenizers import Tokenizer


def frequent_tokens(problems: Sequence[Problem], tokenizer: Tokenizer, count: int, vocab_size: int) -> np.ndarray:
    """Return the `most_frequent` tokens in the prompts, solutions and answers of the problems.

    All token ids must be below `vocab_size`.
    """
    counts = np.zeros(vocab_size, np.int64)
    for problem in problems:
        for text in (prompt_text(problem.prompt), problem.solution or "", problem.answer):
            np.add.at(counts, np.array(tokenizer.encode(text), np.int64), 1)
    return most_frequent(counts, tokenizer.stop_tokens, count)


def most_frequent(counts: np.ndarray, stop_tokens: Sequence[int], count: int) -> np.ndarray:
    """Return the stop tokens and the most frequent other tokens, `count` ids in all: int32, ascending.

    counts: occurrences of each token, int [V]. Ties go to the lowest id; tokens that never occur rank last.
    """
    ranked = sorted(range(len(counts)), key=lambda token: (token not in stop_tokens, -counts[token], token))
    return np.array(sorted(ranked[:count]), np.int32)
