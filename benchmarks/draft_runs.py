"""Measurements of benchmarks.draft_findings: drafts with different starts, at several lengths and during RL."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench.rollout_timer import RolloutTime, RolloutTimer
from launch.acceptance.held_out import AcceptanceMeter
from launch.data.responses import Answers, answers_of
from launch.distillation.trainer import distill
from launch.rewards.reward_fn import make_reward
from launch.setup.experiment import Experiment
from launch.timing import interleaved, interval
from specjax import NoDrafter, Params, Prompts, init_train_state, make_generate, make_train_step, seed_step
from specjax.rollout.generate import make_prepare, per_shard
from specjax.train.draft.schedule import DraftTrainingConfig

# Draft training during RL: (schedule, fraction of the recipe's learning rate).
MODES = {
    "frozen": (DraftTrainingConfig(mode="frozen"), 1.0),
    "online": (DraftTrainingConfig(), 1.0),
    "gentle": (DraftTrainingConfig(), 0.1),
    "every 5": (DraftTrainingConfig(every=5), 1.0),
    "replay 2": (DraftTrainingConfig(replay=2), 1.0),
}


@dataclass(frozen=True)
class DraftedRollouts:
    """Speed of generation with one draft at one draft length, on held-out prompts.

    Attributes:
        start:        Start of the draft: in-domain, generic or random.
        draft_length: k.
        alpha:        Acceptance length.
        cost:         Median cost of a round, over one without drafting in the same turn.
        speedup:      Median speed-up over draft length 0 in the same turn, and its 95% interval: (median, low, high).
    """

    start: str
    draft_length: int
    alpha: float
    cost: float
    speedup: tuple[float, float, float]


@dataclass(frozen=True)
class DraftRun:
    """Result of an RL run.

    Attributes:
        start:    Start of the draft.
        mode:     Name in MODES.
        alpha:    Acceptance length of each step's rollout.
        accuracy: Accuracy of each step's rollout.
        tokens:   Hash of the tokens of each step's rollout.
    """

    start: str
    mode: str
    alpha: list[float]
    accuracy: list[float]
    tokens: list[str]


@dataclass(frozen=True)
class Position:
    """Acceptance at one position of a draft: how often its token could be emitted, and how often it was."""

    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Return accepted over drafted."""
        return self.accepted / self.drafted

    @property
    def error(self) -> float:
        """Return the standard error of the rate, as if draws were independent."""
        return (self.rate * (1 - self.rate) / self.drafted) ** 0.5


def generic_answers(experiment: Experiment, params: Params, number: int) -> Answers:
    """Return the policy's answers to `number` strings of random tokens, as long as the task's prompts."""
    rng, width = np.random.default_rng(0), experiment.prompt_width
    ordinary = np.setdiff1d(np.arange(experiment.networks.policy.vocab_size), experiment.tokenizer.stop_tokens)
    lengths = rng.choice([len(row) for row in experiment.train_prompts.rows], number)
    tokens = np.where(np.arange(width) < lengths[:, None], rng.choice(ordinary, (number, width)), 0)
    tokens, lengths, ids = (jnp.asarray(x, jnp.int32) for x in (tokens, lengths, np.arange(number)))
    prompts = Prompts(tokens, lengths, ids)
    options = replace(experiment.config.rollout, group_size=1, draft_length=0)
    rollout = make_generate(experiment.networks.policy, NoDrafter(), options, experiment.mesh)(
        params, prompts, seed_step(1, 0)
    )
    return answers_of(prompts, rollout)


def initial_drafts(experiment: Experiment, params: Params) -> dict[str, Params]:
    """Return the drafts to compare, by start. All that are distilled get as many answers and steps."""
    drafts = {"in-domain": None, "generic": generic_answers(experiment, params, experiment.config.distill.answers)}
    trained = {}
    for name, answers in drafts.items():
        print(f"distilling the draft {name}", flush=True)
        trained[name] = replace(params, draft=distill(experiment, params, given=answers).draft)
    return trained | {"random": params}


def by_draft_length(
    experiment: Experiment, drafts: Mapping[str, Params], lengths: Sequence[int], repeats: int
) -> list[DraftedRollouts]:
    """Time every draft at every length, paired with decoding without a draft on the same prompts, slots and noise."""
    rows = np.arange(experiment.sequences)
    prompts = experiment.held_out_prompts.batch(rows % len(experiment.held_out_prompts.rows))
    networks, turns = experiment.networks, count()

    def cell(prepared: Callable[[], Params], length: int) -> Callable[[], tuple[RolloutTime, RolloutTime]]:
        # A program per length, because in each round a drafter processes as many positions as the longest length needs.
        config = replace(experiment.config.rollout, group_size=1, draft_lengths=(0, length))
        generate = per_shard(experiment.rollout_fn, networks.policy, networks.drafter, config, experiment.mesh)
        # Indices of the draft length in each phase: 0, and `length`.
        plain = np.zeros(len(experiment.phases), np.int32)
        timer = RolloutTimer(generate, networks.policy, prepared, [prompts], experiment.mesh, plain)

        def measure() -> tuple[RolloutTime, RolloutTime]:
            turn = next(turns)
            return timer.measure(turn, plain), timer.measure(turn, plain + 1)

        return measure

    ready = {
        name: partial(make_prepare(networks.policy, networks.drafter, params), params)
        for name, params in drafts.items()
    }
    cells = {(name, k): cell(prepared, k) for name, prepared in ready.items() for k in lengths}
    interleaved(cells, 1)
    timings = []
    for (name, k), pairs in interleaved(cells, repeats).items():
        cost = np.median([drafted.seconds_per_round / plain.seconds_per_round for plain, drafted in pairs])
        alpha = np.mean([drafted.acceptance_length for _, drafted in pairs])
        speedup = interval([plain.seconds / drafted.seconds for plain, drafted in pairs])
        timings.append(DraftedRollouts(name, k, float(alpha), float(cost), speedup))
    return timings


def reinforce(experiment: Experiment, params: Params, start: str, mode: str) -> DraftRun:
    """Run RL from these parameters. The draft trains on its rollouts as MODES[mode] says."""
    draft_training, rate_factor = MODES[mode]
    optimizer = replace(
        experiment.config.draft_optimizer, learning_rate=rate_factor * experiment.config.draft_optimizer.learning_rate
    )
    config = replace(experiment.config, draft_training=draft_training, draft_optimizer=optimizer)
    reward = make_reward(None, experiment.problems.train, experiment.tokenizer)
    step = make_train_step(experiment.networks.policy, experiment.networks.drafter, reward, config, experiment.mesh)
    pipeline = experiment.train_batches()
    shape = experiment.config.data.prompts, experiment.prompt_width
    # Copied, because steps donate their state and other runs start from the same parameters.
    state = init_train_state(jax.tree.map(jnp.copy, params), config, experiment.mesh, prompts=shape)
    run = DraftRun(start, mode, [], [], [])
    for _ in range(experiment.config.steps):
        state, rollout, metrics = step(state, next(pipeline))
        run.alpha.append(float(metrics["rollout/acceptance_length"]))
        run.accuracy.append(float(metrics["reward/accuracy"]))
        run.tokens.append(hashlib.sha1(np.asarray(rollout.tokens).tobytes()).hexdigest()[:8])
    return run


def first_difference(runs: Sequence[DraftRun]) -> int | None:
    """Return the first step at which the runs' tokens differ, counted from 1; None if they never do."""
    different = (i for i, tokens in enumerate(zip(*(run.tokens for run in runs), strict=True)) if len(set(tokens)) > 1)
    return next((i + 1 for i in different), None)


def by_position(experiment: Experiment, drafts: Mapping[str, Params]) -> dict[str, list[Position]]:
    """Return the acceptance at each position on held-out prompts, not conditional on earlier positions."""
    positions = {}
    for name, params in drafts.items():
        temperature = experiment.config.rollout.law.temperature
        counts = AcceptanceMeter(experiment, experiment.networks.drafter, params, temperature).measure().counts
        positions[name] = [Position(*pair) for pair in zip(counts.drafted, counts.accepted, strict=True)]
    return positions
