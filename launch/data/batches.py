"""Padded batches of prompts as token ids.

The id of a prompt is the index of its problem. Filler rows, which only complete a batch, have negative ids.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np
from jax.sharding import Mesh

from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError
from specjax.options import MOST
from specjax.parallel.mesh import batch_shards
from specjax.short_repr import short_repr
from specjax.types import Hints, Prompts

# Rows are padded to a multiple of it.
ROUNDED_TO = 16


@dataclass(frozen=True)
class PromptTable:
    """The usable prompts of a list of problems, as token ids. A prompt is usable if it has 1 .. max_length tokens.

    Attributes:
        rows:       the usable prompts, unpadded.
        ids:        int32 [rows], index of each prompt's problem in the list.
        max_length: the most tokens of a usable prompt.
        width:      tokens to which batches pad their rows: the longest one's, rounded up, at most max_length.
        dropped:    number of problems whose prompt is empty or too long.
        too_long:   tokens of each prompt that is too long, ascending.
        hints:      worked solution of each usable prompt, unpadded; None: prompts have none.
    """

    rows: tuple[list[int], ...]
    ids: np.ndarray
    max_length: int
    width: int
    dropped: int
    too_long: tuple[int, ...] = ()
    hints: tuple[list[int], ...] | None = None

    __repr__ = short_repr

    @classmethod
    def build(
        cls,
        problems: Sequence[Problem],
        tokenizer: Tokenizer,
        max_length: int,
        vocab_size: int,
        *,
        with_hints: bool = False,
    ) -> "PromptTable":
        """Encode each problem's prompt, and its worked solution as a hint.

        Raises ConfigError if an id is not below `vocab_size`, the size of the policy's vocabulary, and for a problem
        without a solution that needs one.
        """
        prompts = [tokenizer.chat(problem.prompt) for problem in problems]
        for number, prompt in enumerate(prompts):
            check_ids(prompt, vocab_size, f"the prompt of problem {number}")
        ids = [i for i, prompt in enumerate(prompts) if 0 < len(prompt) <= max_length]
        longest = max((len(prompts[i]) for i in ids), default=max_length)
        hints = tuple(_hint(problems[i], i, tokenizer, vocab_size) for i in ids) if with_hints else None
        return cls(
            rows=tuple(prompts[i] for i in ids),
            ids=np.array(ids, np.int32),
            max_length=max_length,
            width=padded_length(longest, max_length),
            dropped=len(prompts) - len(ids),
            too_long=tuple(sorted(len(prompt) for prompt in prompts if len(prompt) > max_length)),
            hints=hints,
        )

    def check_max_length(self) -> None:
        """Raise ConfigError if all prompts that are not empty are too long."""
        if not self.rows and self.too_long:
            count, shortest, longest = len(self.too_long), self.too_long[0], self.too_long[-1]
            kind = "prompts" if count == self.dropped else "non-empty prompts"
            keeping_all = f", or {longest} to keep all" if longest > shortest else ""
            raise ConfigError(
                f"data.max_prompt_tokens = {self.max_length}: all {count} {kind} are longer, the shortest has "
                f"{shortest} tokens; must be at least {shortest}{keeping_all}"
            )

    def first(self, count: int) -> "PromptTable":
        """Return the table of the first `count` usable prompts, without hints."""
        return replace(self, rows=self.rows[:count], ids=self.ids[:count], hints=None)

    @property
    def hint_width(self) -> int:
        """Tokens to which batches pad their hints; 0 without hints."""
        return padded_length(max(map(len, self.hints)), MOST) if self.hints else 0

    def batch(self, picks: np.ndarray) -> Prompts:
        """Return the rows `picks`, int [N], as numpy arrays: tokens [N, width], padded with 0, lengths and ids."""
        tokens, lengths = pad([self.rows[pick] for pick in picks], self.width)
        hints = None
        if self.hints is not None:
            hints = Hints(*pad([self.hints[pick] for pick in picks], self.hint_width))  # pyright: ignore[reportArgumentType]
        return Prompts(tokens=tokens, lengths=lengths, id=self.ids[picks], hints=hints)  # pyright: ignore[reportArgumentType]


class PromptPipeline(Iterator[Prompts]):
    """Endless batches of prompts, or as many prompts as are asked for; each prompt once in an epoch.

    picks: batches of indices into the table. `size`: prompts in each.
    """

    def __init__(self, table: PromptTable, picks: grain.DatasetIterator[np.ndarray], size: int) -> None:
        self._table, self._picks, self._size = table, picks, size
        self._left: list[int] = []

    def __next__(self) -> Prompts:
        return self.take(self._size)

    def take(self, count: int, used: Collection[int] = ()) -> Prompts:
        """Return the next `count` prompts, at most a batch. Prompts with ids in `used` stay for a later call."""
        picks_by_id: dict[int, int] = {}
        while True:
            left, self._left = self._left, []
            for pick in left:
                number = int(self._table.ids[pick])
                if len(picks_by_id) == count or number in used or number in picks_by_id:
                    self._left.append(pick)
                else:
                    picks_by_id[number] = pick
            if len(picks_by_id) == count:
                return self._table.batch(np.array([*picks_by_id.values()], np.int64))
            self._left += next(self._picks).tolist()

    def get_state(self) -> dict[str, Any]:
        """Return the position, JSON-serialisable."""
        left = {"left": [*self._left]} if self._left else {}
        return self._picks.get_state() | left

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position."""
        self._left = [*state.get("left", ())]
        self._picks.set_state({name: value for name, value in state.items() if name != "left"})


def prompt_pipeline(table: PromptTable, batch_size: int, seed: int) -> PromptPipeline:
    """Return endless batches of `batch_size` prompts, shuffled in every epoch. `seed` determines the order.

    An epoch drops the prompts that do not fill a batch. So an id occurs at most once in a batch and in an epoch.
    Raises ConfigError if the table holds fewer than `batch_size` prompts, or if `seed` is out of range.
    """
    table.check_max_length()
    if not 0 < batch_size <= len(table.rows):
        raise ConfigError(
            f"data.prompts = {batch_size}: must be between 1 and {len(table.rows)}, the usable prompts "
            f"({table.dropped} empty or over {table.max_length} tokens)"
        )
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed = {seed}: must be between 0 and {2**32 - 1}")
    picks = grain.MapDataset.range(len(table.rows)).shuffle(seed).batch(batch_size, drop_remainder=True).repeat()
    # No threads: padding takes microseconds, and prefetching would make the position inexact.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return PromptPipeline(table, iter(picks.to_iter_dataset(options)), batch_size)


def prompts_per_batch(sequences: int, samples: int, prompts: int, mesh: Mesh) -> int:
    """Return the number of prompts in a batch of about `sequences` sequences: a multiple of the data shards.

    sequences: desired batch size. samples: completions per prompt. prompts: number of available prompts.
    """
    shards = batch_shards(mesh)
    return -(-min(max(sequences // samples, 1), prompts) // shards) * shards


def fixed_batches(table: PromptTable, batch_size: int) -> list[Prompts]:
    """Return all prompts of the table in order, `batch_size` per batch.

    Filler rows complete the last batch: copies of the first prompts, with ids -1, -2, .. Count only rows with
    `id >= 0`. Raises ConfigError if the table is empty.
    """
    table.check_max_length()
    if not table.rows:
        raise ConfigError(
            f"data.max_prompt_tokens = {table.max_length}: all {table.dropped} prompts are empty or too long"
        )
    batches = []
    for start in range(0, len(table.rows), batch_size):
        picks = np.arange(start, start + batch_size)
        filler = picks - len(table.rows)  # 0, 1, .. at filler rows
        batch = table.batch(picks % len(table.rows))
        batches.append(replace(batch, id=np.where(filler < 0, batch.id, -1 - filler).astype(np.int32)))
    return batches


def _hint(problem: Problem, number: int, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the worked solution of a problem as token ids."""
    if problem.solution is None:
        raise ConfigError(
            f"teacher.hint = solution: problem {number} has no worked solution; must be group, or data.solution_field "
            "a field that has them"
        )
    ids = tokenizer.encode(problem.solution)
    check_ids(ids, vocab_size, f"the solution of problem {number}")
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, owner: str) -> None:
    """Raise ConfigError for an id outside the policy's vocabulary: jax would silently use another embedding.

    owner: what the ids are of, for the message.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ConfigError(
            f"{owner} has token id {wrong}: must be within 0 .. {vocab_size - 1}, the policy's vocabulary"
        )


def padded_length(longest: int, most: int) -> int:
    """Return the tokens to which rows are padded, of which the longest has `longest`: rounded up, at most `most`."""
    return min(-(-longest // ROUNDED_TO) * ROUNDED_TO, most)


def pad(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, padded with 0, as int32 [rows, length], and their lengths, int32 [rows]."""
    tokens = np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)
