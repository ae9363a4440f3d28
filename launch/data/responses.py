"""Prompts with answers to train on: the policy's own answers for a draft, worked solutions for the policy."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from launch.data.batches import check_ids, pad, padded_length
from launch.data.problems import Problem
from launch.data.prompts import prompt_text
from launch.data.stop_strings import until_stop
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError
from specjax.options import show
from specjax.parallel import processes
from specjax.train.batch import Sequences
from specjax.types import Prompts, Rollout


@dataclass(frozen=True)
class Answers:
    """Prompts with one answer each.

    Attributes:
        ids:            int32 [N], index of the prompt's problem; -1 if the answer was read from a file.
        tokens:         int32 [N, S], prompt and answer, left-aligned, padded with 0.
        prompt_lengths: int32 [N], tokens of the prompt.
        lengths:        int32 [N], tokens of prompt and answer together.
    """

    ids: np.ndarray
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray

    @classmethod
    def pad(cls, ids: Sequence[int], pairs: Collection[tuple[list[int], list[int]]], length: int) -> "Answers":
        """Build from (prompt, answer) pairs of token ids. Each row is padded to `length` tokens."""
        tokens, lengths = pad([prompt + answer for prompt, answer in pairs], length)
        prompt_lengths = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        return cls(np.array(ids, np.int32), tokens, prompt_lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def completions(self) -> np.ndarray:
        """Tokens of all answers, without prompts and padding, concatenated, int32."""
        return self.tokens[self._answer_mask(np.arange(len(self)))]

    def first(self, count: int) -> "Answers":
        """Return the first `count` rows."""
        return Answers(**{field.name: getattr(self, field.name)[:count] for field in fields(self)})

    def batch(self, picks: np.ndarray) -> Sequences:
        """Return the rows `picks`, int [B]. A negative pick gives an empty row."""
        valid = (picks >= 0)[:, None]
        tokens, completion = np.where(valid, self.tokens[picks], 0), self._answer_mask(picks) & valid
        return Sequences(tokens, completion)  # pyright: ignore[reportArgumentType]

    def draw(self, count: int, seed: int, step: int) -> Sequences:
        """Return `count` distinct rows, drawn at random. (seed, step) determines them."""
        return self.batch(np.random.default_rng((seed, step)).choice(len(self), count, replace=False))

    def in_batches(self, count: int) -> Iterable[Sequences]:
        """Yield all rows in order, `count` per batch. Empty rows complete the last batch."""
        for start in range(0, len(self), count):
            picks = np.arange(start, start + count)
            yield self.batch(np.where(picks < len(self), picks, -1))

    def _answer_mask(self, picks: np.ndarray) -> np.ndarray:
        """Return bool [B, S] for the rows `picks`, int [B]: True at the answer's tokens."""
        column = np.arange(self.tokens.shape[1])[None]
        return (column >= self.prompt_lengths[picks, None]) & (column < self.lengths[picks, None])


def answers_of(prompts: Prompts, rollout: Rollout) -> Answers:
    """Return the completions of a rollout with their prompts. Filler rows, with negative ids, are left out."""
    group = len(rollout.lengths) // len(prompts.lengths)
    prompt_tokens, prompt_lengths, ids = processes.fetch((prompts.tokens, prompts.lengths, prompts.id))
    answer_tokens, answer_lengths = processes.fetch((rollout.tokens, rollout.lengths))
    rows = [row for row in range(len(answer_lengths)) if ids[row // group] >= 0]
    pairs = []
    for row in rows:
        prompt = prompt_tokens[row // group, : prompt_lengths[row // group]]
        pairs.append((prompt.tolist(), answer_tokens[row, : answer_lengths[row]].tolist()))
    length = prompt_tokens.shape[1] + answer_tokens.shape[1]
    return Answers.pad([int(ids[row // group]) for row in rows], pairs, length)


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Concatenate the rows of all parts. All must be padded to the same length."""
    return Answers(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Answers)))


def worked_solutions(problems: Sequence[Problem], tokenizer: Tokenizer, length: int, vocab_size: int) -> Answers:
    """Return the solutions of the problems as answers, each ended by a stop token or stop string.

    length: most tokens of a prompt with its solution. Rows are padded as far as the longest needs.

    Raises ConfigError if a problem has no solution, does not fit, or has an id outside the policy's vocabulary, and for
    a solution that goes on after its end.
    """
    pairs: list[tuple[list[int], list[int]]] = []
    for index, problem in enumerate(problems):
        if problem.solution is None:
            text = prompt_text(problem.prompt)[:60]
            raise ConfigError(f"warmup.steps: must be 0, because problem {index} has no worked solution: {text!r}")
        prompt = tokenizer.chat(problem.prompt)
        solution, after_stop = until_stop([*tokenizer.encode(problem.solution), tokenizer.stop_tokens[0]], tokenizer)
        if tokenizer.decode(after_stop).strip():
            raise ConfigError(
                f"rollout.stop_strings = {tokenizer.stop_strings}: end the solution of problem {index} before "
                f"{show(tokenizer.decode(after_stop))!r}; must not stand within solutions"
            )
        needed = len(prompt) + len(solution)
        if needed > length:
            raise ConfigError(
                f"data.max_prompt_tokens + rollout.max_new_tokens = {length}: must be at least {needed}, "
                f"the length of problem {index} with its solution"
            )
        check_ids([*prompt, *solution], vocab_size, f"problem {index} with its solution")
        pairs.append((prompt, solution))
    longest = max((len(prompt) + len(solution) for prompt, solution in pairs), default=length)
    return Answers.pad(range(len(pairs)), pairs, padded_length(longest, length))
