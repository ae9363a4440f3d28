"""Prompts with answers to learn from: a policy's own answers for a draft, worked solutions for a policy.

Each line of a file of answers is a JSON object with

    prompt    text: the problem as in the data. The run's data section says how it is put to the model.
    response  text: the answer. It counts as ended by a stop token.
    tokens    optional: the answer's token ids, with the stop token if it has one. Used instead of `response`, because
              text may not tokenize as it was generated.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.errors import ConfigError
from launch.data.batches import check_ids, pad
from launch.data.json_lines import read_lines, text_field
from launch.data.problems import Problem
from launch.data.prompts import prompt_text, read_prompt, to_json
from launch.data.tokenizers import Tokenizer
from specjax.train.batch import Sequences
from specjax.types import Prompts, Rollout


@dataclass(frozen=True)
class Answers:
    """Prompts with one answer each.

    Attributes:
        ids:            int32 [N], index of the prompt's problem; -1 if it came from a file.
        tokens:         int32 [N, S], prompt and answer, left-aligned, then zeros.
        prompt_lengths: int32 [N].
        lengths:        int32 [N], prompt and answer together.
    """

    ids: np.ndarray
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray

    @classmethod
    def pad(cls, ids: Sequence[int], pairs: Collection[tuple[list[int], list[int]]], length: int) -> "Answers":
        """Pad pairs of a prompt and its answer to `length` tokens."""
        tokens, lengths = pad([prompt + answer for prompt, answer in pairs], length)
        prompt_lengths = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        return cls(np.asarray(ids, np.int32), tokens, prompt_lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def completions(self) -> np.ndarray:
        """Return the tokens of all answers without their prompts, concatenated, int32."""
        return self.tokens[self._completion(np.arange(len(self)))]

    def batch(self, picks: np.ndarray) -> Sequences:
        """Return the rows `picks`, int [B]. A negative pick gives an empty row."""
        real = (picks >= 0)[:, None]
        tokens, completion = np.where(real, self.tokens[picks], 0), self._completion(picks) & real
        return Sequences(tokens, completion)  # pyright: ignore[reportArgumentType]

    def draw(self, count: int, seed: int, step: int) -> Sequences:
        """Return `count` distinct rows, drawn at random by (seed, step)."""
        return self.batch(np.random.default_rng((seed, step)).choice(len(self), count, replace=False))

    def in_batches(self, count: int) -> Iterable[Sequences]:
        """Yield all rows in order, `count` per batch; empty rows fill up the last batch."""
        for start in range(0, len(self), count):
            picks = np.arange(start, start + count)
            yield self.batch(np.where(picks < len(self), picks, -1))

    def _completion(self, picks: np.ndarray) -> np.ndarray:
        column = np.arange(self.tokens.shape[1])[None]
        return (column >= self.prompt_lengths[picks, None]) & (column < self.lengths[picks, None])


def answers_of(prompts: Prompts, rollout: Rollout) -> Answers:
    """Return the completions of a rollout with their prompts; filler, with ids below 0, is left out."""
    group = len(rollout.lengths) // len(prompts.lengths)
    ids, ends = np.repeat(np.asarray(prompts.id), group), np.asarray(rollout.lengths)
    before, starts, answers = (np.asarray(x) for x in (prompts.tokens, prompts.lengths, rollout.tokens))
    kept = np.flatnonzero(ids >= 0)
    pairs = [
        (before[row // group, : starts[row // group]].tolist(), answers[row, : ends[row]].tolist()) for row in kept
    ]
    return Answers.pad(ids[kept].tolist(), pairs, before.shape[1] + answers.shape[1])


def join_answers(parts: Sequence[Answers]) -> Answers:
    """Concatenate the rows of all parts, which must be padded to the same length."""
    return Answers(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Answers)))


def answer_records(answers: Answers, problems: Sequence[Problem], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield answers to some of `problems` as the objects that a file of answers holds."""
    for problem, row, start, end in zip(
        answers.ids, answers.tokens, answers.prompt_lengths, answers.lengths, strict=True
    ):
        ids = row[start:end].tolist()
        yield {"prompt": to_json(problems[problem].prompt), "response": tokenizer.decode(ids), "tokens": ids}


def load_answers(
    path: Path, tokenizer: Tokenizer, max_prompt_tokens: int, max_new_tokens: int, vocab_size: int
) -> tuple[Answers, int]:
    """Return the answers of a file, and how many were dropped because their prompts are empty or too long.

    Answers are cut at `max_new_tokens`. Raises ConfigError naming the file, and the line where there is one, for
    whatever it cannot use.
    """
    rows: list[tuple[list[int], list[int]]] = []
    dropped = 0
    for record, where in read_lines(path):
        prompt = tokenizer.chat(read_prompt(record, "prompt", where))
        if "tokens" in record:
            answer = _ids(record["tokens"], vocab_size, where)
        else:
            answer = [*tokenizer.encode(text_field(record, "response", where)), tokenizer.stop_tokens[0]]
        check_ids([*prompt, *answer], vocab_size, where)
        if 0 < len(prompt) <= max_prompt_tokens:
            rows.append((prompt, answer[:max_new_tokens]))
        else:
            dropped += 1
    if not rows:
        raise ConfigError(f"{path}: holds no answer to a prompt of 1 .. {max_prompt_tokens} tokens")
    return Answers.pad([-1] * len(rows), rows, max_prompt_tokens + max_new_tokens), dropped


def worked_solutions(problems: Sequence[Problem], tokenizer: Tokenizer, length: int, vocab_size: int) -> Answers:
    """Return the problems with their solutions, each ended by a stop token and padded to `length` tokens.

    Raises ConfigError if a problem has no solution, does not fit, or has an id outside the policy's vocabulary.
    """
    pairs: list[tuple[list[int], list[int]]] = []
    for number, problem in enumerate(problems):
        if problem.solution is None:
            text = prompt_text(problem.prompt)[:60]
            raise ConfigError(f"warmup.steps: problem {number} has no solution to learn from: {text!r}")
        prompt = tokenizer.chat(problem.prompt)
        solution = [*tokenizer.encode(problem.solution), tokenizer.stop_tokens[0]]
        needed = len(prompt) + len(solution)
        if needed > length:
            raise ConfigError(
                f"data.max_prompt_tokens + rollout.max_new_tokens = {length}: must be at least {needed}, "
                f"the tokens of problem {number} with its solution"
            )
        check_ids([*prompt, *solution], vocab_size, f"problem {number} with its solution")
        pairs.append((prompt, solution))
    return Answers.pad(range(len(pairs)), pairs, length)


def _ids(value: Any, vocab_size: int, where: str) -> list[int]:
    good = isinstance(value, list) and value and all(type(x) is int and 0 <= x < vocab_size for x in value)
    if not good:
        raise ConfigError(f"{where}: field 'tokens' must be a list of token ids below {vocab_size}")
    return value
