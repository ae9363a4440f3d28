"""Acceptance as training predicts it, from a teacher-forced forward over the generated sequences."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jaxtyping import Array

from specjax.drafters import Drafter
from specjax.log_probs import teacher_forced
from specjax.parallel import processes
from specjax.sampling import SamplingLaw
from specjax.train.batch import Sequences
from specjax.types import Params, Policy


def is_predicted(drafter: Drafter) -> bool:
    """Return True if the drafter has a loss of its own, which predicts acceptance. (The default loss returns zeros.)"""
    return getattr(type(drafter), "loss", None) is not Drafter.loss


def make_overlaps(
    policy: Policy, drafter: Drafter, law: SamplingLaw, positions: int, logit_chunk: int | None
) -> Callable[[Params, Sequences], np.ndarray]:
    """Return (params, sequences) -> float32 [N, R, T]: the predicted acceptance of each token at position 1 .. N.

    N is at most `positions`, as far as `Drafter.overlaps` goes. To save memory, rows run one by
    one, and logits are computed for some positions at a time (`logit_chunk`, as in `TrainConfig`).
    """

    def of_row(params: Params, row: tuple[Array, Array]) -> Array:
        tokens, completion = (x[None] for x in row)
        output = teacher_forced(policy, params.policy, tokens, logit_chunk)
        return drafter.overlaps(params, tokens, output, completion, law, positions)[:, 0]

    run = jax.jit(lambda params, *rows: jax.lax.map(partial(of_row, params), rows))

    def overlaps(params: Params, sequences: Sequences) -> np.ndarray:
        return processes.fetch(run(params, sequences.tokens, sequences.completion)).swapaxes(0, 1)

    return overlaps
