"""Compare the speed of top-k and top-p by bisection, as in specjax.sampling, and by sorting the logits.

Run from the repository's root: python -m benchmarks.cut_laws
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from launch.timing import format_interval, format_provenance, interleaved, time_call
from specjax import SamplingLaw
from specjax.sampling import full_log_probs, process_logits

LAWS = SamplingLaw(top_k=20), SamplingLaw(top_p=0.9), SamplingLaw(top_k=20, top_p=0.9)


def by_sorting(logits: Float[Array, "... V"], law: SamplingLaw) -> Float[Array, "... V"]:
    """Return the result of `process_logits` by sorting, without min-p."""
    logits = jax.lax.optimization_barrier(logits.astype(jnp.float32))
    threshold = jnp.min(logits, axis=-1, keepdims=True)
    if law.top_k is not None:
        threshold = jax.lax.top_k(logits, law.top_k)[0][..., -1:]
    if law.top_p < 1:
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        mass = jnp.exp(full_log_probs(jnp.where(descending >= threshold, descending, -jnp.inf), law))
        within = jnp.cumsum(mass, axis=-1) - mass < law.top_p
        threshold = jnp.min(jnp.where(within, descending, jnp.inf), axis=-1, keepdims=True)
    return full_log_probs(jnp.where(logits >= threshold, logits, -jnp.inf), law)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="positions sampled at once")
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32_768, 151_936], help="vocabulary sizes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the logits")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each, in turns")
    options = parser.parse_args()
    print(format_provenance("benchmarks.cut_laws"))
    print("sorting / bisection: seconds, paired; ms of a plain law, by bisection and by sorting: medians")
    print("rows  vocabulary  top-k  top-p  sorting / bisection   plain   bisection  sorting")
    for rows, vocab in ((rows, vocab) for vocab in options.vocab for rows in options.rows):
        logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocab), options.dtype)
        plain = partial(jax.jit(lambda x: process_logits(x, SamplingLaw())), logits)
        for law in LAWS:
            bisected, ordered = (partial(jax.jit(partial(f, law=law)), logits) for f in (process_logits, by_sorting))
            # Rounding may move one token per row across the top-p threshold.
            assert jnp.sum((bisected() > -jnp.inf) != (ordered() > -jnp.inf)) <= rows
            plain()
            runs = {"plain": plain, "bisection": bisected, "sorting": ordered}
            times = interleaved({name: partial(time_call, run) for name, run in runs.items()}, options.repeats)
            ratios = [b / a for a, b in zip(times["bisection"], times["sorting"], strict=True)]
            ms = " ".join(f"{1e3 * sorted(values)[len(values) // 2]:9.3f}" for values in times.values())
            print(
                f"{rows:4}  {vocab:10}  {law.top_k or '-':>5}  {law.top_p:5}  {format_interval(ratios):20} {ms}",
                flush=True,
            )


if __name__ == "__main__":
    main()
