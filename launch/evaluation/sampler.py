"""Sampling and scoring of held-out prompts, with the same rollout and reward as training."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from launch.data.batches import prompts_per_batch
from launch.data.problems import Problem
from launch.phases.compile_clock import CompileClock
from launch.phases.progress import Progress
from launch.setup.experiment import Experiment
from specjax.cost import Drafting, choose
from specjax.drafters import Drafter, NoDrafter
from specjax.environments import HostEnvironment
from specjax.keys import SeedStep, seed_step
from specjax.parallel import processes
from specjax.rewards import RewardFn, compiled_reward
from specjax.rollout.generate import place
from specjax.rollout.host_turns import HostTurns
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.stop_strings import FOUND
from specjax.types import Params, Prompts, Rollout, TrainState

# Step that keys the noise of evaluation. Training steps are not negative, so they never use it.
STEP = -1


class Sampled(NamedTuple):
    """Completions of a batch of prompts, grouped by prompt, without filler rows.

    Attributes:
        ids:     int32 [R], prompt ids.
        tokens:  int32 [R, C].
        lengths: int32 [R], completion lengths.
        stopped: bool [R], False if the budget ended the completion.
        rounds:  int32 [R], verifications.
        value:   float32 [R], reward; NaN where scoring failed.
        correct: bool [R], False where scoring failed.
        sampled: bool [R, C], tokens that the policy drew; the others of a completion were observed.
        ending:  int8 [R], its `Ending`; GOING without an environment.
        turns:   int32 [R], turns that a stop token or stop string ended.
        returns: float32 [R], reward that the environment gave; NaN if it failed.
        seconds: time of generation, without compilation.
    """

    ids: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    rounds: np.ndarray
    value: np.ndarray
    correct: np.ndarray
    sampled: np.ndarray
    ending: np.ndarray
    turns: np.ndarray
    returns: np.ndarray
    seconds: float

    def drawn(self) -> np.ndarray:
        """Return which tokens the policy drew, bool [R, C]: neither observed tokens nor padding."""
        return self.sampled & (np.arange(self.tokens.shape[1]) < self.lengths[:, None])


class Sampler:
    """Callable that samples and scores completions: (params, jitted reward, prompts) -> Sampled.

    Every call uses the same noise, keyed by (the run's seed, `step`), unless another is given. With an environment,
    call `answer_on` first.

    Attributes:
        draft_length: draft length of every round.
        rollout:      options of every rollout.
        noise:        seed and step that key every rollout's noise.
    """

    def __init__(self, experiment: Experiment, drafter: Drafter, samples: int, step: int = STEP) -> None:
        rollout = experiment.rollout_on(())
        # Automatic draft lengths are chosen for training batches. The draft length does not change the distribution.
        self.draft_length = rollout.draft_length if drafter.proposes else 0
        without_carry_over = replace(rollout, carry_over=None, max_age=None)
        self.rollout = replace(without_carry_over, group_size=samples, draft_length=self.draft_length, draft_lengths=())
        # Evaluate the policy that is trained, not an 8-bit copy of it for rollouts.
        policy = replace(experiment.networks.policy, eight_bit=None, merged=False)
        self._generate = make_generate(policy, drafter, self.rollout, experiment.mesh, experiment.rollout_fn)
        self._experiment, self._samples, self._mesh = experiment, samples, experiment.mesh
        self.noise = seed_step(experiment.config.seed, step)
        self._compile_clock = CompileClock()

    def answer_on(self, problems: Sequence[Problem]) -> None:
        """Let the environment answer completions of prompts whose ids are indices into `problems`."""
        if isinstance(self._generate, HostTurns):
            environment = self._experiment.rollout_on(problems).environment
            assert isinstance(environment, HostEnvironment)
            self._generate.environment = environment

    def start_compiling(self, params: Params, prompts: Prompts) -> None:
        """Start to compile the rollout of such prompts, as `Program.start_compiling`."""
        self._generate.start_compiling(self._read(params), prompts)

    def generate(self, params: Params, prompts: Prompts, noise: SeedStep | None = None) -> tuple[Rollout, float]:
        """Return the rollout and its seconds, without compilation."""
        self._compile_clock.lap()
        start = time.perf_counter()
        rollout = jax.block_until_ready(self._generate(self._read(params), prompts, noise or self.noise))
        seconds = time.perf_counter() - start - self._compile_clock.lap()
        return with_defaults(rollout, self.rollout), seconds

    def _read(self, params: Params) -> Params:
        """Return the parameters that the rollout reads."""
        # The drafter's memory is keyed by ids of training prompts; other prompts reuse these ids here.
        return replace(params, memory=(), draft=params.draft if self.draft_length else {})

    def __call__(self, params: Params, score: RewardFn, prompts: Prompts) -> Sampled:
        rollout, seconds = self.generate(params, prompts)
        with jax.set_mesh(self._mesh):
            reward = processes.fetch(score(rollout, place(prompts, self._mesh)))
        ids, value = np.repeat(prompts.id, self._samples), reward.value
        correct = (reward.correct > 0.5) & np.isfinite(value)
        columns = rollout.tokens, rollout.lengths, rollout.stopped, rollout.row_rounds
        turns = rollout.sampled, rollout.ending, rollout.turns, rollout.returns
        columns, turns = processes.fetch((columns, turns))
        # Filler prompts have negative ids.
        return Sampled._make([*(each[ids >= 0] for each in (ids, *columns, value, correct, *turns)), seconds])


def join_sampled(parts: Sequence[Sampled]) -> Sampled:
    """Concatenate the completions of all parts; their seconds are summed."""
    columns = zip(*(part[:-1] for part in parts), strict=True)
    return Sampled._make([*map(np.concatenate, columns), np.float64(sum(part.seconds for part in parts))])


def with_defaults(rollout: Rollout, config: RolloutConfig) -> Rollout:
    """Return the rollout with fields that a custom rollout function, or one without an environment, leaves out.

    Default of `stopped`: whether the last token is a stop token or completes a stop string. Default of
    `row_rounds`: as in plain decoding. Default of `sampled`: all tokens. `ending`, `turns` and `returns` are 0.
    """
    lengths, stopped = rollout.lengths, rollout.stopped
    if stopped is None:
        last_token = jnp.take_along_axis(rollout.tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        stopped = (lengths > 0) & jnp.isin(last_token, jnp.array(config.stop_tokens, jnp.int32))
        if config.stop_automaton is not None:
            stopped |= config.stop_automaton.after(rollout.tokens, lengths) == FOUND
    column = jnp.arange(rollout.tokens.shape[1])[None]
    none = {"ending": jnp.zeros_like(lengths, jnp.int8), "turns": jnp.zeros_like(lengths)}
    none |= {"returns": jnp.zeros_like(lengths, jnp.float32), "sampled": column < lengths[:, None]}
    given = {
        name: default if getattr(rollout, name) is None else getattr(rollout, name) for name, default in none.items()
    }
    return replace(rollout, stopped=stopped, row_rounds=rollout.verifications, **given)


def held_out_batch_size(experiment: Experiment) -> int:
    """Return the number of held-out prompts that are evaluated together: about as many sequences as a step has."""
    options = experiment.config.eval
    count = min(options.prompts, len(experiment.held_out_prompts.rows))
    return prompts_per_batch(experiment.sequences, options.samples, count, experiment.mesh)


def drafts_pay(experiment: Experiment, drafting: Drafting | None) -> bool:
    """Return whether rollouts of the run draft by now; with automatic draft lengths they may not."""
    lengths = experiment.config.rollout.draft_lengths
    return drafting is None or bool(jnp.any(jnp.array(lengths)[choose(drafting, lengths)] > 0))


class Evaluation(NamedTuple):
    """Shares of held-out completions that are correct, and that the budget ended."""

    accuracy: float
    truncated: float


class Evaluate:
    """Function from a state to its Evaluation, with `eval.samples` completions per prompt.

    A completion that could not be scored counts as wrong. Filler prompts do not count. Where the next rollout of the
    run would not draft, neither does the evaluation. Processes that do not train wait for those that do.
    """

    def __init__(self, experiment: Experiment, reward_fn: RewardFn, batches: list[Prompts]) -> None:
        networks, samples = experiment.networks, experiment.config.eval.samples
        self._drafting, self._plain = (
            Sampler(experiment, drafter, samples) for drafter in (networks.drafter, NoDrafter())
        )
        for sampler in (self._drafting, self._plain):
            sampler.answer_on(experiment.problems.held_out)
        self._experiment, self._score, self._batches = experiment, compiled_reward(reward_fn), batches

    def __call__(self, state: TrainState) -> Evaluation:
        return Evaluation(*processes.within(self._experiment.mesh, lambda: self._evaluate(state)))

    def start_compiling(self, params: Params, drafts: bool) -> None:
        """Start to compile the rollouts, as `Program.start_compiling`. drafts: whether they draft."""
        (self._drafting if drafts else self._plain).start_compiling(params, self._batches[0])

    def _evaluate(self, state: TrainState) -> Evaluation:
        sample = self._drafting if drafts_pay(self._experiment, state.drafting) else self._plain
        correct, stopped = list[np.ndarray](), list[np.ndarray]()
        with Progress("evaluation", len(self._batches), "batches") as progress:
            for prompts in self._batches:
                sampled = sample(state.params, self._score, prompts)
                correct.append(sampled.correct)
                stopped.append(sampled.stopped)
                progress.advance(tokens=int(np.sum(sampled.lengths)))
        return Evaluation(float(np.mean(np.concatenate(correct))), 1 - float(np.mean(np.concatenate(stopped))))
