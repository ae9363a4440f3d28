"""Compare the speed of three ways to admit waiting sequences, by group size, prompt width and draft length.

alternating: the way of specjax. Prefill, then rounds until slots are free, and again.
conditional: one loop, whose body prefills when slots are free.
reading:     no prefill. A row reads its prompt K + 1 tokens per round, in the forward that verifies the other rows.

Run from the repository's root: python -m benchmarks.admission
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from benchmarks.admission_loops import conditional, reading
from benchmarks.forced import stops_at
from benchmarks.networks import VOCAB, distilled, random_prompts, small
from launch.build.networks import Networks
from launch.cli.options import use_compile_cache
from launch.timing import format_interval, format_provenance, interleaved, time_call
from specjax import MeshConfig, Rollout, RolloutConfig, make_generate, make_mesh, seed_step, speculative_rollout

MESH, STOP = make_mesh(MeshConfig()), VOCAB - 1
WAYS = {"alternating": speculative_rollout, "conditional": conditional, "reading": reading}


def programs(
    networks: Networks, options: argparse.Namespace, group: int, width: int, draft_length: int
) -> dict[str, Callable[[], Rollout]]:
    """Return a program per way. All generate the same sequences, 1/4 to 7/4 of the mean length long."""
    count, rng = options.sequences // group, np.random.default_rng(0)
    lengths = rng.integers(options.mean // 4, 2 * options.mean - options.mean // 4, VOCAB)
    config = RolloutConfig(
        group_size=group,
        max_new_tokens=int(lengths.max()),
        draft_length=draft_length,
        verifier="coupled",
        stop_tokens=(STOP,),
        phases=((options.slots, width + int(lengths.max())),),
    )
    policy, prompts = stops_at(networks.policy, width + lengths - 1, STOP), random_prompts(rng, count, width)
    return {
        name: partial(
            make_generate(policy, networks.drafter, config, MESH, way), networks.params, prompts, seed_step(0, 0)
        )
        for name, way in WAYS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="turns; each measures all ways")
    parser.add_argument("--sequences", type=int, default=64, help="sequences; a multiple of every group size")
    parser.add_argument("--slots", type=int, default=16, help="sequences decoded together")
    parser.add_argument("--mean", type=int, default=32, help="mean length of a completion, in tokens")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8], help="samples per prompt, to compare")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 128], help="prompt lengths in tokens, to compare")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 3], help="draft lengths (K), to compare")
    parser.add_argument("--layers", type=int, default=4, help="layers of the policy")
    parser.add_argument("--distil", type=int, default=150, help="steps that distil the head")
    options = parser.parse_args()
    use_compile_cache()
    networks = distilled(small(options.layers, MESH), MESH, options.distil)
    print(format_provenance("benchmarks.admission"))
    print(f"job       {options.sequences} sequences in {options.slots} slots, {options.mean} tokens each on average")
    print(f"medians of {options.repeats} turns with their 95% intervals; ratios are speeds over alternating, same turn")
    print("group width  K  alternating, s            conditional               reading                   fastest")
    for group, width, k in itertools.product(options.groups, options.widths, options.draft_lengths):
        ways = programs(networks, options, group, width, k)
        tokens = {name: np.asarray(jax.block_until_ready(run()).tokens) for name, run in ways.items()}
        for name in ways:
            np.testing.assert_array_equal(tokens[name], tokens["alternating"], err_msg=name)
        measured = interleaved({name: partial(time_call, run) for name, run in ways.items()}, options.repeats)
        ratios = [
            [ours / own for ours, own in zip(measured["alternating"], measured[name], strict=True)]
            for name in ("conditional", "reading")
        ]
        fastest = min(ways, key=lambda name: float(np.median(measured[name])))
        print(
            f"{group:5} {width:5} {k:2}",
            *(f" {format_interval(values):24}" for values in (measured["alternating"], *ratios)),
            fastest,
            flush=True,
        )
    print("tokens    the same by every way")


if __name__ == "__main__":
    main()
