"""The sampling law: drafting, verification and plain sampling all use the distribution defined here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import kernels
from specjax.options import Fraction, Options, Positive, at_least, at_most, zero_or_at_least
from specjax.parallel.mesh import constrain

# Logits are divided by it: below the bound float32 overflows.
Temperature = Annotated[float, zero_or_at_least(1e-4), at_most(10_000)]


@dataclass(frozen=True)
class SamplingLaw(Options):
    """Sampling distribution: temperature, then top-k, then top-p, then min-p, applied to the logits.

    To add a cut, add a field here, whose default cuts nothing, and the cut in `process_logits`. All other code reads
    `truncates` and `without_cuts`; proofs take the law from `process_logits`.

    Attributes:
        temperature: Temperature; 0 is greedy.
        top_k:       Keep the k most likely tokens, with ties. None: all.
        top_p:       Keep the fewest most likely tokens that reach this probability; 1 keeps all.
        min_p:       Keep tokens at least this times as likely as the most likely; 0 keeps all.
    """

    temperature: Temperature = 1.0
    top_k: Positive | None = None
    top_p: Annotated[float, at_least(1e-6), at_most(1)] = 1.0
    min_p: Fraction = 0.0

    @property
    def truncates(self) -> bool:
        """Return whether the law cuts, beside dividing by the temperature: log-probs may be minus infinity."""
        return self != self.without_cuts()

    def without_cuts(self) -> "SamplingLaw":
        """Return the law with only its temperature; with temperature 1 if this one is greedy."""
        return type(self)(temperature=self.temperature or 1.0)


def full_log_probs(logits: Float[Array, "... V"], law: SamplingLaw) -> Float[Array, "... V"]:
    """Return log-probs under `law.without_cuts()`, float32."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / law.without_cuts().temperature)


def whole_rows(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Return logits gathered over `tensor`: every cut searches a row, and every draw takes its largest number."""
    return logits if logits.ndim == 1 else constrain(logits, "batch", *(None,) * (logits.ndim - 1))


def process_logits(logits: Float[Array, "... V"], law: SamplingLaw) -> Float[Array, "... V"]:
    """Return the normalised log-probs of the law, float32, minus infinity outside its support."""
    logits = whole_rows(logits)
    if law.temperature == 0:
        best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=bool)
        return jnp.where(best, 0.0, -jnp.inf)
    if not law.truncates:
        return full_log_probs(logits, law)
    # Every cut is a threshold on the original logits. If XLA computed log-probs twice, it could round them differently:
    # a token at the threshold would be kept in one place and cut in another. The barrier keeps the logits one array.
    logits = jax.lax.optimization_barrier(logits)
    wide, threshold = logits.astype(jnp.float32), jnp.min(logits, axis=-1, keepdims=True)
    if (k := law.top_k) is not None and k < logits.shape[-1]:
        count = partial(jnp.sum, axis=-1, keepdims=True, dtype=jnp.int32)
        threshold = _highest(lambda at: count(logits >= at) >= k, logits, threshold)
    if law.top_p < 1:
        largest = jnp.max(wide, axis=-1, keepdims=True)

        def reached(at: Array) -> Array:
            # From the logits at every pass: if `wide` came in from outside, GPUs would write and read it in float32.
            weight = jnp.exp((logits.astype(jnp.float32) - largest) / law.temperature)
            return jnp.sum(weight, axis=-1, keepdims=True, where=logits >= at)

        enough = law.top_p * reached(threshold)
        threshold = _highest(lambda at: reached(at) >= enough, logits, threshold)
    threshold = threshold.astype(jnp.float32)
    if law.min_p > 0:
        # Relative to the most likely token, so earlier cuts do not change it.
        floor = jnp.max(wide, axis=-1, keepdims=True) + law.temperature * jnp.log(law.min_p)
        threshold = jnp.maximum(threshold, floor)
    return full_log_probs(jnp.where(wide >= threshold, wide, -jnp.inf), law)


def _highest(enough: Callable[[Array], Array], logits: Float[Array, "... V"], least: Float[Array, "... 1"]) -> Array:
    """Return the highest logit that is a threshold for which `enough` holds, [.., 1].

    enough: threshold [.., 1] -> bool [.., 1]. It must hold at `least`, and at everything below a threshold at which it
            holds.

    Bisects over all floats of this precision in order: one pass over the logits per bit, and no copy. A sort takes
    several times as long on CPUs (benchmarks.cut_laws).
    """
    integer = jnp.dtype(f"int{8 * logits.dtype.itemsize}")

    def flip(bits: Array) -> Array:
        """Map bits to integers in the order of the floats, and back: negative floats are ordered against their bits."""
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    def place(x: Array) -> Array:
        return flip(jax.lax.bitcast_convert_type(x, integer))

    def number(place: Array) -> Array:
        return jax.lax.bitcast_convert_type(flip(place), logits.dtype)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        good = enough(number(middle))
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    bounds = place(least), place(jnp.max(logits, axis=-1, keepdims=True)) + 1
    found = number(jax.lax.fori_loop(0, jnp.iinfo(integer).bits, halve, bounds)[0])
    # Round up to one of the logits: hardware that flushes denormals to 0 may have stopped between two of them.
    return jnp.min(jnp.where(logits >= found, logits, jnp.inf), axis=-1, keepdims=True)


def sample(log_p: Float[Array, "... V"], gumbel: Float[Array, "... V"]) -> Int[Array, "..."]:
    """Draw by the Gumbel-max trick: argmax of log-probs plus noise, int32. Tokens at minus infinity are never drawn."""
    return kernels.argmax(log_p + gumbel)


@jax.custom_vjp
def pick(log_p: Float[Array, "... V"], tokens: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return the entries of `log_p` at `tokens`.

    The gradient compares instead of scattering into zeros, so that XLA fuses it and never writes float32 [.., V].
    """
    return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]


def _pick_forward(log_p: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return pick(log_p, tokens), (tokens, jax.lax.iota(tokens.dtype, log_p.shape[-1]))


def _pick_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    tokens, ids = residuals
    return jnp.where(tokens[..., None] == jnp.expand_dims(ids, range(tokens.ndim)), gradient[..., None], 0.0), None


pick.defvjp(_pick_forward, _pick_backward)
