"""Advantages from rewards alone, without a critic: a baseline is subtracted, and the difference is scaled."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.options import Options

# Largest spread, relative to the largest of the rewards, that their rounding explains. A sum of a few terms in float32
# is off by some units of its last place, of which each is at most 2**-23 of the value.
SPREAD = 4 * 2.0**-23


@dataclass(frozen=True)
class AdvantageConfig(Options):
    """Baseline of a reward, and the scale of the difference.

    GRPO (arXiv 2402.03300, section 4.1.2) by default. All choices go together but baseline batch with scale group.

    Attributes:
        baseline: Mean of the group (GRPO), of its other members (RLOO, arXiv 2402.14740), or of the batch (REINFORCE++,
                  arXiv 2501.03262).
        scale:    Standard deviation of the group, of the batch (REINFORCE++), or none (RLOO; Dr. GRPO, arXiv
                  2503.20783).
    """

    baseline: Literal["group", "others", "batch"] = "group"
    scale: Literal["group", "batch", "none"] = "group"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline == "batch" and self.scale == "group":
            # A group of equal rewards can differ from the batch mean, but its own deviation of 0 cannot scale that.
            raise ValueError("scale = group: must be batch or none with baseline batch")


def group_advantages(
    reward: Float[Array, "R"], group_size: int, config: AdvantageConfig | None = None, eps: float = 1e-6
) -> Float[Array, "R"]:
    """Return (reward - baseline) / (standard deviation + eps). Groups are consecutive sequences.

    A sequence whose reward is not finite gets 0 and enters no statistics. If the rewards of a group are equal, or
    differ by no more than their rounding (`SPREAD`), the difference from its baseline is set to exactly 0: otherwise
    rounding, divided by a deviation of its own size, would look like an advantage. The same holds for a batch baseline.
    """
    config = AdvantageConfig() if config is None else config
    grouped = reward.reshape(-1, group_size)
    scored = jnp.isfinite(grouped)
    axis = None if "batch" in (config.baseline, config.scale) else 1
    unit = _unit(jnp.max(jnp.abs(grouped), axis=axis, keepdims=True, where=scored, initial=0.0))
    grouped = grouped / unit
    group = _Statistics.of(grouped, scored, axis=1)
    compared = _Statistics.of(grouped, scored, axis=None) if config.baseline == "batch" else group
    centred = compared.centre(grouped, scored)
    if config.baseline == "others":
        # r - (n mean - r) / (n - 1)
        centred *= group.count / jnp.maximum(group.count - 1, 1.0)
    if config.scale == "none":
        return (centred * unit).ravel()
    return (centred / (_Statistics.of(centred, scored, axis).deviation + _in_unit(eps, unit))).ravel()


def token_advantages(
    reward: Float[Array, "R"], cost: Float[Array, "R S"], completion: Bool[Array, "R S"], eps: float = 1e-6
) -> Float[Array, "R S"]:
    """Return (return - mean) / (standard deviation + eps) over all tokens of the batch (REINFORCE++, arXiv 2501.03262).

    The return of a token is the reward of its sequence less the cost of its tokens from this one on (equation 8).
    Sequences without a finite reward get 0 and enter no statistics.
    """
    scored = completion & jnp.isfinite(reward)[:, None]
    ahead = jnp.cumsum(jnp.where(scored, cost, 0.0)[:, ::-1], axis=1)[:, ::-1]
    returns = jnp.where(scored, reward[:, None] - ahead, 0.0)
    unit = _unit(jnp.max(jnp.abs(returns)))
    returns = returns / unit
    batch = _Statistics.of(returns, scored, axis=None)
    return batch.centre(returns, scored) / (batch.deviation + _in_unit(eps, unit))


def zero_variance(reward: Float[Array, "R"], group_size: int) -> Bool[Array, "N"]:
    """Return for each group whether its finite rewards are all equal, but for their rounding (`SPREAD`)."""
    grouped = reward.reshape(-1, group_size)
    return ~_Statistics.of(grouped, jnp.isfinite(grouped), axis=1).differs[:, 0]


def _unit(largest: Array) -> Array:
    """Return a power of 2 near the largest value, so that dividing by it rounds nothing.

    Its reciprocal must not be subnormal, which devices take for 0.
    """
    return jnp.ldexp(jnp.float32(1.0), jnp.clip(jnp.frexp(largest)[1], -126, 126))


def _in_unit(eps: float, unit: Array) -> Array:
    return jnp.maximum(eps / unit, jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class _Statistics:
    """Moments of the scored values along an axis, or of all of them: [N, 1] or [1, 1].

    They are computed relative to the lowest value, because a sum of values at a large offset rounds their differences
    away, and in a unit near the largest value, because a square overflows long before the value does.

    Attributes:
        count:     number of scored values, at least 1.
        unit:      of the largest value (`_unit`).
        lowest:    lowest value, in this unit.
        mean:      mean difference from the lowest value, in this unit.
        differs:   the spread of the values is more than their rounding.
        deviation: standard deviation.
    """

    count: Array
    unit: Array
    lowest: Array
    mean: Array
    differs: Array
    deviation: Array

    @classmethod
    def of(cls, values: Float[Array, "N G"], scored: Bool[Array, "N G"], axis: int | None) -> "_Statistics":
        count = jnp.maximum(jnp.sum(scored, axis=axis, keepdims=True, dtype=jnp.float32), 1.0)
        largest = jnp.max(jnp.abs(values), axis=axis, keepdims=True, where=scored, initial=0.0)
        unit = _unit(largest)
        values = jnp.where(scored, values / unit, 0.0)
        highest = jnp.max(values, axis=axis, keepdims=True, where=scored, initial=-jnp.inf)
        lowest = jnp.min(values, axis=axis, keepdims=True, where=scored, initial=jnp.inf)
        lowest, highest = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (lowest, highest))  # nothing is scored
        above = jnp.where(scored, values - lowest, 0.0)
        mean = jnp.sum(above, axis=axis, keepdims=True) / count
        variance = jnp.sum(jnp.where(scored, (above - mean) ** 2, 0.0), axis=axis, keepdims=True) / count
        differs = highest - lowest > SPREAD * largest / unit
        return cls(count, unit, lowest, mean, differs, jnp.sqrt(variance) * unit)

    def centre(self, values: Float[Array, "N G"], scored: Bool[Array, "N G"]) -> Float[Array, "N G"]:
        """Return the differences from the mean; 0 for values that are not scored, and where none differ."""
        above = values / self.unit - self.lowest
        return jnp.where(scored & self.differs, above - self.mean, 0.0) * self.unit
