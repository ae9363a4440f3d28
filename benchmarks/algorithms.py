"""Check that every algorithm of the GRPO family learns two small verifiable tasks, and plot the curves.

Run from the repository's root: python -m benchmarks.algorithms --plots DIR --json FILE

Tasks: the sums of the recipe `narrow`, with its policy; and sorting digits, with a shallower policy. On each task, a
policy warms up on worked solutions, for fewer steps than it would need to solve the task. Every algorithm starts from
that policy, with the same prompts and noise and a draft that learns online. It makes two updates per rollout, so that
ratios and their clips matter.

Control: GRPO with the rewards of other prompts, which must not learn. The exit status is 1 if the control learns or an
algorithm does not. With --json, runs that FILE already has are not repeated.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.plotting import figure, load_pyplot
from configs import narrow
from configs.algorithms import with_algorithm
from configs.override import override
from configs.schema import EvalConfig, LossOptions, RolloutOptions, RunConfig
from launch.cli.program import run_program, use_compile_cache
from launch.data.batches import fixed_batches
from launch.evaluation.sampler import Evaluate
from launch.rewards.reward_fn import make_reward
from launch.run.supervised_warmup import warm_up
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.state import fresh_state
from launch.timing import format_provenance
from specjax import Params, Policy, Prompts, Reward, Rollout, init_train_state, make_train_step, speculative_rollout
from specjax.drafters import Drafter
from specjax.keys import SeedStep
from specjax.parallel.mesh import MeshConfig
from specjax.rewards import RewardFn
from specjax.rollout.plan import RolloutConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.updates import UpdateConfig

# Rise of accuracy on held-out prompts that counts as learning. The standard error of an accuracy is at most 0.031, even
# if both samples of a prompt always agree.
MARGIN = 0.1
HELD_OUT, SAMPLES = 256, 2
SMOOTHING = 20


Change = Callable[[RunConfig], RunConfig]


def _set(algorithm: str = "grpo", **fields: object) -> Change:
    """Return a change of a recipe: a named algorithm, then values of fields, named `section__field`."""
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    return lambda config: override(with_algorithm(config, algorithm), changes)


def _two_epochs(config: RunConfig) -> RunConfig:
    # Half the learning rate, because there are twice the updates. At the full rate, accuracy on sums fell for sixty
    # steps and had risen by 9 points at the end.
    rate = config.policy_optimizer.learning_rate / 2
    return override(config, {"updates.epochs": 2, "policy_optimizer.learning_rate": rate})


CONTROL = "control: rewards of others"

ALGORITHMS: dict[str, Change] = {
    "GRPO": _set("grpo"),
    "Dr. GRPO": _set("dr_grpo"),
    "DAPO": _set("dapo", selection__overlong_buffer=4),
    "RLOO": _set("rloo"),
    "REINFORCE++": _set("reinforce_pp"),
    "REINFORCE++ baseline": _set(advantage__scale="batch"),
    "GSPO": _set("gspo"),
    "CISPO": _set("cispo"),
    "dual clip": _set(loss__dual_clip=3.0),
    **{f"KL {k} in loss": _set(loss__kl_coefficient=0.01, loss__kl_estimator=k) for k in ("k1", "k2", "k3")},
    **{
        f"KL {k} in reward": _set("rloo", loss__kl_coefficient=0.01, loss__kl_estimator=k, loss__kl_in="reward")
        for k in ("k1", "k2", "k3")
    },
    "reference that follows": _set(loss__kl_coefficient=0.01, reference_every=20),
    **{
        f"importance by {kind}": _set(loss__importance=kind, updates__recompute_old=True)
        for kind in ("token", "sequence", "icepop")
    },
    "two epochs": _two_epochs,
    CONTROL: _set("grpo"),
}


@dataclass(frozen=True)
class Learned:
    """Result of one run. Accuracies are fractions.

    Attributes:
        task:      Name of the task.
        algorithm: Name in ALGORITHMS.
        before:    Accuracy on held-out prompts before RL.
        after:     Accuracy on held-out prompts after RL.
        gap:       Mean gap between the log-probs of rollout and training, over tokens and steps.
        accuracy:  Accuracy of each step's rollout.
    """

    task: str
    algorithm: str
    before: float
    after: float
    gap: float
    accuracy: list[float]

    @property
    def learned(self) -> bool:
        return self.after - self.before >= MARGIN

    @property
    def as_expected(self) -> bool:
        return self.learned != (self.algorithm == CONTROL)


def sorting(path: Path, count: int = 4096) -> None:
    """Write a JSONL file of problems that ask to sort digits: the answer to `4172=` is `1247`."""
    source, numbers = random.Random(0), {}
    while len(numbers) < count:
        numbers["".join(source.choices("123456789", k=source.randint(4, 7)))] = None
    lines = [{"question": f"{digits}=", "answer": "".join(sorted(digits))} for digits in numbers]
    path.write_text("".join(json.dumps(line | {"solution": f"#{line['answer']}"}) + "\n" for line in lines))


def recipes(directory: Path) -> dict[str, RunConfig]:
    """Return a GRPO recipe for each task."""
    sums = replace(
        narrow.config,
        steps=200,
        rollout=replace(narrow.config.rollout, group_size=8),
        loss=LossOptions(aggregate="sequence", clip_high=0.2),
        updates=UpdateConfig(minibatches=2),
        policy_optimizer=replace(narrow.config.policy_optimizer, learning_rate=1e-4),
        eval=EvalConfig(prompts=HELD_OUT, samples=SAMPLES),
    )
    sorting(directory / "sorting.jsonl")
    fields = dict(train=str(directory / "sorting.jsonl"), solution_field="solution", arithmetic=None)
    shape = replace(sums.model.architecture, num_layers=4, hidden_size=64)  # pyright: ignore[reportArgumentType]
    sorts = replace(
        sums,
        steps=120,
        mesh=MeshConfig(),
        model=replace(sums.model, architecture=shape, feature_layers=(0, 2, 3)),
        data=replace(sums.data, prompts=8, **fields),
        rollout=RolloutOptions(group_size=8, max_new_tokens=28, draft_length=2),
        policy_optimizer=OptimizerConfig(learning_rate=1e-4, b2=0.99, warmup_steps=10),
        draft_optimizer=OptimizerConfig(learning_rate=3e-3, b2=0.98, warmup_steps=10),
        warmup=replace(sums.warmup, steps=150),
    )
    return {"sums": sums, "sorting": sorts}


def evaluator(experiment: Experiment) -> Evaluate:
    """Return a function that measures accuracy on held-out prompts."""
    reward = make_reward(None, experiment.problems.held_out, experiment.tokenizer)
    return Evaluate(experiment, reward, fixed_batches(experiment.held_out_prompts, experiment.config.eval.prompts))


def coarse_rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Generate with weights rounded to bfloat16, so that rollout and training differ as with a separate engine."""
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params.policy)
    return speculative_rollout(policy, drafter, replace(params, policy=coarse), prompts, seed_step, config)


def of_others(reward_fn: RewardFn) -> RewardFn:
    """Return a reward function that gives each group the rewards of the group before it."""

    def reward(rollout: Rollout, prompts: Prompts) -> Reward:
        scored = reward_fn(rollout, prompts)
        return replace(scored, value=jnp.roll(scored.value, len(scored.value) // len(prompts.lengths)))

    return reward


def begin(experiment: Experiment) -> tuple[Params, Evaluate, float]:
    """Warm up. Return the parameters that every run of a task starts from, the evaluator, and their accuracy."""
    params, evaluate = warm_up(experiment), evaluator(experiment)
    return params, evaluate, evaluate(fresh_state(experiment, params, None)).accuracy


def learn(
    experiment: Experiment, task: str, algorithm: str, params: Params, evaluate: Evaluate, before: float
) -> Learned:
    """Run one algorithm from these parameters, whose accuracy is `before`."""
    config = ALGORITHMS[algorithm](experiment.config)
    reward = make_reward(None, experiment.problems.train, experiment.tokenizer)
    if algorithm == CONTROL:
        reward = of_others(reward)
    rollout_fn = coarse_rollout if config.updates.recompute_old else speculative_rollout
    step = make_train_step(
        experiment.networks.policy, experiment.networks.drafter, reward, config, experiment.mesh, rollout_fn
    )
    pipeline = experiment.train_batches()
    # Copied, because steps donate their state and other runs start from the same parameters.
    state = init_train_state(jax.tree.map(jnp.copy, params), config, experiment.mesh, config.loss.kl_coefficient > 0)
    accuracy, gaps = [], []
    for _ in range(experiment.config.steps):
        state, _, metrics = step(state, next(pipeline))
        accuracy.append(float(metrics["reward/accuracy"]))
        gaps.append(float(metrics["rollout/logprob_gap_mean"]))
    return Learned(task, algorithm, before, evaluate(state).accuracy, float(np.mean(gaps)), accuracy)


def draw(path: Path, runs: list[Learned]) -> None:
    """Plot the accuracy curves of all runs, one panel per task."""
    tasks = sorted({run.task for run in runs})
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure(path, (7 * len(tasks), 6), len(tasks)) as axes:
        for axis, task in zip(np.atleast_1d(axes), tasks, strict=True):
            for i, run in enumerate(run for run in runs if run.task == task):
                width = min(SMOOTHING, len(run.accuracy))
                curve = np.convolve(run.accuracy, np.full(width, 1 / width), "valid")
                style = ("-", "--", ":", "-.")[i // 6]
                axis.plot(np.arange(len(curve)) + width, curve, style, color=f"C{i % 6}", label=run.algorithm)
            axis.set_title(task)
            axis.set_xlabel(f"step of RL (means of {SMOOTHING})")
            axis.set_ylabel("accuracy of the rollouts")
        # All panels have the same lines.
        lines = np.atleast_1d(axes)[0].get_legend_handles_labels()
        np.atleast_1d(axes)[0].figure.legend(*lines, loc="outside lower center", fontsize="small", ncols=6)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="RL steps per run; by default as set for each task")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), help="to run")
    parser.add_argument("--json", type=Path, help="file to write all curves to")
    parser.add_argument("--plots", type=Path, help="directory for the plot")
    options = parser.parse_args(argv)
    if options.plots is not None:
        load_pyplot()
    use_compile_cache()
    runs, known = [], {}
    if options.json is not None and options.json.exists():
        known = {(run["task"], run["algorithm"]): Learned(**run) for run in json.loads(options.json.read_text())}
    with tempfile.TemporaryDirectory() as directory:
        setups = {
            task: build_experiment(replace(config, steps=options.steps or config.steps))
            for task, config in recipes(Path(directory)).items()
        }
        # After the first mesh, which sets the number of devices.
        print(format_provenance("benchmarks.algorithms"))
        print(f"accuracy of {SAMPLES} samples of {HELD_OUT} held-out prompts, before and after")
        print(f"learned: after is at least {100 * MARGIN:.0f} points above before")
        print("gap: mean difference of the log-probs of rollout and training, which importance weights correct")
        for task, experiment in setups.items():
            start = cache(partial(begin, experiment))
            for algorithm in options.algorithms:
                run = known.get((task, algorithm))
                if run is None or len(run.accuracy) != experiment.config.steps:
                    run = learn(experiment, task, algorithm, *start())
                verdict = "learned" if run.learned else "did not learn"
                warning = "" if run.as_expected else ": NOT AS IT SHOULD"
                shares, steps = f"{run.before:6.1%} {run.after:6.1%}", f"{experiment.config.steps} steps"
                print(f"{task:8} {steps} {algorithm:26} {shares}  gap {run.gap:.1e}  {verdict}{warning}", flush=True)
                runs.append(run)
                known[task, algorithm] = run
                if options.json is not None:
                    options.json.write_text(json.dumps([asdict(run) for run in known.values()]) + "\n")
    if options.plots is not None:
        draw(options.plots / "algorithms.png", runs)
    return 0 if all(run.as_expected for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(run_program(main))
