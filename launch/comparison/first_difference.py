"""First token in which two rollouts of the same prompts differ."""

from dataclasses import dataclass

import numpy as np

from specjax.parallel import processes
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
            f"position {self.position}: {plain} in the autoregressive run, {other} in this one"
        )


def first_difference(step: int, ids: np.ndarray, plain: Rollout, other: Rollout) -> FirstDifference | None:
    """Return the first difference between two rollouts of the same prompts, or None if all tokens are the same.

    step: training step, from 1. ids: int [prompts], ids of the prompts.
    """
    lengths = processes.fetch((plain.lengths, other.lengths))
    # Positions after the end hold -1, so that a shorter completion differs too.
    tokens = [
        np.where(np.arange(rollout.tokens.shape[1])[None] < row_lengths[:, None], processes.fetch(rollout.tokens), -1)
        for rollout, row_lengths in zip((plain, other), lengths, strict=True)
    ]
    unequal = np.argwhere(tokens[0] != tokens[1])
    if not len(unequal):
        return None
    row, position = unequal[0].tolist()
    prompt, sample = divmod(row, len(lengths[0]) // len(ids))
    differing = [int(rollout_tokens[row, position]) for rollout_tokens in tokens]
    plain_token, other_token = (None if token < 0 else token for token in differing)
    return FirstDifference(step, int(ids[prompt]), sample, position, plain_token, other_token)
