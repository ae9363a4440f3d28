"""Answers to prompts as a draft learns from them: in memory as token ids, in a file as lines of JSON.

A line of a file is an object with

    prompt    text, the problem as it stands in the data; it is put to the model as the run's data section says.
    response  text, the answer.
    tokens    optional, the answer's token ids with the stop token where it has one; taken instead of the text, which
              does not tell of a stop token and need not tokenize as it was generated. Without, the response counts as
              ended by a stop token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.errors import ConfigError
from launch.data.batches import pad
from launch.data.json_lines import read_lines, text_field
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from specjax.train.batch import Sequences
from specjax.types import Prompts, Rollout


@dataclass(frozen=True)
class Answers:
    """A list of prompts with an answer each.

    ids:            int32 [N], the prompt's problem; -1 where it came from a file.
    tokens:         int32 [N, S], prompt and answer, left-aligned, zero behind.
    prompt_lengths: int32 [N]. lengths: int32 [N], of prompt and answer together.
    """

    ids: np.ndarray
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def completions(self) -> np.ndarray:
        """The tokens of all answers without their prompts, int32, one behind the other."""
        return self.tokens[self._completion(np.arange(len(self)))]

    def batch(self, picks: np.ndarray) -> Sequences:
        """The rows `picks`, int [B], to train a draft alone on; empty ones where a pick is below 0."""
        real = (picks >= 0)[:, None]
        tokens, completion = np.where(real, self.tokens[picks], 0), self._completion(picks) & real
        return Sequences(tokens, completion)  # pyright: ignore[reportArgumentType]

    def draw(self, count: int, seed: int, step: int) -> Sequences:
        """A batch of `count` different rows, at random by (seed, step)."""
        return self.batch(np.random.default_rng((seed, step)).choice(len(self), count, replace=False))

    def in_batches(self, count: int) -> Iterable[Sequences]:
        """All rows in their order, `count` a batch, the last filled up with empty ones."""
        for start in range(0, len(self), count):
            picks = np.arange(start, start + count)
            yield self.batch(np.where(picks < len(self), picks, -1))

    def _completion(self, picks: np.ndarray) -> np.ndarray:
        column = np.arange(self.tokens.shape[1])[None]
        return (column >= self.prompt_lengths[picks, None]) & (column < self.lengths[picks, None])


def answers_of(prompts: Prompts, rollout: Rollout) -> Answers:
    """Return the completions of a rollout with their prompts; filler, with ids below 0, is left out."""
    group = len(rollout.lengths) // len(prompts.lengths)
    ids = np.repeat(np.asarray(prompts.id), group)
    kept = ids >= 0
    before = np.repeat(np.asarray(prompts.tokens), group, axis=0)[kept]
    start = np.repeat(np.asarray(prompts.lengths), group)[kept]
    completion, lengths = np.asarray(rollout.tokens)[kept], np.asarray(rollout.lengths)[kept]
    tokens = np.pad(before, ((0, 0), (0, completion.shape[1])))
    for row, at, answer in zip(tokens, start, completion, strict=True):
        # Padding of a prompt is junk to the rows; what is behind an answer is zero.
        row[at:] = 0
        row[at : at + len(answer)] = answer
    return Answers(ids[kept], tokens, start, start + lengths)


def join_answers(parts: Sequence[Answers]) -> Answers:
    """All rows of all parts, which are padded alike."""
    return Answers(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Answers)))


def answer_records(answers: Answers, problems: Sequence[Problem], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield answers to some of `problems` as the objects that a file of answers holds."""
    for problem, row, start, end in zip(
        answers.ids, answers.tokens, answers.prompt_lengths, answers.lengths, strict=True
    ):
        ids = row[start:end].tolist()
        yield {"prompt": problems[problem].prompt, "response": tokenizer.decode(ids), "tokens": ids}


def load_answers(
    path: Path, tokenizer: Tokenizer, max_prompt_tokens: int, max_new_tokens: int, vocab_size: int
) -> tuple[Answers, int]:
    """The answers of a file, and how many were dropped since their prompts are empty or too long.

    Answers are cut at `max_new_tokens`. Raises ConfigError naming the file, and the line where there is one, for
    whatever it cannot use.
    """
    rows: list[tuple[list[int], list[int]]] = []
    dropped = 0
    for record, where in read_lines(path):
        prompt = tokenizer.chat(text_field(record, "prompt", where))
        if "tokens" in record:
            answer = _ids(record["tokens"], vocab_size, where)
        else:
            answer = [*tokenizer.encode(text_field(record, "response", where)), tokenizer.stop_tokens[0]]
        if 0 < len(prompt) <= max_prompt_tokens:
            rows.append((prompt, answer[:max_new_tokens]))
        else:
            dropped += 1
    if not rows:
        raise ConfigError(f"{path}: holds no answer to a prompt of 1 .. {max_prompt_tokens} tokens")
    tokens, lengths = pad([prompt + answer for prompt, answer in rows], max_prompt_tokens + max_new_tokens)
    starts = np.array([len(prompt) for prompt, _ in rows], np.int32)
    return Answers(np.full(len(rows), -1, np.int32), tokens, starts, lengths), dropped


def _ids(value: Any, vocab_size: int, where: str) -> list[int]:
    good = isinstance(value, list) and value and all(type(x) is int and 0 <= x < vocab_size for x in value)
    if not good:
        raise ConfigError(f"{where}: field 'tokens' must be a list of token ids below {vocab_size}")
    return value
