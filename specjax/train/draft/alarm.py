"""The acceptance alarm: is a draft accepted as often as its training predicts?

The training forward knows the probability that position 1 of a draft is accepted: sum_v min(p, q) of the laws at that
token. Over the tokens at position 1, the number accepted differs from the sum of these probabilities only by sampling
noise, whatever the draft, the policy and the text. A larger difference is a fault in decoding. (The mean over all
tokens would be biased: a round that accepts little is soon followed by another one at the same difficult place.)
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.train.draft.loss import DraftSums

# The alarm is raised when the acceptance at position 1 is below the expected one by more than ALARM_MARGIN plus
# DEVIATIONS standard deviations of the sampling noise, in ALARM_PATIENCE steps in a row.
ALARM_MARGIN, DEVIATIONS, ALARM_PATIENCE = 0.1, 2.0, 3


def check_acceptance(short: Int[Array, ""], sums: DraftSums) -> tuple[Int[Array, ""], dict[str, Array]]:
    """Return the number of steps in a row that accepted too little, and metrics. short: the number before this step."""
    promised, measured = sums.expected / sums.drafted, sums.accepted / sums.drafted
    fell = promised - measured > ALARM_MARGIN + DEVIATIONS * noise(promised, sums.drafted)
    # A step that compared nothing leaves the number unchanged.
    short = jnp.where(sums.drafted > 0, jnp.where(fell, short + 1, 0), short)
    return short, {
        "draft/promised_acceptance": promised,
        "draft/measured_acceptance": measured,
        "draft/alarm": (short >= ALARM_PATIENCE).astype(jnp.int32),
    }


def noise(mean: Array, drafted: Array) -> Array:
    """Return the standard deviation of the acceptance rate over `drafted` tokens whose expected rate is `mean`."""
    return jnp.sqrt(jnp.maximum(mean * (1 - mean), 0.0) / drafted)
