"""The variants of a step to compare: without a draft, at each draft length, and at the length that costs choose."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.build.experiment import Experiment
from launch.build.state import fresh_state
from launch.costs.cost_table import cell_timer, load_cells
from specjax.cost import Drafting, choose, round_seconds, update_drafting
from specjax.drafters import NoDrafter
from specjax.rewards import RewardFn
from specjax.rollout.generate import Choice, place
from specjax.train.adaptation import DraftTrainingConfig
from specjax.train.config import TrainConfig
from specjax.train.metrics import Metrics
from specjax.train.stages import Stages
from specjax.train.timed_step import StagedStep
from specjax.train.train_step import init_train_state
from specjax.types import Params, Rollout, TrainState

PLAIN, AUTOMATIC = "autoregressive", "automatic"


@dataclass(frozen=True)
class StepTime:
    """One timed step of a variant.

    seconds: seconds of each stage, in order. step_s: seconds of the whole step.
    ids:     prompt ids, int32 [N].
    """

    seconds: dict[str, float]
    step_s: float
    ids: np.ndarray
    rollout: Rollout
    metrics: Metrics


class Variant:
    """Steps of a run at fixed draft lengths.

    chosen: index of the draft length for each phase; None without a draft.
    """

    def __init__(
        self, experiment: Experiment, step: StagedStep, start: TrainState, chosen: Sequence[int] | None
    ) -> None:
        self.step, self.start, self.chosen = step, start, chosen
        self._experiment, self._everywhere = experiment, NamedSharding(experiment.mesh, P())
        self._choice: Choice = None if chosen is None else self._put(np.asarray(chosen, np.int32))
        self._pipeline, self._count = experiment.train_batches(), 0

    def time_step(self) -> StepTime:
        """Time a step from the start, on the next prompts. It updates a copy, made before the clock starts."""
        state = replace(jax.tree.map(jnp.copy, self.start), step=self._put(np.int32(self._count)))
        self._count += 1
        jax.block_until_ready(state)
        start = time.perf_counter()
        prompts = jax.block_until_ready(place(next(self._pipeline), self._experiment.mesh))
        data_s = time.perf_counter() - start
        (_, rollout, metrics), seconds = self.step(state, prompts, self._choice)
        step_s = time.perf_counter() - start
        return StepTime({"data": data_s} | seconds, step_s, np.asarray(prompts.id), rollout, metrics)

    def train(self, steps: int) -> Iterator[StepTime]:
        """Train from the initial state on the run's first prompts; each step chooses its draft lengths.

        Yields each step with its rollout on the host. Its time excludes loading data.
        """
        state = jax.tree.map(jnp.copy, self.start)
        for prompts in itertools.islice(self._experiment.train_batches(), steps):
            (state, rollout, metrics), seconds = self.step(state, prompts)
            yield StepTime(seconds, sum(seconds.values()), np.asarray(prompts.id), jax.device_get(rollout), metrics)

    def _put(self, value: np.ndarray | np.int32) -> jax.Array:
        return jax.device_put(value, self._everywhere)


def plain_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration with drafting and draft training turned off."""
    rollout = replace(config.rollout, draft_length=0, draft_lengths=())
    return replace(config, rollout=rollout, draft_training=DraftTrainingConfig(mode="frozen"))


def round_costs(experiment: Experiment) -> Callable[[Params], np.ndarray]:
    """Return a function from params to the seconds of a round, [phases, draft lengths].

    The seconds come from the recipe's cost table, or are measured if it names none.
    Raises ConfigError at once if the table cannot be used.
    """
    config, lengths = experiment.config, experiment.config.rollout.lengths
    if config.cost_table is not None:
        cells = load_cells(Path(config.cost_table), experiment.phases, lengths)
        return lambda params: round_seconds(cells, experiment.phases, lengths)
    timer = cell_timer(experiment, fit_others=False)
    return lambda params: round_seconds(timer.measure(params, 0), experiment.phases, lengths)


def make_variants(
    experiment: Experiment, reward_fn: RewardFn, params: Params, seconds: np.ndarray
) -> tuple[dict[str, Variant], Drafting]:
    """Return the variants by name, and what `automatic` chose its draft lengths by.

    They are `autoregressive`, which keeps and trains no draft, each draft length above 0, and `automatic`. All but the
    first are one program, for which a draft length is data. Each has taken its first step, which compiled the programs
    and measured the acceptance that `automatic` chooses by.

    experiment: of a run that chooses among the draft lengths. seconds: [phases, lengths], of a round.
    """
    lengths, mesh = experiment.config.rollout.lengths, experiment.mesh
    policy, drafter = experiment.networks.policy, experiment.networks.drafter
    plain = plain_config(experiment.config)
    without = init_train_state(Params(params.policy, {}), plain, mesh, with_reference=plain.loss.kl_coefficient > 0)
    drafted = fresh_state(experiment, replace(params, memory=experiment.networks.params.memory), seconds)
    # Of one policy, and nothing is updated in place: once is enough.
    moments = replace(drafted.optimizer, policy=without.optimizer.policy)
    drafted = replace(drafted, optimizer=moments, reference=without.reference)
    stages = Stages(policy, drafter, reward_fn, experiment.config, mesh, experiment.rollout_fn, experiment.loss_fn)
    plain_step = StagedStep(replace(stages, drafter=NoDrafter(), config=plain))
    variants = {PLAIN: Variant(experiment, plain_step, without, None)}
    variants[PLAIN].time_step()
    step = StagedStep(stages)
    drafting: Drafting | None = drafted.drafting
    assert drafting is not None
    for index, length in enumerate(lengths):
        if length > 0:
            variants[str(length)] = Variant(experiment, step, drafted, [index] * len(experiment.phases))
            drafting = update_drafting(drafting, variants[str(length)].time_step().rollout, None, lengths)
    drafted = replace(drafted, drafting=jax.device_put(drafting, NamedSharding(mesh, P())))
    variants[AUTOMATIC] = Variant(experiment, step, drafted, choose(drafting, lengths).tolist())
    variants[AUTOMATIC].time_step()
    return variants, drafting
