"""The policy's forward over its answers, computed once and kept on the host, in batches of similar length."""

import tempfile
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from launch.cli.unfinished import Unfinished
from launch.data.responses import Answers
from specjax.parallel.memory import host_memory
from specjax.train.batch import Sequences
from specjax.train.distill import PolicyReads, make_read
from specjax.types import Policy, PyTree

# Share of the host's memory that is used before a file is.
MOST_OF_MEMORY = 0.25
# Rows are padded to one of this many widths, each of which compiles its own programs.
WIDTHS = 4
# Batches whose rows are sorted by length together; over more, a step would see only answers of its length.
SORTED_TOGETHER = 16


class KeptReads:
    """Parts of the policy's forward that the draft's loss reads, of every answer, in the compute dtype.

    They are kept in memory, or in files of the temporary directory (TMPDIR) once they exceed a quarter of it.

    weights:    the policy's parameters.
    rows:       answers per batch.
    unfinished: shows the progress.
    """

    def __init__(self, policy: Policy, mesh: Mesh, weights: PyTree, rows: int, unfinished: Unfinished) -> None:
        self._read = make_read(policy, mesh)
        self._weights, self._unfinished = weights, unfinished
        self._rows, self._dtype = rows, policy.dtype
        self._kept: list[np.ndarray] = []
        self._widths: list[int] = []
        self._features = self._bytes = 0

    def extend(self, answers: Answers) -> None:
        """Run the policy over the answers that are not kept yet: those after the first ones, which are. Shows progress.

        Raises Stopped at a signal.
        """
        new = np.arange(len(self._kept), len(answers))
        if not len(new):
            return
        if not self._widths:
            self._widths = widths(answers.lengths, answers.tokens.shape[1])
        self._kept += [np.zeros(0)] * len(new)
        by_length = new[np.argsort(answers.lengths[new], kind="stable")]
        parts = [by_length[start : start + self._rows] for start in range(0, len(new), self._rows)]
        with self._unfinished.phase("features", len(parts), "batches", kept=False) as phase:
            for part in parts:
                picks = np.pad(part, (0, self._rows - len(part)), constant_values=-1)
                reads = self._read(self._weights, self._cut(answers, picks))
                self._keep(part, answers.lengths[part], reads)
                phase.finish(tokens=int(answers.lengths[part].sum()))

    def batch(self, answers: Answers, picks: np.ndarray) -> tuple[Sequences, PolicyReads]:
        """Return the rows `picks`, int [B], padded to the smallest width that holds them, with their reads."""
        sequences = self._cut(answers, picks)
        rows = np.zeros((*sequences.tokens.shape, self._kept[picks[0]].shape[1]), self._dtype)
        for row, pick in zip(rows, picks, strict=True):
            row[: len(self._kept[pick])] = self._kept[pick]
        return sequences, PolicyReads(rows[..., : self._features], rows[..., self._features :])  # pyright: ignore[reportArgumentType]

    def _cut(self, answers: Answers, picks: np.ndarray) -> Sequences:
        longest = answers.lengths[picks[picks >= 0]].max()
        width = next(width for width in self._widths if width >= longest)
        whole = answers.batch(picks)
        return Sequences(whole.tokens[:, :width], whole.completion[:, :width])

    def _keep(self, rows: np.ndarray, lengths: np.ndarray, reads: PolicyReads) -> None:
        features, hidden = np.asarray(reads.features), np.asarray(reads.hidden)
        self._features = features.shape[-1]
        shape = int(lengths.sum()), features.shape[-1] + hidden.shape[-1]
        self._bytes += shape[0] * shape[1] * self._dtype.itemsize
        if self._bytes > host_memory() * MOST_OF_MEMORY:
            with tempfile.TemporaryFile() as file:  # it lives as long as the array
                kept = np.memmap(file, self._dtype, "w+", shape=shape)
        else:
            kept = np.empty(shape, self._dtype)
        ends = np.cumsum(lengths)
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            length = lengths[i]
            into = kept[end - length : end]
            into[:, : self._features], into[:, self._features :] = features[i, :length], hidden[i, :length]
            self._kept[row] = into


def widths(lengths: np.ndarray, longest: int) -> list[int]:
    """Return the widths that rows of these lengths are padded to, ascending: their quantiles, in multiples of 8.

    longest: length of the longest row that there may ever be, the last width.
    """
    quantiles = np.quantile(lengths, np.arange(1, WIDTHS + 1) / WIDTHS, method="higher")
    return sorted({min(-(-int(width) // 8) * 8, longest) for width in quantiles} | {longest})


def picks_of_step(lengths: np.ndarray, rows: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of a step, int [rows], of similar length. (seed, step) determines them.

    Each pass takes all rows in another random order, but for the last that fill no batch.
    """
    batches = len(lengths) // rows
    number, index = divmod(step, batches)
    generator = np.random.default_rng((seed, number))
    order = generator.permutation(len(lengths))[: batches * rows]
    order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in _parts(order, rows)])
    return order.reshape(batches, rows)[generator.permutation(batches)[index]]


def _parts(order: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    size = rows * SORTED_TOGETHER
    return (order[start : start + size] for start in range(0, len(order), size))
