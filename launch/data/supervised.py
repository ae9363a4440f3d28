"""Problems with their worked solutions, as padded batches to learn from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from launch.cli.errors import ConfigError
from launch.data.batches import pad
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer


class SupervisedBatch(NamedTuple):
    """Prompts followed by their solutions and a stop token.

    tokens:         int32 [B, S], zero from `lengths` on.
    lengths:        int32 [B].
    prompt_lengths: int32 [B]; what follows is to be learnt.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray


def supervised_batch(
    problems: Sequence[Problem], tokenizer: Tokenizer, batch_size: int, length: int, seed: int, step: int
) -> SupervisedBatch:
    """`batch_size` different problems with their solutions, drawn at random by (seed, step), padded to `length` tokens.

    Raises ConfigError where a batch needs more problems than there are, one has no solution, or one does not fit.
    """
    if not 0 < batch_size <= len(problems):
        raise ConfigError(
            f"warmup.batch_size = {batch_size}: must be between 1 and {len(problems)}, the problems there are"
        )
    picks = np.random.default_rng((seed, step)).choice(len(problems), batch_size, replace=False)
    pairs = [_supervised(problems, pick, tokenizer, length) for pick in picks]
    tokens, lengths = pad([prompt + solution for prompt, solution in pairs], length)
    return SupervisedBatch(tokens, lengths, np.asarray([len(prompt) for prompt, _ in pairs], np.int32))


def check_supervised(problems: Sequence[Problem], tokenizer: Tokenizer, batch_size: int, length: int) -> None:
    """Raise what `supervised_batch` would raise at any step."""
    supervised_batch(problems, tokenizer, batch_size, length, seed=0, step=0)
    for pick in range(len(problems)):
        _supervised(problems, pick, tokenizer, length)


def _supervised(
    problems: Sequence[Problem], pick: int, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[int]]:
    """The tokens of a problem's prompt, and of its solution with the stop token."""
    problem = problems[pick]
    if problem.solution is None:
        raise ConfigError(f"warmup.steps: problem {pick} has no solution to learn from: {problem.prompt[:60]!r}")
    prompt = tokenizer.chat(problem.prompt)
    solution = [*tokenizer.encode(problem.solution), tokenizer.stop_tokens[0]]
    if len(prompt) + len(solution) > length:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {length}: must be at least "
            f"{len(prompt) + len(solution)}, the tokens of problem {pick} with its solution"
        )
    return prompt, solution
