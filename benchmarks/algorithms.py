"""Every algorithm of the GRPO family learns two small tasks that can be verified: their curves, side by side.

Run from the repository's root: python -m benchmarks.algorithms --plots DIR --json FILE

A small policy warms up on the worked solutions of a task, sums or sorting, for fewer steps than it would need to solve
it. Every algorithm then starts from that policy, with the same prompts and noise, a draft that learns beside it, and
two updates a rollout, so that ratios and their clips matter. The exit status is 1 where one does not learn.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from configs import tiny
from configs.schema import ArithmeticConfig, EvalConfig, RunConfig
from launch.begin import warmed_up
from launch.bench.plots import load_pyplot
from launch.cli import run_program, use_compile_cache
from launch.evaluation import Evaluate, make_evaluate
from launch.measure import provenance
from launch.pipeline import PromptPipeline, fixed_batches
from launch.scoring import make_reward
from launch.setup import Setup, set_up
from specjax import Params, init_train_state, make_train_step
from specjax.advantage import AdvantageConfig
from specjax.loss import LossConfig
from specjax.mesh import MeshConfig
from specjax.optimizer import OptimizerConfig
from specjax.plan import RolloutConfig
from specjax.selection import SelectionConfig
from specjax.stages import TrainConfig
from specjax.updates import UpdateConfig

# By how much accuracy on held-out prompts has to rise. Its standard error is at most 0.022 over 512 completions.
MARGIN = 0.1
PROMPTS, HELD_OUT = 8, 512
SMOOTHING = 20


def _loss(**options: object) -> Callable[[TrainConfig], TrainConfig]:
    return lambda config: replace(config, loss=replace(config.loss, **options))


def _advantage(**options: str) -> Callable[[TrainConfig], TrainConfig]:
    return lambda config: replace(config, advantage=AdvantageConfig(**options))  # pyright: ignore[reportArgumentType]


def _dapo(config: TrainConfig) -> TrainConfig:
    selection = SelectionConfig(groups=PROMPTS, drop_truncated=True, overlong_buffer=4)
    return replace(config, selection=selection, loss=LossConfig(clip_high=0.28, aggregate="token"))


def _recomputed(config: TrainConfig) -> TrainConfig:
    return replace(config, updates=replace(config.updates, recompute_old=True))


def _kl_in_reward(estimator: str) -> Callable[[TrainConfig], TrainConfig]:
    leave_one_out = _advantage(baseline="others", scale="none")
    return lambda config: _loss(kl_coefficient=0.01, kl_estimator=estimator, kl_in="reward")(leave_one_out(config))


# What each changes in GRPO.
ALGORITHMS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "GRPO": lambda config: config,
    "Dr. GRPO": lambda config: _advantage(scale="none")(_loss(aggregate="budget")(config)),
    "DAPO": _dapo,
    "RLOO": _advantage(baseline="others", scale="none"),
    "REINFORCE++": lambda config: _advantage(baseline="batch", scale="batch")(
        _loss(kl_coefficient=0.01, kl_estimator="k1", kl_in="token")(config)
    ),
    "REINFORCE++ baseline": _advantage(scale="batch"),
    "GSPO": _loss(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "CISPO": _loss(surrogate="cispo", clip_low=1.0, clip_high=0.28, aggregate="token"),
    "dual clip": _loss(dual_clip=3.0),
    **{f"KL {kind} in loss": _loss(kl_coefficient=0.01, kl_estimator=kind) for kind in ("k1", "k2", "k3")},
    **{f"KL {kind} in reward": _kl_in_reward(kind) for kind in ("k1", "k2", "k3")},
    "reference that follows": lambda config: replace(_loss(kl_coefficient=0.01)(config), reference_every=20),
    # What generated and what trains differ by rounding here: these weights are 1 but for that.
    "importance by token": lambda config: _recomputed(_loss(importance="token")(config)),
    "importance by sequence": lambda config: _recomputed(_loss(importance="sequence")(config)),
    "importance by icepop": lambda config: _recomputed(_loss(importance="icepop")(config)),
    "two epochs": lambda config: replace(config, updates=UpdateConfig(minibatches=2, epochs=2)),
}


@dataclass(frozen=True)
class Learned:
    """A run: accuracy on held-out prompts at both ends, as shares, and over each step's rollout."""

    task: str
    algorithm: str
    before: float
    after: float
    accuracy: list[float]

    @property
    def learned(self) -> bool:
        return self.after - self.before >= MARGIN


def sorting(path: Path, count: int = 4096) -> None:
    """A file of digits to be put in order: `4172=` is answered by `#1247`."""
    source, seen = random.Random(0), {}
    while len(seen) < count:
        seen["".join(source.choices("123456789", k=source.randint(4, 7)))] = None
    lines = [{"question": f"{digits}=", "answer": "".join(sorted(digits))} for digits in seen]
    path.write_text("".join(json.dumps(line | {"solution": f"#{line['answer']}"}) + "\n" for line in lines))


def recipes(directory: Path, steps: int) -> dict[str, RunConfig]:
    """A run of GRPO on each task."""
    base = tiny.config
    shape = replace(base.model.architecture, num_layers=4, hidden_size=64)  # pyright: ignore[reportArgumentType]
    sums = replace(
        base,
        steps=steps,
        mesh=MeshConfig(),
        model=replace(base.model, architecture=shape, feature_layers=(0, 2, 3)),
        data=replace(
            base.data,
            prompts=PROMPTS,
            held_out_count=HELD_OUT,
            arithmetic=ArithmeticConfig(problems=4096, min_terms=3, max_terms=4, max_value=9),
        ),
        rollout=RolloutConfig(group_size=8, max_new_tokens=28, draft_length=2),
        loss=LossConfig(aggregate="sequence", clip_high=0.2),
        updates=UpdateConfig(minibatches=2),
        policy_optimizer=OptimizerConfig(learning_rate=1e-4, b2=0.99, warmup_steps=10),
        draft_optimizer=OptimizerConfig(learning_rate=3e-3, b2=0.98, warmup_steps=10),
        warmup=replace(base.warmup, steps=200),
        eval=EvalConfig(prompts=HELD_OUT),
    )
    sorting(directory / "sorting.jsonl")
    fields = dict(train=str(directory / "sorting.jsonl"), solution_field="solution", arithmetic=None)
    warmup = replace(sums.warmup, steps=150)
    return {
        "sums": sums,
        "sorting": replace(sums, data=replace(sums.data, **fields), warmup=warmup),
    }


def evaluator(setup: Setup) -> Evaluate:
    reward = make_reward(None, setup.problems.held_out, setup.tokenizer, setup.mesh)
    batches = fixed_batches(setup.held_out_prompts, HELD_OUT)
    parts = setup.networks.policy, setup.networks.drafter, reward, setup.train.rollout
    return make_evaluate(*parts, setup.config.eval.samples, batches, setup.config.seed, setup.mesh)


def learn(setup: Setup, params: Params, task: str, algorithm: str, evaluate: Evaluate) -> Learned:
    """A run of one algorithm from these parameters."""
    config = ALGORITHMS[algorithm](setup.train)
    # Twice the prompts that are kept, for DAPO to choose from.
    prompts = PROMPTS * (2 if config.selection.groups else 1)
    reward = make_reward(None, setup.problems.train, setup.tokenizer, setup.mesh)
    step = make_train_step(setup.networks.policy, setup.networks.drafter, reward, config, setup.mesh)
    pipeline = PromptPipeline(setup.train_prompts, prompts, setup.config.seed)
    # Steps donate their state, and these parameters start other runs too.
    state = init_train_state(jax.tree.map(jnp.copy, params), config, setup.mesh, config.loss.kl_coefficient > 0)
    before, accuracy = evaluate(params), []
    for _ in range(setup.config.steps):
        state, _, metrics = step(state, next(pipeline))
        accuracy.append(float(metrics["reward/accuracy"]))
    return Learned(task, algorithm, before, evaluate(state.params), accuracy)


def draw(path: Path, runs: list[Learned]) -> None:
    plt = load_pyplot()
    tasks = sorted({run.task for run in runs})
    figure, axes = plt.subplots(1, len(tasks), figsize=(7 * len(tasks), 5), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for i, run in enumerate(run for run in runs if run.task == task):
            width = min(SMOOTHING, len(run.accuracy))
            curve = np.convolve(run.accuracy, np.full(width, 1 / width), "valid")
            style = ("-", "--", ":")[i // 6]
            axis.plot(np.arange(len(curve)) + width, curve, style, color=f"C{i % 6}", label=run.algorithm)
        axis.set_title(task)
        axis.set_xlabel(f"step of RL (means of {SMOOTHING})")
        axis.set_ylabel("accuracy of the rollouts")
        axis.legend(fontsize="x-small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="of RL in each run")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--json", type=Path, help="file to write every curve to")
    parser.add_argument("--plots", type=Path, help="directory to draw into")
    options = parser.parse_args(argv)
    if options.plots is not None:
        load_pyplot()
    use_compile_cache()
    print(provenance("benchmarks.algorithms"))
    print(f"accuracy on {HELD_OUT} held-out prompts before and after {options.steps} steps; learned: {MARGIN:.0%} more")
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for task, config in recipes(Path(directory), options.steps).items():
            setup = set_up(config)
            params, evaluate = warmed_up(setup, Console(quiet=True)), evaluator(setup)
            for algorithm in options.algorithms:
                run = learn(setup, params, task, algorithm, evaluate)
                said = "learned" if run.learned else "DID NOT LEARN"
                print(f"{task:8} {algorithm:24} {run.before:6.1%} {run.after:6.1%}  {said}", flush=True)
                runs.append(run)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs]) + "\n")
    if options.plots is not None:
        draw(options.plots / "algorithms.png", runs)
    return 0 if all(run.learned for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(run_program(main))
