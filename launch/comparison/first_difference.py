"""Comparison of the tokens of two runs: where they first differ."""

from dataclasses import dataclass

import numpy as np

from specjax.types import Rollout


@dataclass(frozen=True)
class FirstDifference:
    """The first token of the first sequence that differs.

    Attributes:
        step:     training step, from 1.
        prompt:   id of the prompt.
        sample:   sample of that prompt, from 0.
        position: place in the completion, from 0.
        plain:    autoregressive token there; None if that completion has ended.
        other:    the other variant's token there; None if that completion has ended.
    """

    step: int
    prompt: int
    sample: int
    position: int
    plain: int | None
    other: int | None

    def __str__(self) -> str:
        plain, other = ("the end" if token is None else f"token {token}" for token in (self.plain, self.other))
        return (
            f"first difference in step {self.step}, prompt {self.prompt}, sample {self.sample}, "
            f"position {self.position}: {plain} autoregressively, {other} here"
        )


def first_difference(step: int, ids: np.ndarray, plain: Rollout, other: Rollout) -> FirstDifference | None:
    """Compare two rollouts of the same prompts, whose ids are given; return None if all tokens are the same."""
    lengths = np.asarray(plain.lengths), np.asarray(other.lengths)
    tokens = [
        np.where(np.arange(rollout.tokens.shape[1])[None] < ends[:, None], np.asarray(rollout.tokens), -1)
        for rollout, ends in zip((plain, other), lengths, strict=True)
    ]
    unequal = np.argwhere(tokens[0] != tokens[1])
    if not len(unequal):
        return None
    row, position = unequal[0].tolist()
    prompt, sample = divmod(row, len(lengths[0]) // len(ids))
    here = [None if token < 0 else token for token in (int(found[row, position]) for found in tokens)]
    return FirstDifference(step, int(ids[prompt]), sample, position, *here)
