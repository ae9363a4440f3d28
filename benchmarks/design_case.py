"""Compute what this design would gain on the paper's machine, by arithmetic.

Run from the repository's root: python -m benchmarks.design_case
benchmarks/simulator_validation/case_2026_11_26.md has the result.
"""

from dataclasses import replace

from benchmarks.simulation.acceptance import bisect
from benchmarks.simulation.answer import resolve_pair, run
from benchmarks.simulation.estimate import estimate
from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.point import Point
from benchmarks.simulation.uncertainty import Range, input_ranges

NONE = Evidence()
SAMPLES = 48
# Seconds of the paper's runs: generation without drafts, a step without, then with drafts generation and a step.
PAPER = {"Zero": (100.0, 151.2, 56.6, 107.5), "Think": (133.6, 185.3, 87.0, 137.4)}
LOGPROB = 18.1
# Qwen3-8B, 16 rows on each of 32 GB200; the paper's stages beside generation. The mean lengths are those at which a
# roofline without drafts takes the paper's generation seconds.
BASE = Point(
    hardware="gb200",
    gpus=32,
    sequences=512,
    slots=16,
    phases=(16, 8, 4, 2, 1),
    limit_tokens=32_768,
    train_s=30.5,
    logprob_s=0.0,
)
RUNS = {
    "Zero": replace(BASE, length_spread=0.9, acceptance_length=3.32, other_s=2.3),
    "Think": replace(BASE, length_spread=0.6, acceptance_length=2.77, other_s=1.8),
}
# Qwen3-8B thinking at temperature 1 with DFlash or DSpark (NeMo RL's guide): 3.5 to 4.
BLOCK = 3.75


def with_plain_seconds(point: Point, seconds: float) -> Point:
    """Return the point with the mean length at which generation without drafts takes so long."""

    def excess(mean: float) -> float:
        return run(resolve_pair(replace(point, mean_tokens=mean), NONE)[0], NONE).generation - seconds

    return replace(point, mean_tokens=bisect(excess, 10.0, 0.98 * point.limit_tokens))


def variants(name: str, point: Point) -> dict[str, Point]:
    """Return the points of a run's table."""
    points = {
        "with a log-prob stage, k = 3": replace(point, logprob_s=LOGPROB),
        "with a log-prob stage, k = 5": replace(point, logprob_s=LOGPROB, draft_length=5),
        "k = 3": point,
        "k = 5": replace(point, draft_length=5),
        "k from 0 to 7, the best at each moment": replace(point, draft_lengths=tuple(range(8))),
        "k = 3, all slots to the end (no phases)": replace(point, phases=(16,)),
        "k = 3, 8 slots and a queue": replace(point, slots=8, phases=(8, 4, 2, 1)),
        "k = 3, the draft trained in every step": replace(point, draft_training=0.07),
        "k = 3, lag 1, best split of the GPUs": replace(point, lag=1),
    }
    if name == "Think":
        block = replace(point, draft="block", draft_length=7, measured_at=7, acceptance_length=BLOCK)
        points["block drafts, k = 7"] = block
    return points


def row(title: str, point: Point, paper_step: float) -> str:
    """Return a line of a table: seconds and speed-ups over the same program without drafts, with intervals.

    paper_step: seconds of the paper's step without drafts.
    """
    pair = resolve_pair(point, NONE)
    ranges = input_ranges(point, NONE, {"other_s": Range(point.other_s, point.other_s, "published")})
    found = estimate({}, pair, NONE, ranges, SAMPLES)
    assert found.answer is not None and found.intervals is not None
    drafted = found.answer.drafted
    cells = [f"{drafted.generation:.1f}", f"{drafted.step:.1f}"]
    for name in ("generation_speedup", "step_speedup"):
        value = found.intervals[name]
        cells.append(f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]")
    cells += [f"{paper_step / drafted.step:.2f}", found.driver or ""]
    return f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    """Print a table for each run."""
    for name, start in RUNS.items():
        plain, plain_step, generation, step = PAPER[name]
        point = with_plain_seconds(start, plain)
        print(f"\n**RL-{name}**: without drafts {plain} s of generation, mean {point.mean_tokens:,.0f} tokens.\n")
        print("| | generation, s | step, s | generation x | step x | over the paper's step | depends most on |")
        print("|---|---|---|---|---|---|---|")
        ratios = f"{plain / generation:.2f} | {plain_step / step:.2f} | {plain_step / step:.2f}"
        print(f"| the paper, measured | {generation} | {step} | {ratios} | |")
        less = step - LOGPROB
        print(f"| the paper less its log-prob stage | {generation} | {less:.1f} | | | {plain_step / less:.2f} | |")
        for title, variant in variants(name, point).items():
            print(row(title, variant, plain_step), flush=True)
        many = replace(start, sequences=1536, slots=48, phases=(48, 24, 12, 6, 3), limit_tokens=20_480)
        many = replace(with_plain_seconds(many, plain), logprob_s=0.0)
        for k in (3, 5, 7):
            print(
                row(f"48 rows a GPU, at most 20,480 tokens, k = {k}", replace(many, draft_length=k), plain_step),
                flush=True,
            )


if __name__ == "__main__":
    main()
