"""Rotary position embedding (arXiv 2104.09864) and its scalings to longer contexts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import kernels
from specjax.cache import tokens_at
from specjax.options import Factor, Options, Positive, show


@dataclass(frozen=True)
class LinearScaling(Options):
    """Position interpolation (arXiv 2306.15595): divide positions by `factor`."""

    factor: Factor


@dataclass(frozen=True)
class Llama3Scaling(Options):
    """Rope scaling of Llama 3.1 and later. Long wavelengths are stretched, short ones kept, those between blended.

    Attributes:
        factor: Factor by which long wavelengths are stretched.
        low_freq_factor: Wavelengths with at most this many turns in the original context are long.
        high_freq_factor: Wavelengths with at least this many turns in the original context are short.
        original_max_position_embeddings: Length of the original context.
    """

    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class YarnScaling(Options):
    """YaRN (arXiv 2309.00071): stretch long wavelengths, and scale queries and keys.

    Attributes:
        factor: Factor by which wavelengths with fewer than `beta_slow` turns are stretched.
        original_max_position_embeddings: Length of the original context, within which turns are counted.
        beta_fast: Wavelengths with more turns are kept. Those between `beta_slow` and `beta_fast` are blended.
        beta_slow: See `factor`.
        attention_factor: Factor of both queries and keys. None for 0.1 ln(factor) + 1 (section 3.4) or, with mscale and
            mscale_all_dim, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
        mscale: See `attention_factor`.
        mscale_all_dim: See `attention_factor`.
        truncate: Whether to round the bounds of the blend outwards, to whole dimensions.
    """

    factor: Factor
    original_max_position_embeddings: Positive
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    attention_factor: Factor | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
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


def scaling_from_json(scaling: Mapping[str, Any] | None) -> RopeScaling | None:
    """Return the scaling saved as JSON of its `dataclasses.asdict`. Raises ValueError if no kind has these fields."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling = {show(scaling)}: must be an object or null")
    for kind in (LinearScaling, Llama3Scaling, YarnScaling):
        if scaling.keys() == {field.name for field in fields(kind)}:
            return kind(**scaling)
    raise ValueError(
        f"rope_scaling: no supported kind of scaling has exactly the fields {show(', '.join(sorted(scaling)))}"
    )


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

    def at(self, index: Int[Array, "B N"]) -> "Rotation":
        """Return the rotation of the tokens `index` of each row."""
        return Rotation(*(tokens_at(x, index) for x in self))


def rotation(positions: Int[Array, "B T"], size: int, theta: float, scaling: RopeScaling | None) -> Rotation:
    """Return the rotation of heads of `size` dimensions at these positions, with angles in float32."""
    frequency = frequencies(size // 2, theta, scaling)
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = kernels.computed_once(jnp.cos(angle)), kernels.computed_once(jnp.sin(angle))
    if isinstance(scaling, YarnScaling):
        cos, sin = scaling.magnitude * cos, scaling.magnitude * sin
    return Rotation(cos, sin)


def rope(x: Float[Array, "B T H d"], turn: Rotation) -> Float[Array, "B T H d"]:
    """Rotate queries or keys in the half-split layout. Computes in float32, returns the dtype of `x`."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin], axis=-1).astype(x.dtype)


def _llama3(frequency: Float[np.ndarray, "h"], s: Llama3Scaling) -> Float[np.ndarray, "h"]:
    """Divide low frequencies by `factor`, keep high ones, blend linearly in frequency between (Llama 3.1)."""
    turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
    blend = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return (1 - blend) * frequency / s.factor + blend * frequency


def _yarn(frequency: Float[np.ndarray, "h"], theta: float, s: YarnScaling) -> Float[np.ndarray, "h"]:
    """Blend as in section 3.2, but linearly in the dimension, like the published code, not in the turns."""
    half = len(frequency)

    def dimension(turns: float) -> float:
        return half * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 1e-3  # avoid division by zero
    stretched = np.clip((np.arange(half, dtype=np.float32) - low) / width, 0.0, 1.0)
    return frequency / s.factor * stretched + frequency * (1 - stretched)
