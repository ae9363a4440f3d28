"""Time phases and a queue against a single phase, on a batch with a few rows eight times as long as the median.

Run from the repository's root: python -m benchmarks.long_tail
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import numpy as np

from benchmarks.forced import long_tailed, stops_at
from benchmarks.networks import VOCAB, distilled, random_prompts, small
from launch.build.networks import Networks
from launch.cli.options import use_compile_cache
from launch.timing import format_interval, format_provenance, interleaved, time_call
from specjax import MeshConfig, Policy, Prompts, Rollout, RolloutConfig, make_generate, make_mesh, seed_step
from specjax.rollout.plan import Phase, lay_out

MESH, STOP, WIDTH = make_mesh(MeshConfig()), VOCAB - 1, 4
Plan = tuple[tuple[int, int], ...]
Generate = Callable[[], Rollout]


@dataclass(frozen=True)
class Job:
    """Sequences to generate. The first token of each prompt is its id, which sets the length of its completion.

    Attributes:
        networks:  Policy and draft.
        sequences: Number of prompts, with one completion each.
        median:    Median length of the completions, in tokens.
        tail:      Number of completions of 8 x `median` tokens.
    """

    networks: Networks
    sequences: int
    median: int
    tail: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the lengths of the completions, int32 [sequences]."""
        return long_tailed(np.random.default_rng(0), self.sequences, self.median, self.tail)

    @cached_property
    def prompts(self) -> Prompts:
        """Return random prompts whose first token is the prompt's id."""
        prompts = random_prompts(np.random.default_rng(1), self.sequences, WIDTH)
        return replace(prompts, tokens=prompts.tokens.at[:, 0].set(prompts.id))

    @cached_property
    def policy(self) -> Policy:
        """Return the policy, changed to stop each completion at its length."""
        ends = np.zeros(VOCAB, np.int32)
        ends[: self.sequences] = WIDTH + self.lengths - 1
        return stops_at(self.networks.policy, ends, STOP)

    def config(self, plan: Plan, draft_length: int) -> RolloutConfig:
        return RolloutConfig(
            group_size=1,
            max_new_tokens=8 * self.median,
            draft_length=draft_length,
            verifier="coupled",
            stop_tokens=(STOP,),
            phases=plan,
        )

    def rollout(self, plan: Plan, draft_length: int) -> Generate:
        """Return a function that generates all sequences in the phases of `plan`."""
        generate = make_generate(self.policy, self.networks.drafter, self.config(plan, draft_length), MESH)
        return partial(generate, self.networks.params, self.prompts, seed_step(0, 0))

    def phases(self, plan: Plan) -> tuple[Phase, ...]:
        return lay_out(self.config(plan, 0), self.sequences, WIDTH)


def plans(sequences: int, median: int) -> dict[str, Plan]:
    """Return the plans to compare, each as phases of (slots, window).

    single: all slots to the end. phases: slots shrink and windows grow. queue: a quarter of the slots, with a queue.
    both: a queue, then fewer slots.
    """
    few, fewest = sequences // 4, sequences // 16
    shorter, short, longest = (WIDTH + many * median for many in (2, 4, 8))
    return {
        "single": ((sequences, longest),),
        "phases": ((sequences, shorter), (few, short), (fewest, longest)),
        "queue": ((few, longest),),
        "both": ((few, longest), (fewest, short)),
    }


def check(job: Job, programs: dict[str, Generate], expected: Rollout | None = None) -> dict[str, Rollout]:
    """Return each program's rollout. Raise AssertionError on a wrong length, or tokens other than expected.

    expected: default: the rollout of the first program.
    """
    rollouts = {name: jax.block_until_ready(run()) for name, run in programs.items()}
    expected = expected or next(iter(rollouts.values()))
    for name, rollout in rollouts.items():
        np.testing.assert_array_equal(rollout.lengths, job.lengths, err_msg=name)
        np.testing.assert_array_equal(rollout.tokens, expected.tokens, err_msg=name)
    return rollouts


def compare(job: Job, draft_length: int, repeats: int, expected: Rollout | None) -> Rollout:
    """Print each plan's time and its speed-up over a single phase. Return the rollout, which all plans share."""
    by_name = plans(job.sequences, job.median)
    programs = {name: job.rollout(plan, draft_length) for name, plan in by_name.items()}
    rollouts = check(job, programs, expected)
    measured = interleaved({name: partial(time_call, run) for name, run in programs.items()}, repeats)
    for name, plan in by_name.items():
        trips = np.asarray(rollouts[name].loop_rounds)[0]
        rows = sum(phase.slots * count for phase, count in zip(job.phases(plan), trips, strict=True))
        alpha = (job.lengths - 1).sum() / np.asarray(rollouts[name].row_rounds).sum()
        ratios = [single / own for single, own in zip(measured["single"], measured[name], strict=True)]
        print(
            f"K={draft_length} {name:7} {format_interval(measured[name]):22} s, {trips.sum():4} rounds, "
            f"{rows:6} rows verified, alpha {alpha:.2f}, speed-up {format_interval(ratios)}"
        )
    return rollouts["single"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="turns; each measures all plans")
    parser.add_argument("--sequences", type=int, default=64, help=f"sequences; at most {STOP}")
    parser.add_argument("--median", type=int, default=32, help="median length of a completion, in tokens")
    parser.add_argument("--tail", type=int, default=3, help="sequences of eight times the median length")
    parser.add_argument("--layers", type=int, default=4, help="layers of the policy")
    parser.add_argument("--distil", type=int, default=150, help="steps that distil the head")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 3], help="draft lengths (K), to compare")
    options = parser.parse_args()
    use_compile_cache()
    networks = distilled(small(options.layers, MESH), MESH, options.distil)
    job = Job(networks, options.sequences, options.median, options.tail)
    print(format_provenance("benchmarks.long_tail"))
    print(
        f"job       {job.sequences} sequences of {np.median(job.lengths):.0f} (median), "
        f"{np.quantile(job.lengths, 0.9):.0f} (90%), {job.lengths.max()} (longest) tokens, {job.lengths.sum()} in all"
    )
    for name, plan in plans(job.sequences, job.median).items():
        print(f"{name:9} " + " ".join(f"{slots}x{window}" for slots, window in job.phases(plan)))
    print(
        f"medians of {options.repeats} turns with their 95% intervals; speed-up is over the single phase of that turn"
    )
    expected = None
    for draft_length in options.draft_lengths:
        expected = compare(job, draft_length, options.repeats, expected)
    print("tokens    the same in every plan and at every draft length; every row as long as it was to be")


if __name__ == "__main__":
    main()
