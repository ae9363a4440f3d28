"""What other layouts of kernels (`models.projection.laid_out`) do to a round: seconds without over with them, paired.

Run from the repository's root, on a CPU: python -m benchmarks.layouts [--batch 1 4 16]
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from launch.bench.models import Networks, random_networks
from launch.bench.presets import PRESETS
from launch.bench.rounds import Rounds
from launch.timing import in_turns, provenance, written
from specjax.drafters.head import HeadDrafter
from specjax.types import PyTree


def as_they_are(params: PyTree) -> PyTree:
    """The parameters with each kernel laid out once."""
    if not isinstance(params, Mapping):
        return params
    return {name: as_they_are(part) for name, part in params.items() if name not in ("turned", "halves")}


def without(networks: Networks) -> Networks:
    """The networks with kernels in their own layouts alone."""
    policy, drafter = networks.policy, cast(HeadDrafter, networks.drafter)
    return replace(
        networks,
        policy=replace(policy, for_decoding=lambda params: as_they_are(policy.for_decoding(params))),
        drafter=replace(drafter, head=replace(drafter.head, for_decoding=lambda draft: draft)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="25m", help="of launch.bench")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="rows decoded together")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each, in turns")
    options = parser.parse_args()
    preset = PRESETS[options.preset]
    print(f"{provenance('benchmarks.layouts')}\npreset    {options.preset}, context {preset.contexts[0]}")
    print("batch k  tokens  ms a round: without   with  without / with")
    networks = random_networks(preset)
    for batch in options.batch:
        lengths = options.draft_lengths
        cells = {
            name: Rounds(
                own, own.drafter, batch, preset.contexts[0], {k: (own.drafter, k) for k in lengths}, preset.rounds
            )
            for name, own in (("without", without(networks)), ("with", networks))
        }
        for k in lengths:
            runs = {name: partial(rounds.measure, k) for name, rounds in cells.items()}
            measured = in_turns(runs, options.repeats)
            without_ms, with_ms = (1e3 * sorted(times)[len(times) // 2] for times in measured.values())
            ratios = [a / b for a, b in zip(measured["without"], measured["with"], strict=True)]
            row = f"{batch:5} {k}  {batch * (k + 1):6}  {without_ms:19.3f} {with_ms:6.3f}  {written(ratios)}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
