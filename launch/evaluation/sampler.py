"""Completions of held-out prompts and their scores, through the same rollout and reward as training."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from launch.build.experiment import Experiment
from launch.cli.compilation import CompileClock
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import seed_step
from specjax.parallel.mesh import batch_shards
from specjax.rewards import RewardFn
from specjax.rollout.generate import make_generate
from specjax.types import Params, Prompts, Rollout

Evaluate = Callable[[Params], float]
# The step that keys the noise, which no training step has.
STEP = -1


class Sampled(NamedTuple):
    """Completions of a batch of prompts, grouped by prompt, without filler.

    ids:     int32 [R], of their prompts. tokens: int32 [R, C]. lengths: int32 [R]. stopped: bool [R].
    rounds:  int32 [R], verifications.
    value:   float32 [R], NaN where scoring failed. correct: bool [R], False where it failed.
    seconds: of generation, once compiled.
    """

    ids: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    rounds: np.ndarray
    value: np.ndarray
    correct: np.ndarray
    seconds: float


def prompts_per_batch(sequences: int, samples: int, prompts: int, mesh: Mesh) -> int:
    """Return how many prompts to sample from at a time, for about so many sequences; a multiple of the data shards."""
    shards = batch_shards(mesh)
    return -(-min(max(sequences // samples, 1), prompts) // shards) * shards


class Sampler:
    """Samples completions and scores them: (parameters, jitted reward, prompts) -> Sampled, without filler.

    The noise is that of (the run's seed, step) at every call: two calls differ by their parameters and prompts alone.
    `draft_length` is the one that it samples at.
    """

    def __init__(self, experiment: Experiment, drafter: Drafter, samples: int, step: int = STEP) -> None:
        rollout = experiment.config.rollout
        # A run that chooses among draft lengths chooses for other batches than these. Any has the same law.
        self.draft_length = 0 if isinstance(drafter, NoDrafter) else rollout.draft_length
        config = replace(rollout, group_size=samples, draft_length=self.draft_length, draft_lengths=())
        self._generate = make_generate(
            experiment.networks.policy, drafter, config, experiment.mesh, experiment.rollout_fn
        )
        self._samples, self._mesh, self._stop_tokens = samples, experiment.mesh, config.stop_tokens
        self._noise = seed_step(experiment.config.seed, step)
        self._compiling = CompileClock()

    def generate(self, params: Params, prompts: Prompts) -> tuple[Rollout, float]:
        """Return the rollout, and the seconds it took without compiling."""
        # What a drafter remembers it knows by the ids of other prompts.
        params = replace(params, memory=())
        self._compiling.lap()
        start = time.perf_counter()
        rollout = jax.block_until_ready(self._generate(params, prompts, self._noise))
        seconds = time.perf_counter() - start - self._compiling.lap()
        return with_defaults(rollout, self._stop_tokens), seconds

    def __call__(self, params: Params, score: RewardFn, prompts: Prompts) -> Sampled:
        rollout, seconds = self.generate(params, prompts)
        with jax.set_mesh(self._mesh):
            reward = score(rollout, jax.tree.map(jnp.asarray, prompts))
        ids, value = np.repeat(prompts.id, self._samples), np.asarray(reward.value)
        correct = (np.asarray(reward.correct) > 0.5) & np.isfinite(value)
        rows = ids, rollout.tokens, rollout.lengths, rollout.stopped, rollout.row_rounds, value, correct
        return Sampled._make([*(np.asarray(row)[ids >= 0] for row in rows), seconds])


def with_defaults(rollout: Rollout, stop_tokens: tuple[int, ...]) -> Rollout:
    """Fill in what your own rollout function may leave out: `stopped`, and `row_rounds` of plain decoding."""
    lengths, stopped = rollout.lengths, rollout.stopped
    last = jnp.take_along_axis(rollout.tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    found = (lengths > 0) & jnp.isin(last, jnp.array(stop_tokens, jnp.int32))
    return replace(rollout, stopped=found if stopped is None else stopped, row_rounds=rollout.verifications)


def make_evaluate(experiment: Experiment, reward_fn: RewardFn, batches: list[Prompts]) -> Evaluate:
    """Return params -> the fraction of correct completions over `eval.samples` of every prompt, filler left out.

    A completion that could not be scored counts as wrong.
    """
    sample = Sampler(experiment, experiment.networks.drafter, experiment.config.eval.samples)
    score = jax.jit(reward_fn)

    def evaluate(params: Params) -> float:
        return float(np.mean(np.concatenate([sample(params, score, prompts).correct for prompts in batches])))

    return evaluate
