"""Repeat findings of arXiv 2604.26779 on a small task: draft initialisation, draft length and online training.

Run from the repository's root: python -m benchmarks.draft_findings --plots DIR --json FILE

A policy warms up on its task. Drafts start in one of three ways:
- in-domain: distilled from the policy's answers to the task's prompts
- generic: distilled from its answers to strings of random tokens
- random: not distilled

Each draft generates completions of held-out prompts at several draft lengths, in turns. Each then starts the same RL
run, frozen and online; the in-domain draft also with other schedules of online training (MODES in
benchmarks.draft_runs). Another in-domain draft is distilled with a single pass of training-time test, to compare
acceptance by position.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks.draft_plots import save_plots
from benchmarks.draft_runs import (
    MODES,
    DraftedRollouts,
    DraftRun,
    Position,
    by_draft_length,
    by_position,
    first_difference,
    initial_drafts,
    reinforce,
)
from benchmarks.plotting import load_pyplot
from configs import narrow
from configs.schema import DistillConfig, RunConfig
from launch.cli.program import run_program, use_compile_cache
from launch.distillation.trainer import distill
from launch.run.supervised_warmup import warm_up
from launch.setup.experiment import build_experiment
from launch.timing import format_provenance, show_interval

# RL steps per mean in the table.
PART = 100


def recipe(options: argparse.Namespace) -> RunConfig:
    """Return the recipe `narrow` with the coupled verifier: tokens and policy do not depend on the draft."""
    config = narrow.config
    return replace(
        config,
        steps=options.steps,
        rollout=replace(config.rollout, verifier="coupled"),
        distill=DistillConfig(answers=options.answers, steps=options.distil, chunks=4, batch_size=32),
    )


def parts(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (mean, two standard errors) of every PART steps, as if steps were independent."""
    each = [np.array(values[i : i + PART]) for i in range(0, len(values), PART)]
    return [(float(x.mean()), float(2 * x.std() / len(x) ** 0.5)) for x in each]


def show(timings: Sequence[DraftedRollouts], runs: Sequence[DraftRun], rates: Mapping[str, Sequence[Position]]) -> None:
    """Print the tables."""
    print("\ndraft      k  alpha   cost  speed-up over k = 0")
    for row in timings:
        speedup = show_interval(row.speedup, ".2f")
        print(f"{row.start:9} {row.draft_length:2}  {row.alpha:5.2f}  {row.cost:5.2f}  {speedup}")
    print(f"\nRL, alpha: means of {PART} steps each (2 standard errors of a mean)")
    for run in runs:
        print(f"{run.start:9} {run.mode:8}  " + "  ".join(f"{x:.2f} +- {error:.2f}" for x, error in parts(run.alpha)))
    print("accuracy            " + "  ".join(f"{x:.2f} +- {error:.2f}" for x, error in parts(runs[0].accuracy)))
    step = first_difference(runs)
    print("tokens    " + ("the same in all runs, every step" if step is None else f"parted first in step {step}"))
    print("\naccepted at each position, of what was drafted there (2 standard errors)")
    for name, positions in rates.items():
        print(f"{name:9} " + "  ".join(f"{at.rate:.3f} +- {2 * at.error:.3f}" for at in positions))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=narrow.config.steps, help="RL steps per run")
    parser.add_argument("--answers", type=int, default=1024, help="answers that a draft is distilled from")
    parser.add_argument("--distil", type=int, default=300, help="steps of distillation")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[1, 3, 5, 7], help="to compare")
    parser.add_argument("--repeats", type=int, default=40, help="turns; each measures all draft lengths")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--plots", type=Path, help="directory for the plots")
    options = parser.parse_args(argv)
    if options.plots is not None:
        load_pyplot()
    use_compile_cache()
    experiment = build_experiment(recipe(options))
    print(format_provenance("benchmarks.draft_findings"), flush=True)
    params = warm_up(experiment)
    drafts = initial_drafts(experiment, params)
    timings = by_draft_length(experiment, drafts, options.draft_lengths, options.repeats)
    print("distilling the draft in a single pass", flush=True)
    config = experiment.config
    once = build_experiment(replace(config, draft=replace(config.draft, unroll=1)))
    single = replace(params, draft=distill(once, params).draft)
    rates = by_position(experiment, {"1 pass": single, f"{config.draft.unroll} passes": drafts["in-domain"]})
    arms = [(name, mode) for name in drafts for mode in ("frozen", "online")]
    arms += [("in-domain", mode) for mode in MODES if ("in-domain", mode) not in arms]
    runs = [reinforce(experiment, drafts[start], start, mode) for start, mode in arms]
    show(timings, runs, rates)
    if options.json is not None:
        results = {
            "drafted": [asdict(row) for row in timings],
            "runs": [asdict(run) for run in runs],
            "positions": {name: [asdict(at) for at in each] for name, each in rates.items()},
        }
        options.json.write_text(json.dumps(results) + "\n")
    if options.plots is not None:
        save_plots(options.plots, timings, runs, rates)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
