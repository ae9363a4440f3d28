"""Measure on-policy distillation: a policy learns from a teacher at the tokens that it draws, beside GRPO.

Run from the repository's root: python -m benchmarks.teacher --teacher DIR --json FILE

DIR is the export of a run of the recipe `tiny` that was trained to its end. A policy warms up as `tiny` says, and a
draft is distilled from its answers. Each arm (ARMS) starts from both, with the same prompts and noise. GRPO learns from
rewards, and its divergence from the teacher is only measured. The other arms learn without rewards, from the exact
reverse divergence, for half as many steps. If the teacher's run had the recipe's seed, GRPO is the same run again.

Every few steps, held-out prompts are answered by plain decoding: the table has the accuracy, the mean of KL(policy ||
teacher) over the tokens of these answers, in nats, and the draft's mean acceptance length in the rollouts since the row
before. With --json, arms that FILE already has are not run again.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.plotting import figure, label
from configs import tiny
from configs.override import override
from launch.cli.program import run_program, use_compile_cache
from launch.distillation.trainer import distill
from launch.evaluation.sampler import Sampler
from launch.rewards.reward_fn import make_reward
from launch.run.supervised_warmup import warm_up
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.teacher import Teacher
from launch.timing import format_provenance
from specjax import NoDrafter, Params, Prompts, Rollout, init_train_state
from specjax.cache import tokens_at
from specjax.program import Program
from specjax.rewards import compiled_reward
from specjax.rollout.generate import place
from specjax.train.batch import join_completions
from specjax.train.loss_context import LossContext
from specjax.train.train_step import TrainStep
from specjax.types import PyTree

REACHED = 0.9  # share of the teacher's accuracy
GRPO = "GRPO"
_TAUGHT: dict[str, object] = {"teacher.rewards": False, "policy_optimizer.learning_rate": 1e-4}
# Changes of the recipe.
ARMS: dict[str, dict[str, object]] = {
    "distilled": _TAUGHT,
    "distilled, draft frozen": _TAUGHT | {"draft_training.mode": "frozen"},
    GRPO: {"teacher.weight": 0.0},
    "distilled, at 4e-5": {"teacher.rewards": False},
}
HEADER = f"{'arm':23} step  accuracy  divergence  acceptance length"


@dataclass(frozen=True)
class Arm:
    """Result of an arm.

    Attributes:
        name:       Name in ARMS.
        at:         Steps after which it was measured; the first is 0.
        accuracy:   Accuracy on held-out prompts at each of them, a fraction.
        divergence: Mean KL(policy || teacher) of a token of their answers, in nats.
        acceptance: Acceptance length of each step's rollout.
    """

    name: str
    at: list[int]
    accuracy: list[float]
    divergence: list[float]
    acceptance: list[float]

    def means(self) -> list[float]:
        """Return the mean acceptance length between each two measurements."""
        return [statistics.fmean(self.acceptance[begin:end]) for begin, end in pairwise(self.at)]

    def newest(self) -> str:
        """Return the newest row of its table."""
        length = f"{self.means()[-1]:17.2f}" if len(self.at) > 1 else ""
        values = f"{self.accuracy[-1]:8.1%}  {self.divergence[-1]:10.4f}  {length}"
        return f"{self.name:23} {self.at[-1]:4}  {values}".rstrip()

    def steps_to(self, accuracy: float) -> str:
        """Return the first measured step with this accuracy."""
        reached = (at for at, found in zip(self.at, self.accuracy, strict=True) if found >= accuracy)
        return str(next(reached, f"not within {self.at[-1]}"))


class HeldOut:
    """Function from parameters to the accuracy on held-out prompts, and the divergence from the teacher there."""

    def __init__(self, experiment: Experiment, teacher: Teacher) -> None:
        self._mesh, self._teacher, held_out = experiment.mesh, teacher.params, experiment.held_out_prompts
        self._prompts = held_out.batch(np.arange(len(held_out.rows)))
        self._sampler = Sampler(experiment, NoDrafter(), samples=1)
        self._score = compiled_reward(make_reward(None, experiment.problems.held_out, experiment.tokenizer))
        policy, law = experiment.networks.policy, experiment.config.rollout.law
        context = LossContext(policy, NoDrafter(), law, teacher=teacher.policy)

        def diverge(policy: PyTree, own: PyTree, prompts: Prompts, rollout: Rollout) -> Float[Array, ""]:
            rows = join_completions(prompts, rollout, jnp.zeros(len(rollout.lengths)))
            at = rows.places(rollout.tokens.shape[1])
            compared = context.compare(policy, context.forward(policy, rows), own, rows, at)
            drawn = tokens_at(rows.completion, at)
            return jnp.sum(jnp.where(drawn, compared.reverse, 0.0)) / jnp.sum(drawn, dtype=jnp.float32)

        self._diverge = Program(diverge, experiment.mesh)

    def answer(self, params: Params) -> tuple[float, Rollout]:
        """Return the accuracy and the answers."""
        rollout, _ = self._sampler.generate(params, self._prompts)
        with jax.set_mesh(self._mesh):
            correct = np.asarray(self._score(rollout, place(self._prompts, self._mesh)).correct) > 0.5
        return float(np.mean(correct)), rollout

    def __call__(self, params: Params) -> tuple[float, float]:
        accuracy, rollout = self.answer(params)
        return accuracy, float(self._diverge(params.policy, self._teacher, self._prompts, rollout))


def learn(experiment: Experiment, name: str, params: Params, teacher: PyTree, held_out: HeldOut, every: int) -> Arm:
    """Run an arm from these parameters, and print its table."""
    config, shape = override(experiment.config, ARMS[name]), (experiment.config.data.prompts, experiment.prompt_width)
    reward = make_reward(None, experiment.problems.train, experiment.tokenizer)
    step, pipeline = TrainStep(experiment.stages(reward, config)), experiment.train_batches()
    # Copied, because steps donate their state and other arms start from the same parameters.
    params, teacher = jax.tree.map(jnp.copy, (params, teacher))
    state = init_train_state(params, config, experiment.mesh, prompts=shape, teacher=teacher)
    arm = Arm(name, [], [], [], [])
    for number in range((config.steps if name == GRPO else config.steps // 2) + 1):
        if number:
            state, _, metrics = step(state, next(pipeline))
            arm.acceptance.append(float(metrics["rollout/acceptance_length"]))
        if number % every == 0:
            accuracy, divergence = held_out(state.params)
            arm.at.append(number)
            arm.accuracy.append(accuracy)
            arm.divergence.append(divergence)
            print(arm.newest(), flush=True)
    return arm


def draw(path: Path, arms: Sequence[Arm], accuracy: float) -> None:
    """Plot accuracy, divergence and acceptance length over the steps. accuracy: the teacher's."""
    with figure(path, (13, 3.8), columns=3) as (left, middle, right):
        for arm in arms:
            left.plot(arm.at, arm.accuracy, marker=".", label=arm.name)
            middle.semilogy(arm.at, arm.divergence, marker=".", label=arm.name)
            right.plot(arm.at[1:], arm.means(), marker=".", label=arm.name)
        left.axhline(accuracy, color="grey", linewidth=1, label="teacher")
        label(left, "step", "held-out accuracy")
        label(middle, "step", "KL(policy || teacher), nats a token")
        label(right, "step", "acceptance length")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="directory of the teacher, in Hugging Face layout")
    parser.add_argument("--steps", type=int, default=tiny.config.steps, help="steps of GRPO; others take half as many")
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements")
    parser.add_argument("--json", type=Path, help="file to write all arms to")
    parser.add_argument("--plot", type=Path, help="file for the plot")
    options = parser.parse_args(argv)
    use_compile_cache()
    arms: dict[str, Arm] = {}
    if options.json is not None and options.json.exists():
        arms = {arm["name"]: Arm(**arm) for arm in json.loads(options.json.read_text())}
    changes = {"steps": options.steps, "teacher.kind": "network", "teacher.path": options.teacher}
    experiment = build_experiment(override(tiny.config, changes), takes_steps=True)
    print(format_provenance("benchmarks.teacher"))
    teacher = experiment.teacher
    assert teacher is not None
    answering = replace(experiment, networks=replace(experiment.networks, policy=teacher.policy))
    best, _ = HeldOut(answering, teacher).answer(Params(teacher.params, {}))
    print(f"the teacher's accuracy on {len(experiment.held_out_prompts.rows)} held-out prompts: {best:.1%}", flush=True)
    params = warm_up(experiment)
    params = replace(params, draft=distill(experiment, params).draft)
    held_out = HeldOut(experiment, teacher)
    print(HEADER, flush=True)
    for name in [name for name in ARMS if name not in arms]:
        arms[name] = learn(experiment, name, params, teacher.params, held_out, options.every)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(arm) for arm in arms.values()]) + "\n")
    for name, arm in arms.items():
        print(f"{name}: {REACHED:.0%} of the teacher's accuracy after {arm.steps_to(REACHED * best)} steps")
    if options.plot is not None:
        draw(options.plot, list(arms.values()), best)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
