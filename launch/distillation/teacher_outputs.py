"""The teacher's outputs for all answers, computed once and kept on the host, and batches of rows of similar length.

The draft's loss needs the policy's features and hidden states, but these do not change while the draft is distilled.
"""

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from launch.data.responses import Answers
from launch.phases.long_phases import long_phase
from specjax.parallel import processes
from specjax.parallel.memory import host_memory
from specjax.train.batch import Sequences
from specjax.train.draft.anchors import spaced_anchors
from specjax.train.draft.distill import DistillBatch, TeacherOutputs, make_teacher
from specjax.types import Policy, PyTree
from specjax.writing import writing

# Fraction of the host's memory to use before arrays go to files.
MOST_OF_MEMORY = 0.25
# Rows are padded to one of these fractions (WIDTHS) of the longest possible row, and answer tokens to one of these
# fractions (COUNTS) of the longest possible answer. Each pair of both compiles its own program.
WIDTHS, COUNTS = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1), (1 / 2, 3 / 4, 1)
# Number of batches whose rows are sorted by length together. With more, lengths would vary too little in a step.
SORTED_TOGETHER = 16


class TeacherOutputCache:
    """Features and hidden states of the policy for every answer, in the compute dtype, as the draft's loss needs them.

    They are in memory. Above a quarter of the host's memory, they go to files in TMPDIR.

    weights:      the policy's parameters.
    rows:         number of answers per batch.
    budget:       largest number of tokens of an answer.
    microbatches: number of parts of a batch that run one after the other, to save memory.
    ladder:       lengths that rows are padded to; longer rows to WIDTHS. If it has the longest possible row, answers
                  are padded to the longest one too.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        weights: PyTree,
        rows: int,
        budget: int,
        microbatches: int = 1,
        ladder: tuple[int, ...] = (),
    ) -> None:
        self._teacher, self._weights = make_teacher(policy, mesh, microbatches), weights
        self._rows, self._budget, self._dtype = rows, budget, policy.dtype
        self._ladder = ladder
        # Of each answer: float [length, features and hidden].
        self._outputs: list[np.ndarray] = []
        self._features = self._bytes = 0

    def extend(self, answers: Answers) -> None:
        """Run the policy over the answers that are new since the last call. Shows progress.

        The answers of earlier calls must come first. Raises Stopped at a signal.
        """
        new = np.arange(len(self._outputs), len(answers))
        if not len(new):
            return
        self._outputs += [np.zeros(0)] * len(new)
        by_length = new[np.argsort(answers.lengths[new], kind="stable")]
        parts = [by_length[start : start + self._rows] for start in range(0, len(new), self._rows)]
        padded = [np.pad(part, (0, self._rows - len(part)), constant_values=-1) for part in parts]
        # Parts are sorted by length, so the first of each width are in the order in which they are needed.
        for picks in {self._width(answers, picks): picks for picks in reversed(padded)}.values():
            self._teacher.start_compiling(self._weights, self._cut(answers, picks))
        with long_phase("features", len(parts), "batches", kept=False) as phase:
            for part, picks in zip(parts, padded, strict=True):
                self._store(part, answers.lengths[part], self._teacher(self._weights, self._cut(answers, picks)))
                phase.finish(tokens=int(answers.lengths[part].sum()), program=self._width(answers, picks))

    def batch(self, answers: Answers, picks: np.ndarray, stride: int = 1, number: int = 0) -> DistillBatch:
        """Return the rows `picks`, int [B], cut to the smallest width that fits, with anchors for pass `number`."""
        sequences = self._cut(answers, picks)
        rows = np.zeros((*sequences.tokens.shape, self._outputs[picks[0]].shape[1]), self._dtype)
        for row, pick in zip(rows, picks, strict=True):
            row[: len(self._outputs[pick])] = self._outputs[pick]
        completion, (_, count) = processes.fetch(sequences.completion), self.sizes(answers, picks)
        teacher = TeacherOutputs(rows[..., : self._features], rows[..., self._features :])  # pyright: ignore[reportArgumentType]
        return DistillBatch(sequences, teacher, spaced_anchors(completion, count, stride, picks + number))

    def sizes(self, answers: Answers, picks: np.ndarray) -> tuple[int, int]:
        """Return the width of the rows and the answer tokens of each, padded, that `batch` cuts the rows to."""
        fractions = (1,) if self._ladder and self._ladder[-1] >= answers.tokens.shape[1] else COUNTS
        longest = (answers.lengths - answers.prompt_lengths)[picks].max()
        return self._width(answers, picks), fitting(longest, self._budget, fractions)

    def _width(self, answers: Answers, picks: np.ndarray) -> int:
        longest, most = answers.lengths[picks[picks >= 0]].max(), answers.tokens.shape[1]
        buckets = [min(bucket, most) for bucket in self._ladder if bucket >= longest]
        return buckets[0] if buckets else fitting(longest, most, WIDTHS)

    def _cut(self, answers: Answers, picks: np.ndarray) -> Sequences:
        padded, width = answers.batch(picks), self._width(answers, picks)
        return Sequences(padded.tokens[:, :width], padded.completion[:, :width])

    def _store(self, rows: np.ndarray, lengths: np.ndarray, outputs: TeacherOutputs) -> None:
        features, hidden = processes.fetch((outputs.features, outputs.hidden))
        self._features = features.shape[-1]
        shape = int(lengths.sum()), features.shape[-1] + hidden.shape[-1]
        self._bytes += shape[0] * shape[1] * self._dtype.itemsize
        in_memory = self._bytes <= host_memory() * MOST_OF_MEMORY
        array = np.empty(shape, self._dtype) if in_memory else _in_file(shape, self._dtype)
        for i, (row, part) in enumerate(zip(rows, np.split(array, np.cumsum(lengths)[:-1]), strict=True)):
            part[:, : self._features], part[:, self._features :] = features[i, : len(part)], hidden[i, : len(part)]
            self._outputs[row] = part


def _in_file(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Return an array in an unnamed file, which exists as long as the array. Raises OSError if the disk is full."""
    with writing(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
        if sys.platform == "linux":  # reserve the space now: a full disk would kill the process at a later write
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * dtype.itemsize)
        return np.memmap(file, dtype, "w+", shape=shape)


def fitting(tokens: int, most: int, fractions: Sequence[float]) -> int:
    """Return the smallest size that holds `tokens`. Sizes are `fractions` of `most`, rounded up to multiples of 8.

    fractions: ascending, the last one 1.
    """
    sizes = (min(-(-math.ceil(fraction * most) // 8) * 8, most) for fraction in fractions)
    return next(size for size in sizes if size >= tokens)


def picks_of_step(lengths: np.ndarray, rows: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of a step, int [rows], which have similar lengths. (seed, step) determines them.

    A pass uses all rows once in random order, except those left over that do not fill a batch. If rows are added, the
    current pass ends early.
    """
    batches = len(lengths) // rows
    number, index = divmod(step, batches)
    generator = np.random.default_rng((seed, number))
    order = generator.permutation(len(lengths))[: batches * rows]
    parts = np.split(order, range(rows * SORTED_TOGETHER, len(order), rows * SORTED_TOGETHER))
    order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
    return order.reshape(batches, rows)[generator.permutation(batches)[index]]
