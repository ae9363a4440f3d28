"""The one program: prompts to updates in a single jit.

`make_train_step` fuses the stages; `specjax.probe` runs the very same stages one by one against the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from specjax.adaptation import DraftTrainingConfig, adapt, due, nothing_seen, replayed
from specjax.advantage import AdvantageConfig, group_advantages
from specjax.batch import Batch, make_batch
from specjax.cost import HOPE, choose, nothing_known, remember
from specjax.drafters import Drafter
from specjax.generate import Choice, RolloutFn, per_shard, place, prepare
from specjax.gradients import accumulate, reference_log_probs
from specjax.ladder import check_ladder, sort_rows
from specjax.loss import LossConfig
from specjax.mesh import BATCH_AXES, batch_shards
from specjax.metrics import Metrics, loss_metrics, reward_metrics, rollout_metrics
from specjax.optimizer import OptimizerConfig, apply_gradients, init_moments, make_optimizers
from specjax.plan import RolloutConfig
from specjax.rewards import RewardFn
from specjax.rollout import speculative_rollout
from specjax.types import Params, Policy, Prompts, PyTree, Rollout, TrainState

StepResult = tuple[TrainState, Rollout, Metrics]


@dataclass(frozen=True)
class TrainConfig:
    """One GRPO step.

    Attributes:
        seed:                all noise is keyed by (seed, step).
        microbatches:        parts in which gradients are accumulated; any number gives the same gradient.
        ladder:              total lengths, ascending: rows are sorted, and each microbatch is cut to the shortest that
                             holds its rows. The full length is always the last rung; empty pads every row to it.
        logit_chunk:         positions of each row whose logits exist at a time, in both losses; 0 for all of them.
        allow_truncated_law: train although top-k, top-p, min-p or temperature 0 cut tokens out of the rollout's law.
    """

    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    draft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))
    microbatches: int = 1
    ladder: tuple[int, ...] = ()
    logit_chunk: int = 0
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    allow_truncated_law: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches = {self.microbatches}: must be at least 1")
        check_ladder(self.ladder)
        if self.logit_chunk < 0:
            raise ValueError(f"logit_chunk = {self.logit_chunk}: must be at least 0")
        if self.rollout.law.truncates and not self.allow_truncated_law:
            raise ValueError(
                f"rollout.law = {self.rollout.law}: cuts tokens out of the law that training assumes; "
                "allowed only with allow_truncated_law"
            )


class Stages(NamedTuple):
    """A step, cut where the clock may look: prompts to updates, in this order."""

    prepare: Callable[[Params], Params]
    generate: Callable[[Params, Prompts, Array, Choice], Rollout]
    reward: Callable[[Rollout, Prompts], tuple[Batch, Metrics]]
    logprob: Callable[[PyTree | None, Batch], Array | None]
    update: Callable[[TrainState, Batch, Array | None], tuple[TrainState, Metrics]]


def make_stages(
    policy: Policy,
    drafter: Drafter,
    reward_fn: RewardFn,
    config: TrainConfig,
    mesh: Mesh,
    rollout_fn: RolloutFn = speculative_rollout,
) -> Stages:
    """The stages of a step, not jitted."""
    sharded_rollout = per_shard(rollout_fn, policy, drafter, config.rollout, mesh)
    optimizers = _optimizers(config)
    law = config.rollout.law
    # What training promises is reckoned under the whole law.
    promised = not law.truncates

    def generate(params: Params, prompts: Prompts, step: Array, chosen: Choice) -> Rollout:
        return sharded_rollout(params, prompts, (jnp.int32(config.seed), step), chosen)

    def reward(rollout: Rollout, prompts: Prompts) -> tuple[Batch, Metrics]:
        rows = len(rollout.lengths) // batch_shards(mesh)
        if rows % config.microbatches:
            raise ValueError(f"microbatches = {config.microbatches}: must divide the {rows} sequences of a data shard")
        scores = reward_fn(rollout, prompts)
        advantages = group_advantages(scores.value, len(rollout.lengths) // len(prompts.lengths), config.advantage)
        batch = make_batch(prompts, rollout, advantages)
        if config.ladder:
            batch = sort_rows(batch, mesh, config.microbatches)
        return batch, rollout_metrics(rollout) | reward_metrics(scores, advantages)

    def logprob(reference: PyTree | None, batch: Batch) -> Array | None:
        if reference is None:
            if config.loss.kl_coefficient:
                raise ValueError(f"kl_coefficient = {config.loss.kl_coefficient}: the state has no reference policy")
            return None
        return reference_log_probs(
            policy, reference, batch, law, config.microbatches, config.ladder, config.logit_chunk
        )

    def update(state: TrainState, batch: Batch, reference: Array | None) -> tuple[TrainState, Metrics]:
        train_draft = due(config.draft_training, state, batch)
        gradients, sums = accumulate(
            policy,
            drafter,
            state.params,
            batch,
            reference,
            law,
            config.loss,
            microbatches=config.microbatches,
            train_draft=train_draft,
            replay=replayed(state),
            verifier=config.rollout.verifier,
            ladder=config.ladder,
            budget=config.rollout.max_new_tokens,
            logit_chunk=config.logit_chunk,
        )
        params, optimizer = apply_gradients(optimizers, gradients, state.optimizer, state.params, train_draft)
        metrics = loss_metrics(
            sums,
            gradients,
            with_draft=bool(jax.tree.leaves(state.params.draft)),
            train_draft=train_draft,
            with_reference=reference is not None,
            with_mu=batch.mu is not None,
        )
        state, watched = adapt(state, batch, sums.promised if promised else None, train_draft)
        return replace(state, step=state.step + 1, params=params, optimizer=optimizer), metrics | watched

    return Stages(lambda params: prepare(params, policy), generate, reward, logprob, update)


def _optimizers(config: TrainConfig) -> Params:
    return make_optimizers(
        config.policy_optimizer, None if config.draft_training.mode == "frozen" else config.draft_optimizer
    )


def chosen_lengths(state: TrainState, config: TrainConfig) -> Choice:
    """The draft length of each phase, as an index; None where there is but one."""
    return None if state.drafting is None else choose(state.drafting, config.rollout.lengths)


def with_experience(
    state: TrainState, prompts: Prompts, rollout: Rollout, metrics: Metrics, drafter: Drafter, config: TrainConfig
) -> TrainState:
    """The state with what the drafter keeps of the rollout, how it went, and what the draft promises."""
    memory = drafter.remember(state.params.memory, prompts, rollout)
    state = replace(state, params=replace(state.params, memory=memory))
    if state.drafting is None:
        return state
    predicted = metrics.get("draft/predicted_acceptance")
    return replace(state, drafting=remember(state.drafting, rollout, predicted, config.rollout.lengths))


class TrainStep:
    """A step compiled for its mesh, with the layout of the first state it is given, in and out."""

    def __init__(self, step: Callable[[TrainState, Prompts], StepResult], mesh: Mesh) -> None:
        self._step, self._mesh, self._jitted = step, mesh, None

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        with jax.set_mesh(self._mesh):
            return self._jit(state)(state, place(prompts, self._mesh))

    def lower(self, state: TrainState, prompts: Prompts) -> jax.stages.Lowered:
        """The program, for those who want to read it."""
        with jax.set_mesh(self._mesh):
            return self._jit(state).lower(state, place(prompts, self._mesh))

    def _jit(self, state: TrainState) -> jax.stages.Wrapped:
        if self._jitted is None:
            layout = jax.tree.map(lambda x: x.sharding, state)
            rows = NamedSharding(self._mesh, P(BATCH_AXES))
            # The old parameters and moments are dead once the update is done: donated, they are updated in place.
            self._jitted = jax.jit(
                self._step, in_shardings=(layout, rows), out_shardings=(layout, rows, None), donate_argnums=0
            )
        return self._jitted


def make_train_step(
    policy: Policy,
    drafter: Drafter,
    reward_fn: RewardFn,
    config: TrainConfig,
    mesh: Mesh,
    rollout_fn: RolloutFn = speculative_rollout,
) -> TrainStep:
    """`state, rollout, metrics = step(state, prompts)`: one compiled program, traced once.

    reward_fn:  (rollout, prompts) -> Reward, traced, or `host_reward` around a host scorer.
    rollout_fn: (policy, drafter, params, prompts, seed_step, config) -> Rollout; it runs on each data shard and sees
                that shard's prompts alone. Of its Rollout only tokens and lengths are required.

    The state is donated: parameters and moments are updated in place. Raises ValueError where the prompts do not divide
    over the mesh, the sequences of a shard over the microbatches, or a KL coefficient finds no reference policy.
    """
    stages = make_stages(policy, drafter, reward_fn, config, mesh, rollout_fn)

    def step(state: TrainState, prompts: Prompts) -> StepResult:
        params = stages.prepare(state.params)
        rollout = stages.generate(params, prompts, state.step, chosen_lengths(state, config))
        batch, metrics = stages.reward(rollout, prompts)
        reference = stages.logprob(state.reference, batch)
        state, losses = stages.update(state, batch, reference)
        return with_experience(state, prompts, rollout, losses, drafter, config), rollout, metrics | losses

    return TrainStep(step, mesh)


def init_train_state(
    params: Params,
    config: TrainConfig,
    mesh: Mesh,
    with_reference: bool = False,
    seconds: Float[np.ndarray, "phases lengths"] | None = None,
    prompts: tuple[int, int] | None = None,
) -> TrainState:
    """A fresh state around `params`, which lie on the mesh already; moments are laid out as their parameters.

    with_reference: keep a copy of the policy as it is now, for KL.
    seconds:        of a round, for each phase that `lay_out` gives and each of the rollout's draft_lengths; needed
                    where there are several, and used for nothing else.
    prompts:        how many a step has and how wide they are padded; needed where rollouts are replayed, and used for
                    nothing else.
    """
    lengths, rollout = config.rollout.draft_lengths, config.rollout
    rows = None
    if prompts is not None:
        rows = prompts[0] * rollout.group_size, prompts[1] + rollout.max_new_tokens
    if lengths and seconds is None:
        raise ValueError(f"draft_lengths = {lengths}: to choose among them, the seconds of a round must be given")
    drafting = None
    if seconds is not None:
        expected = 0.0 if jax.tree.leaves(params.draft) else HOPE
        drafting = jax.device_put(nothing_known(lengths, seconds, expected), NamedSharding(mesh, P()))
    optimizers = _optimizers(config)
    return TrainState(
        step=jax.device_put(jnp.int32(0), NamedSharding(mesh, P())),
        params=params,
        optimizer=Params(
            policy=init_moments(optimizers.policy, params.policy, mesh),
            draft=init_moments(optimizers.draft, params.draft, mesh),
        ),
        reference=jax.tree.map(jnp.copy, params.policy) if with_reference else None,
        drafting=drafting,
        adaptation=nothing_seen(config.draft_training, rows, mesh) if jax.tree.leaves(params.draft) else None,
    )
