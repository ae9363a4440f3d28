"""The arms of a comparison: the same steps without a draft, at each draft length, and at what the costs choose."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.build.experiment import Experiment
from launch.build.state import fresh_state
from launch.data.batches import PromptPipeline
from specjax.cost import Drafting, choose, remember
from specjax.drafters import NoDrafter
from specjax.rewards import RewardFn
from specjax.rollout.generate import Choice, place
from specjax.train.adaptation import DraftTrainingConfig
from specjax.train.config import TrainConfig
from specjax.train.metrics import Metrics, rollout_metrics
from specjax.train.timed_step import StagedStep
from specjax.train.train_step import init_train_state
from specjax.types import Params, Rollout, TrainState

PLAIN, AUTOMATIC = "autoregressive", "automatic"


@dataclass(frozen=True)
class Turn:
    """One step of an arm.

    seconds: of each stage, in their order. step_s: of all of it, on a clock of its own.
    ids:     int32 [N], of the prompts.
    alpha:   tokens emitted a verification, live rows only.
    """

    seconds: dict[str, float]
    step_s: float
    ids: np.ndarray
    rollout: Rollout
    alpha: float


class Arm:
    """Steps of a run, at the draft lengths that are `chosen` for its phases, indices; None without a draft."""

    def __init__(
        self,
        experiment: Experiment,
        step: StagedStep,
        start: TrainState,
        chosen: Sequence[int] | None,
        automatic: bool = False,
    ) -> None:
        self.step, self.start, self.chosen, self.automatic = step, start, chosen, automatic
        self._experiment, self._everywhere = experiment, NamedSharding(experiment.mesh, P())
        self._choice: Choice = None if chosen is None else self._put(np.asarray(chosen, np.int32))
        self._pipeline, self._count = self._prompts(), 0

    def turn(self) -> Turn:
        """A step from the start, on the next prompts. What it updates is a copy, made before the clock starts."""
        state = replace(jax.tree.map(jnp.copy, self.start), step=self._put(np.int32(self._count)))
        self._count += 1
        jax.block_until_ready(state)
        start = time.perf_counter()
        prompts = jax.block_until_ready(place(next(self._pipeline), self._experiment.mesh))
        data_s = time.perf_counter() - start
        (_, rollout, _), seconds = self.step(state, prompts, self._choice)
        step_s = time.perf_counter() - start
        alpha = float(rollout_metrics(rollout)["rollout/acceptance_length"])
        return Turn({"data": data_s} | seconds, step_s, np.asarray(prompts.id), rollout, alpha)

    def train(self, steps: int) -> Iterator[tuple[np.ndarray, Rollout, Metrics, float]]:
        """Steps that each go on from the one before, on the run's prompts from the first on; `automatic` chooses anew.

        Yields the prompts' ids, the rollout on the host, metrics and the seconds of all stages.
        """
        state, chosen = jax.tree.map(jnp.copy, self.start), None if self.automatic else self._choice
        for prompts in itertools.islice(self._prompts(), steps):
            (state, rollout, metrics), seconds = self.step(state, prompts, chosen)
            yield np.asarray(prompts.id), jax.device_get(rollout), metrics, sum(seconds.values())

    def _prompts(self) -> PromptPipeline:
        return PromptPipeline(
            self._experiment.train_prompts, self._experiment.config.data.prompts, self._experiment.config.seed
        )

    def _put(self, value: np.ndarray | np.int32) -> jax.Array:
        return jax.device_put(value, self._everywhere)


def plain_config(config: TrainConfig) -> TrainConfig:
    """Of a run of the same steps that has no draft."""
    rollout = replace(config.rollout, draft_length=0, draft_lengths=())
    return replace(config, rollout=rollout, draft_training=DraftTrainingConfig(mode="frozen"))


def make_arms(
    experiment: Experiment, reward_fn: RewardFn, params: Params, seconds: np.ndarray
) -> tuple[dict[str, Arm], Drafting]:
    """By name: `autoregressive`, which keeps and trains no draft, each draft length above 0 and `automatic`.

    experiment: a run that chooses among the draft lengths. seconds: [phases, lengths], of a round. All arms but one
    are one program, for which a draft length is data. Each has taken its first step, by which programs are compiled and
    by which `automatic` knows what is accepted; what it chose by is returned too.
    """
    lengths, policy, everywhere = (
        experiment.train.rollout.lengths,
        experiment.networks.policy,
        NamedSharding(experiment.mesh, P()),
    )
    plain = plain_config(experiment.train)
    without = init_train_state(
        Params(params.policy, {}), plain, experiment.mesh, with_reference=plain.loss.kl_coefficient > 0
    )
    drafted = fresh_state(experiment, replace(params, memory=experiment.networks.params.memory), seconds)
    # Of one policy, and nothing is updated in place: once is enough.
    moments = replace(drafted.optimizer, policy=without.optimizer.policy)
    drafted = replace(drafted, optimizer=moments, reference=without.reference)
    arms = {PLAIN: Arm(experiment, StagedStep(policy, NoDrafter(), reward_fn, plain, experiment.mesh), without, None)}
    arms[PLAIN].turn()
    step = StagedStep(policy, experiment.networks.drafter, reward_fn, experiment.train, experiment.mesh)
    drafting: Drafting | None = drafted.drafting
    assert drafting is not None
    for index, length in enumerate(lengths):
        if length > 0:
            arms[str(length)] = Arm(experiment, step, drafted, [index] * len(experiment.phases))
            drafting = remember(drafting, arms[str(length)].turn().rollout, None, lengths)
    drafted = replace(drafted, drafting=jax.device_put(drafting, everywhere))
    arms[AUTOMATIC] = Arm(experiment, step, drafted, choose(drafting, lengths).tolist(), automatic=True)
    arms[AUTOMATIC].turn()
    return arms, drafting
