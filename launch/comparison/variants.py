"""Variants of a step to compare: without a draft, at each fixed draft length, and at the automatically chosen one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.costs.cost_table import cell_timer, given_cells
from launch.phases.long_phases import long_phase
from launch.setup.experiment import Experiment
from launch.setup.state import fresh_state
from specjax.cost import Drafting, choose, round_seconds, update_drafting
from specjax.drafters import NoDrafter
from specjax.parallel import processes
from specjax.rewards import RewardFn
from specjax.rollout.generate import Choice, place
from specjax.train.config import TrainConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.metrics import Metrics
from specjax.train.state import init_train_state
from specjax.train.timed_step import StagedStep, frozen, with_frozen
from specjax.types import Params, Prompts, Rollout, TrainState

PLAIN, AUTOMATIC = "autoregressive", "automatic"


@dataclass(frozen=True)
class StepTime:
    """One timed step of a variant.

    seconds: seconds of each stage, in order.
    step_s:  seconds of the whole step.
    ids:     int32 [N], prompt ids.
    """

    seconds: dict[str, float]
    step_s: float
    ids: np.ndarray
    rollout: Rollout
    metrics: Metrics


class NumberedBatches:
    """The training batches of a run, of which some may be skipped."""

    def __init__(self, experiment: Experiment) -> None:
        self._batches, self._read = experiment.train_batches(), 0

    def __next__(self) -> Prompts:
        self._read += 1
        return next(self._batches)

    def skip_to(self, number: int) -> None:
        """Skip the batches before batch `number`, counted from 0. It must not have been read."""
        while self._read < number:
            next(self)


class Variant:
    """Training steps with one choice of draft lengths.

    start:  initial train state. Steps update a copy of it; only the schedule of draft training is written back.
    chosen: index of the draft length for each phase; None without a draft.
    first:  number of the run's step that is timed as step 0.
    """

    def __init__(
        self, experiment: Experiment, step: StagedStep, start: TrainState, chosen: Sequence[int] | None, first: int = 0
    ) -> None:
        self.step, self.start, self.chosen, self._first = step, start, chosen, first
        self._experiment, self._replicated = experiment, NamedSharding(experiment.mesh, P())
        self._choice: Choice = None if chosen is None else self._put(np.array(chosen, np.int32))
        self._batches = NumberedBatches(experiment)

    def time_step(self, number: int) -> StepTime:
        """Time step `number` from the initial state, with its prompts and noise. Numbers must ascend.

        The step updates a copy of the state, which is made before the clock starts. Frozen weights are not copied.
        """
        number += self._first
        state = with_frozen(jax.tree.map(jnp.copy, with_frozen(self.start)), *frozen(self.start))
        state = replace(state, step=self._put(np.int32(number)))
        self._batches.skip_to(number)
        jax.block_until_ready(state)
        start = time.perf_counter()
        prompts = jax.block_until_ready(place(next(self._batches), self._experiment.mesh))
        data_s = time.perf_counter() - start
        (state, rollout, metrics), seconds = self.step(state, prompts, self._choice)
        step_s = time.perf_counter() - start
        self.start = replace(self.start, adaptation=state.adaptation)
        return StepTime({"data": data_s} | seconds, step_s, processes.fetch(prompts.id), rollout, metrics)

    def _put(self, value: np.ndarray | np.int32) -> jax.Array:
        return processes.place(value, self._replicated)


def plain_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration with drafting and draft training turned off."""
    rollout = replace(config.rollout, draft_length=0, draft_lengths=())
    return replace(config, rollout=rollout, draft_training=DraftTrainingConfig(mode="frozen"))


def round_costs(experiment: Experiment) -> Callable[[Params], np.ndarray]:
    """Return a function from params to the seconds of a round, [phases, draft lengths].

    The seconds come from the recipe's cost table. Without one, the returned function measures them, and raises Stopped
    at a signal. An unusable table raises ConfigError here, not in that function.
    """
    rounds, mixture = (experiment.phases, experiment.config.rollout.lengths), experiment.networks.policy.mixture
    if experiment.config.cost_table is not None:
        cells = given_cells(experiment)
        return lambda params: round_seconds(cells, *rounds, mixture)
    timer = cell_timer(experiment, fit_others=False)
    return lambda params: round_seconds(timer.measure(params, 0), *rounds, mixture)


def make_variants(
    experiment: Experiment,
    reward_fn: RewardFn,
    params: Params,
    seconds: np.ndarray | None,
    first: int = 0,
) -> tuple[dict[str, Variant], Drafting | None]:
    """Return the variants by name, and the acceptance and costs from which `automatic` chose its draft lengths.

    The variants are `autoregressive`, which neither has nor trains a draft, each draft length above 0, and `automatic`.
    All but the first share one program, because the draft length is data. Each variant has taken its first step, which
    compiles the programs and measures the acceptance for `automatic`. Raises Stopped at a signal.

    experiment: its `rollout.draft_lengths` are compared.
    seconds:    [phases, lengths], seconds of a round. None: there is no `automatic`.
    first:      number of the run's step that is timed first.
    """
    lengths, mesh = experiment.config.rollout.lengths, experiment.mesh
    plain = plain_config(experiment.step_config)
    undrafted, with_reference = replace(params, draft={}, memory=()), plain.loss.kl_coefficient > 0
    teacher = None if experiment.teacher is None else experiment.teacher.params
    plain_state = init_train_state(undrafted, plain, mesh, with_reference=with_reference, teacher=teacher)
    costs = np.ones((len(experiment.phases), len(lengths)), np.float32) if seconds is None else seconds
    draft_state = fresh_state(experiment, replace(params, memory=experiment.networks.params.memory), costs)
    # Both states share one copy of the policy's optimizer state and reference, to save memory: steps update copies.
    optimizer = replace(draft_state.optimizer, policy=plain_state.optimizer.policy)
    draft_state = replace(draft_state, optimizer=optimizer, reference=plain_state.reference)
    stages = experiment.stages(reward_fn)
    plain_step = StagedStep(replace(stages, drafter=NoDrafter(), config=plain))
    step, prompts = StagedStep(stages), experiment.abstract_prompts(experiment.config.data.prompts)
    plain_step.start_compiling(plain_state, prompts)
    step.start_compiling(draft_state, prompts)
    variants = {PLAIN: Variant(experiment, plain_step, plain_state, None, first)}
    drafting: Drafting | None = draft_state.drafting
    assert drafting is not None
    drafted = {str(length): [index] * len(experiment.phases) for index, length in enumerate(lengths) if length}
    count = 1 + len(drafted) + (seconds is not None)
    with long_phase("first steps", count, "variants", kept=False) as phase:
        variants[PLAIN].time_step(0)
        phase.finish(program=PLAIN)
        for name, chosen in drafted.items():
            variants[name] = Variant(experiment, step, draft_state, chosen, first)
            drafting = update_drafting(drafting, variants[name].time_step(0).rollout, None, lengths)
            phase.finish(program=name)
        if seconds is not None:
            draft_state = replace(draft_state, drafting=processes.place(drafting, NamedSharding(mesh, P())))
            variants[AUTOMATIC] = Variant(experiment, step, draft_state, choose(drafting, lengths).tolist(), first)
            variants[AUTOMATIC].time_step(0)
            phase.finish(program=AUTOMATIC)
    for name, variant in variants.items():
        if name != PLAIN:
            variant.start = holding(variant.start, experiment.config.draft_training)
    return variants, None if seconds is None else drafting


def holding(state: TrainState, config: DraftTrainingConfig) -> TrainState:
    """Return the state with draft training as rare as it becomes while acceptance holds: every `max_every`-th step.

    The next step trains the draft, so that even a few timed steps include one that does.
    """
    old = state.adaptation
    if old is None:
        return state
    # Separate arrays: a state is donated, and no buffer can be donated twice.
    interval = processes.place(jnp.int32(config.max_every), old.interval.sharding)
    return replace(state, adaptation=replace(old, interval=interval, slow=jnp.copy(old.fast), wait=old.wait * 0))
