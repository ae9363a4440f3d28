"""Check that asynchronous runs learn what synchronous ones do: the same job at lags 0, 1 and 2, with several seeds.

Run from the repository's root:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.lag --json FILE

The job is the recipe `tiny` with twice the prompts a step, half the steps and no distillation, on eight CPU devices:
four generate, four train. A policy warms up once; every run starts from it with a draft that learns online, and has a
seed of its own for prompts and noise. At lag 0 rollouts and training take turns. The exit status is 1 if the mean
accuracy at a lag is below that at lag 0 by more than the seeds' spread: two standard errors of the difference of the
means. With --json, runs that FILE already has are not repeated.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.algorithms import begin
from configs import tiny
from configs.schema import AsynchronousConfig, RunConfig
from launch.cli.program import run_program, use_compile_cache
from launch.evaluation.sampler import Evaluate
from launch.rewards.reward_fn import make_reward
from launch.setup.experiment import Experiment, build_experiment
from launch.timing import format_provenance
from specjax import Params, init_train_state
from specjax.asynchronous.step import AsynchronousStep
from specjax.parallel.mesh import MeshConfig
from specjax.train.stages import Stages

LAGS = (0, 1, 2)
# Steps at the end over which gaps and acceptance lengths are averaged.
LAST = 20
NAMES = ("reward/accuracy", "rollout/logprob_gap_mean", "ratio/max", "rollout/acceptance_length")
HEADER = "lag  seeds  accuracy: mean, each                            gap  ratio max  acceptance length"


@dataclass(frozen=True)
class LagRun:
    """Result of one run; means over its last steps.

    Attributes:
        lag:        Updates between the networks that generated and those that are trained.
        seed:       Seed of prompts and noise.
        after:      Accuracy on held-out prompts, a fraction.
        gap:        Mean |log theta - log mu| of a token.
        ratio_max:  Largest theta / mu of a token.
        acceptance: Acceptance length.
        seconds:    Time of the steps after the first two, which compile.
        accuracy:   Accuracy of each step's rollout.
    """

    lag: int
    seed: int
    after: float
    gap: float
    ratio_max: float
    acceptance: float
    seconds: float
    accuracy: list[float]


def recipe(steps: int) -> RunConfig:
    """Return the job. Both meshes stand beside each other from the start, since a process creates its devices once."""
    mesh = MeshConfig(data=4)
    data = replace(tiny.config.data, prompts=4)
    asynchronous = AsynchronousConfig(lag=0, rollout_mesh=mesh)
    return replace(tiny.config, steps=steps, mesh=mesh, data=data, asynchronous=asynchronous)


def learn(experiment: Experiment, lag: int, seed: int, params: Params, evaluate: Evaluate) -> LagRun:
    """Train from these parameters."""
    config = replace(experiment.config, seed=seed)
    experiment = replace(experiment, config=config)
    reward = make_reward(None, experiment.problems.train, experiment.tokenizer)
    stages = Stages(experiment.networks.policy, experiment.networks.drafter, reward, config, experiment.mesh)
    pipeline = experiment.train_batches()
    # Copied, because steps donate their state and other runs start from the same parameters.
    state = init_train_state(jax.tree.map(jnp.copy, params), config, experiment.mesh)
    step = AsynchronousStep(stages, experiment.rollout_mesh)
    for _ in range(lag):
        state = step.begin(state, next(pipeline))
    logged, start = [], time.perf_counter()
    for number in range(config.steps):
        if number == min(2, config.steps - 1):
            start = time.perf_counter()
        state, _, metrics = step(state, next(pipeline))
        logged.append(metrics)
    logged = jax.device_get([{name: metrics[name] for name in NAMES} for metrics in logged])
    seconds = time.perf_counter() - start
    last = {name: [float(metrics[name]) for metrics in logged[-LAST:]] for name in NAMES}
    gap, ratio_max, acceptance = (last[name] for name in NAMES[1:])
    means = statistics.fmean(gap), max(ratio_max), statistics.fmean(acceptance)
    accuracy = [float(metrics["reward/accuracy"]) for metrics in logged]
    return LagRun(lag, seed, evaluate(state).accuracy, *means, seconds, accuracy)


def table(runs: Sequence[LagRun]) -> tuple[list[str], bool]:
    """Return the lines of a table with one row per lag, and whether every lag is within the seeds' spread."""
    by_lag = {lag: [run for run in runs if run.lag == lag] for lag in LAGS}
    plain, lines, sound = [run.after for run in by_lag[0]], [HEADER], True
    for lag, each in by_lag.items():
        after = [run.after for run in each]
        spread = 2 * np.sqrt(sum(np.var(x, ddof=1) / len(x) for x in (plain, after) if len(x) > 1))
        fits = statistics.fmean(plain) - statistics.fmean(after) <= spread
        sound &= bool(fits)
        values = f"{statistics.fmean(after):.1%}  " + " ".join(f"{x:.1%}" for x in after)
        gap, acceptance = (statistics.fmean(getattr(run, name) for run in each) for name in ("gap", "acceptance"))
        highest, mark = max(run.ratio_max for run in each), "" if fits else "  BELOW THE SPREAD"
        lines.append(f"{lag:3} {len(each):6}  {values:42} {gap:.1e} {highest:10.2f} {acceptance:18.2f}{mark}")
    return lines, sound


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=tiny.config.steps // 2, help="RL steps per run")
    parser.add_argument("--seeds", type=int, default=5, help="runs at each lag")
    parser.add_argument("--json", type=Path, help="file to write all runs to")
    options = parser.parse_args(argv)
    use_compile_cache()
    runs: dict[tuple[int, int], LagRun] = {}
    if options.json is not None and options.json.exists():
        runs = {(run["lag"], run["seed"]): LagRun(**run) for run in json.loads(options.json.read_text())}
    experiment = build_experiment(recipe(options.steps), takes_steps=True)
    print(format_provenance("benchmarks.lag"))
    params, evaluate, before = begin(experiment)
    print(f"{options.steps} steps; accuracy on held-out prompts before: {before:.1%}", flush=True)
    for seed in range(options.seeds):
        for lag in LAGS:
            run = runs.get((lag, seed))
            if run is None or len(run.accuracy) != options.steps:
                run = learn(experiment, lag, seed, params, evaluate)
            runs[lag, seed] = run
            print(f"seed {seed} lag {lag}: {run.after:.1%} in {run.seconds:.0f} s", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(run) for run in runs.values()]) + "\n")
    lines, sound = table([runs[lag, seed] for seed in range(options.seeds) for lag in LAGS])
    print("\n".join(lines))
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(run_program(main))
