"""Rotary position embedding (arXiv 2104.09864) and the ways to stretch it to longer contexts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import kernels


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): positions divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _above_zero(self, "factor")


@dataclass(frozen=True)
class Llama3Scaling:
    """The rope scaling of Llama 3.1 and later: wavelengths beyond the original context are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _above_zero(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): of wavelengths by how often they turn within the original context, and of attention.

    factor:           by which wavelengths that turn less than `beta_slow` times are stretched.
    beta_fast:        wavelengths that turn more often are kept; those between are blended.
    attention_factor: of queries and keys both; None for 0.1 ln(factor) + 1 (section 3.4), or where mscale and
                      mscale_all_dim are given, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
    truncate:         round the bounds of the blend outwards, to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _above_zero(self, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast}: must be at least beta_slow = {self.beta_slow}")

    @property
    def magnitude(self) -> float:
        """Return the factor that queries and keys are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._growth(1.0)
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    def _growth(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def scaling_from_json(found: Mapping[str, Any] | None) -> RopeScaling | None:
    """The scaling whose `dataclasses.asdict` JSON has carried; its fields tell which. Raises ValueError for others."""
    if found is None:
        return None
    for kind in (LinearScaling, Llama3Scaling, YarnScaling):
        if found.keys() == {field.name for field in fields(kind)}:
            return kind(**found)
    raise ValueError(f"rope_scaling: no kind of scaling has the fields {', '.join(sorted(found))}")


def frequencies(half: int, theta: float, scaling: RopeScaling | None) -> Float[np.ndarray, "h"]:
    """Return the radians by which each of the `half` pairs of dimensions turns per position, float32."""
    plain = 1.0 / theta ** (np.arange(half, dtype=np.float32) / half)
    match scaling:
        case None:
            return plain
        case LinearScaling():
            return plain / scaling.factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling():
            return _yarn(plain, theta, scaling)


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, times YaRN's factor: float32 [B, T, 1, head_dim / 2]."""

    cos: Float[Array, "B T 1 h"]
    sin: Float[Array, "B T 1 h"]

    def at(self, index: Int[Array, "B"]) -> "Rotation":
        """That of token `index` of each row alone."""
        return Rotation(*(jnp.take_along_axis(x, index[:, None, None, None], axis=1) for x in self))


def rotation(positions: Int[Array, "B T"], size: int, theta: float, scaling: RopeScaling | None) -> Rotation:
    """The rotary embedding of heads of `size` dimensions at these positions, angles in float32."""
    frequency = frequencies(size // 2, theta, scaling)
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = kernels.computed_once(jnp.cos(angle)), kernels.computed_once(jnp.sin(angle))
    if isinstance(scaling, YarnScaling):
        cos, sin = scaling.magnitude * cos, scaling.magnitude * sin
    return Rotation(cos, sin)


def rope(x: Float[Array, "B T H d"], turn: Rotation) -> Float[Array, "B T H d"]:
    """Queries or keys, turned in the half-split layout; computed in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin], axis=-1).astype(x.dtype)


def _llama3(frequency: Float[np.ndarray, "h"], s: Llama3Scaling) -> Float[np.ndarray, "h"]:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend in frequency between (Llama 3.1)."""
    turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
    blend = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return (1 - blend) * frequency / s.factor + blend * frequency


def _yarn(frequency: Float[np.ndarray, "h"], theta: float, s: YarnScaling) -> Float[np.ndarray, "h"]:
    """The blend of section 3.2, linear in the dimension as the published code has it, and not in the turns."""
    half = len(frequency)

    def dimension(turns: float) -> float:
        return half * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 1e-3  # no singularity
    stretched = np.clip((np.arange(half, dtype=np.float32) - low) / width, 0.0, 1.0)
    return frequency / s.factor * stretched + frequency * (1 - stretched)


def _above_zero(scaling: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(scaling, name) < math.inf:
            raise ValueError(f"{name} = {getattr(scaling, name)}: must be above 0 and finite")
