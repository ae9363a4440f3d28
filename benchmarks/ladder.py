"""Time the gradient of a long-tailed batch with and without sequence-length buckets, in pairs.

Run from the repository's root: python -m benchmarks.ladder
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.forced import long_tailed
from launch.timing import format_interval, format_provenance, interleaved, time_call
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.params import init_params
from specjax import MeshConfig, Params, SamplingLaw, kernels, make_mesh
from specjax.train.batch import TrainBatch
from specjax.train.gradients import LossContext, accumulate
from specjax.train.ladder import rung, sort_rows, windows

ROWS, MICROBATCHES, VOCAB, WIDTH, PROMPT, MEDIAN = 64, 8, 512, 64, 16, 64
SHAPE: dict[str, Any] = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_heads=4, num_kv_heads=2, head_dim=16)
DECODER = DecoderConfig(vocab_size=VOCAB, num_layers=4, feature_layers=(0, 2, 3), **SHAPE)
HEAD = Eagle3Config(feature_size=3 * WIDTH, vocab_size=VOCAB, draft_vocab_size=VOCAB, **SHAPE)
MESH = make_mesh(MeshConfig())


def padded_batch(rng: np.random.Generator) -> TrainBatch:
    """Return a batch in which three rows are eight times as long as the median, padded to the longest row."""
    lengths = np.maximum(long_tailed(rng, ROWS, MEDIAN, tail=3), PROMPT + 1)
    column = np.arange(8 * MEDIAN)[None]
    real = column < lengths[:, None]
    return TrainBatch(
        tokens=jnp.array(np.where(real, rng.integers(0, VOCAB, real.shape), 0), jnp.int32),
        completion=jnp.array(real & (column >= PROMPT)),
        reward=jnp.zeros(ROWS),
        counted=jnp.ones(ROWS, bool),
        advantage=jnp.array(rng.normal(size=real.shape), jnp.float32),
    )


def compiled(params: Params, batch: TrainBatch, ladder: tuple[int, ...]) -> Callable[[], float]:
    """Compile the gradients of policy and draft. Return a function that measures their seconds."""
    policy = make_policy(DECODER)
    context = LossContext(policy, make_eagle3(HEAD, policy), SamplingLaw(), microbatches=MICROBATCHES, ladder=ladder)

    def gradients(params: Params, batch: TrainBatch) -> Params:
        if ladder:
            batch = sort_rows(batch, MESH, MICROBATCHES)
        return accumulate(context, params, batch)[0]

    with jax.set_mesh(MESH):
        program = (
            jax.jit(gradients, compiler_options=kernels.compiler_options(policy.dtype)).lower(params, batch).compile()
        )

    measure = partial(time_call, partial(program, params, batch))
    measure()
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of timings")
    parser.add_argument("--ladder", type=int, nargs="+", default=[48, 64, 96, 128, 192], help="buckets, ascending")
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0))
    params = Params(
        policy=init_params(partial(init_decoder, DECODER), keys[0], MESH),
        draft=init_params(partial(init_eagle3, HEAD), keys[1], MESH),
    )
    batch = padded_batch(np.random.default_rng(0))
    lengths, width = np.asarray(batch.lengths), batch.tokens.shape[1]
    ran = windows(tuple(options.ladder), width)
    parts = [part.max() for part in np.split(np.sort(lengths), MICROBATCHES)]
    chosen = [int(ran[rung(jnp.array([longest]), ran)]) for longest in parts]
    print(format_provenance("benchmarks.ladder"))
    print(
        f"batch     {ROWS} rows in {MICROBATCHES} microbatches, lengths {np.median(lengths):.0f} (median), "
        f"{np.quantile(lengths, 0.9):.0f} (90%), {width} (longest and padded)"
    )
    print("windows   " + " ".join(map(str, chosen)))
    print(
        f"tokens    padded over real {ROWS * width / lengths.sum():.2f}, "
        f"windows over real {ROWS / MICROBATCHES * sum(chosen) / lengths.sum():.2f}"
    )

    run = {"padded": compiled(params, batch, ()), "ladder": compiled(params, batch, tuple(options.ladder))}
    measured = interleaved(run, options.repeats)
    for name, values in measured.items():
        print(f"{name:9} {format_interval(values)} s a gradient, median of {options.repeats} with its 95% interval")
    ratios = [padded / ladder for padded, ladder in zip(*measured.values(), strict=True)]
    print(f"speed-up  {format_interval(ratios)} padded over ladder, median of the pairs with its 95% interval")


if __name__ == "__main__":
    main()
