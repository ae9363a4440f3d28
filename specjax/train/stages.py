"""A training step, cut where the clock may look: prompts to updates, none of it jitted."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from specjax.drafters import Drafter
from specjax.parallel.mesh import batch_shards
from specjax.rewards import RewardFn
from specjax.rollout.generate import Choice, RolloutFn, per_shard, prepare
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.train.adaptation import DraftTrainingConfig, adapt, due, replayed
from specjax.train.advantage import AdvantageConfig, group_advantages, token_advantages, zero_variance
from specjax.train.batch import Batch, make_batch, split
from specjax.train.gradients import Sums, accumulate, log_probs_of
from specjax.train.ladder import check_ladder, sort_rows
from specjax.train.loss import LossConfig, price_of_kl
from specjax.train.metrics import Metrics, reward_metrics, rollout_metrics, update_metrics
from specjax.train.optimizer import OptimizerConfig, make_optimizers
from specjax.train.selection import SelectionConfig, drop_truncated, keep_groups, overlong_punishment
from specjax.train.updates import UpdateConfig, run_updates
from specjax.types import Params, Policy, Prompts, PyTree, Reward, Rollout, TrainState


@dataclass(frozen=True)
class TrainConfig:
    """One GRPO step.

    Attributes:
        seed:                all noise is keyed by (seed, step).
        updates:             how often a rollout is learnt from.
        microbatches:        parts in which the gradient of an update is accumulated; any number gives the same.
        reference_every:     the reference policy becomes the policy as it is after every n-th step; 0 leaves it fixed.
        gap_alarm:           how far the log-probs of rollout and training may lie apart, as the mean over the tokens,
                             before a step counts in rollout/logprob_alarm.
        ladder:              total lengths, ascending: rows are sorted, and each microbatch is cut to the shortest that
                             holds its rows. The full length is always the last rung; empty pads every row to it.
        logit_chunk:         positions of each row whose logits exist at a time, in both losses; 0 for all of them.
        allow_truncated_law: train although top-k, top-p, min-p or temperature 0 cut tokens out of the rollout's law.
    """

    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    draft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))
    updates: UpdateConfig = field(default_factory=UpdateConfig)
    microbatches: int = 1
    reference_every: int = 0
    gap_alarm: float = 0.05
    ladder: tuple[int, ...] = ()
    logit_chunk: int = 0
    draft_training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    allow_truncated_law: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches = {self.microbatches}: must be at least 1")
        loss, updates = self.loss, self.updates
        if self.reference_every < 0:
            raise ValueError(f"reference_every = {self.reference_every}: must be at least 0")
        if self.reference_every and not loss.kl_coefficient:
            raise ValueError(f"reference_every = {self.reference_every}: must be 0 without a kl_coefficient")
        if updates.recompute_old and not updates.several:
            raise ValueError("recompute_old = True: must be False with one update, whose own forward anchors the ratio")
        if updates.several and not updates.recompute_old and loss.importance != "token":
            raise ValueError(
                f"importance = {loss.importance}: with several updates old / mu is 1, unless recompute_old = True"
            )
        whole_batch = AdvantageConfig(baseline="batch", scale="batch")
        if loss.kl_in == "token" and self.advantage != whole_batch:
            raise ValueError("kl_in = token: must go with advantage.baseline = batch and advantage.scale = batch")
        if loss.in_reward and self.advantage.scale == "group":
            raise ValueError(
                "kl_in = reward: must go with advantage.scale = batch or none; over the deviation of a group of equal "
                "rewards KL would be all that counts, whatever its coefficient"
            )
        if not self.gap_alarm > 0:
            raise ValueError(f"gap_alarm = {self.gap_alarm}: must be > 0")
        if self.selection.overlong_buffer > self.rollout.max_new_tokens:
            raise ValueError(
                f"overlong_buffer = {self.selection.overlong_buffer}: must be at most the length budget, "
                f"max_new_tokens = {self.rollout.max_new_tokens}"
            )
        check_ladder(self.ladder)
        if self.logit_chunk < 0:
            raise ValueError(f"logit_chunk = {self.logit_chunk}: must be at least 0")
        if self.rollout.law.truncates and not self.allow_truncated_law:
            raise ValueError(
                f"rollout.law = {self.rollout.law}: cuts tokens out of the law that training assumes; "
                "allowed only with allow_truncated_law"
            )


class Stages(NamedTuple):
    """In this order. `logprob` fills in what the batch needs of other forwards than that of training, and with that the
    advantages, which may pay for KL.
    """

    prepare: Callable[[Params], Params]
    generate: Callable[[Params, Prompts, Array, Choice], Rollout]
    reward: Callable[[Rollout, Prompts], tuple[Reward, Batch, Metrics]]
    logprob: Callable[[TrainState, Batch], Batch]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_stages(
    policy: Policy,
    drafter: Drafter,
    reward_fn: RewardFn,
    config: TrainConfig,
    mesh: Mesh,
    rollout_fn: RolloutFn = speculative_rollout,
) -> Stages:
    """The stages of a step for this mesh; a profile shows each under its name."""
    sharded_rollout = per_shard(rollout_fn, policy, drafter, config.rollout, mesh)
    optimizers = optimizers_of(config)
    law, size, parts = config.rollout.law, config.rollout.group_size, config.updates.minibatches * config.microbatches

    @jax.named_scope("generate")
    def generate(params: Params, prompts: Prompts, step: Array, chosen: Choice) -> Rollout:
        return sharded_rollout(params, prompts, (jnp.int32(config.seed), step), chosen)

    @jax.named_scope("reward")
    def reward(rollout: Rollout, prompts: Prompts) -> tuple[Reward, Batch, Metrics]:
        if len(rollout.lengths) != size * len(prompts.lengths):
            raise ValueError(
                f"the rollout has {len(rollout.lengths)} sequences of {len(prompts.lengths)} prompts: must be "
                f"group_size = {size} of each"
            )
        scores, selection = reward_fn(rollout, prompts), config.selection
        punishment = overlong_punishment(rollout.lengths, config.rollout.max_new_tokens, selection)
        batch = make_batch(prompts, rollout, scores.value + punishment)
        if selection.drop_truncated:
            batch = drop_truncated(batch, rollout)
        equal = zero_variance(scores.value, size)
        if selection.groups:
            batch = keep_groups(batch, equal, selection.groups, mesh)
        rows = len(batch.tokens) // batch_shards(mesh)
        if rows % parts:
            raise ValueError(
                f"minibatches x microbatches = {parts}: must divide the {rows} sequences of a data shard that train"
            )
        trained = jnp.any(batch.trained, axis=1)
        return scores, batch, rollout_metrics(rollout) | reward_metrics(scores, equal, trained, punishment)

    @jax.named_scope("logprob")
    def logprob(state: TrainState, batch: Batch) -> Batch:
        def under(weights: PyTree) -> Array:
            given, ladder, chunk = (policy, weights, batch, law, mesh), config.ladder, config.logit_chunk
            return log_probs_of(*given, microbatches=parts, ladder=ladder, logit_chunk=chunk)

        if state.reference is None and config.loss.kl_coefficient:
            raise ValueError(f"kl_coefficient = {config.loss.kl_coefficient}: the state has no reference policy")
        if state.reference is not None:
            batch = replace(batch, reference=under(state.reference))
        anchored = config.updates.several or config.loss.in_reward
        if config.updates.recompute_old or (anchored and batch.mu is None):
            batch = replace(batch, old=under(state.params.policy))
        elif config.updates.several:
            batch = replace(batch, old=batch.mu)
        value = batch.reward
        if config.loss.in_reward:
            price = price_of_kl(batch, config.loss)
            if config.loss.kl_in == "token":
                return replace(batch, advantage=token_advantages(value, price, batch.completion))
            value -= jnp.sum(price, axis=1)
        return replace(batch, advantage=group_advantages(value, size, config.advantage))

    @jax.named_scope("update")
    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        train_draft = due(config.draft_training, state, batch)

        def gradients(params: Params, batch: Batch, replay: Batch | None) -> tuple[Params, Sums]:
            return accumulate(
                policy,
                drafter,
                params,
                batch,
                law,
                config.loss,
                microbatches=config.microbatches,
                train_draft=train_draft,
                replay=replay,
                verifier=config.rollout.verifier,
                ladder=config.ladder,
                budget=config.rollout.max_new_tokens,
                logit_chunk=config.logit_chunk,
            )

        sizes = config.microbatches, config.updates.minibatches
        rows = sort_rows(batch, mesh, *sizes) if config.ladder else batch
        params, optimizer, seen = run_updates(
            gradients, optimizers, state.params, state.optimizer, rows, replayed(state), train_draft, config.updates
        )
        drafting = bool(jax.tree.leaves(state.params.draft))
        metrics = update_metrics(seen, batch, config.gap_alarm, with_draft=drafting, train_draft=train_draft)
        # What training promises is reckoned under the whole law.
        first = jax.tree.map(lambda x: x[0], split(rows, config.updates.minibatches))
        state, watched = adapt(state, rows, None if law.truncates else seen.first.promised, train_draft, first)
        step, reference = state.step + 1, state.reference
        if reference is not None and config.reference_every:
            renewed = step % config.reference_every == 0
            reference = jax.tree.map(lambda new, old: jnp.where(renewed, new, old), params.policy, reference)
        state = replace(state, step=step, params=params, optimizer=optimizer, reference=reference)
        return state, metrics | watched

    return Stages(lambda params: prepare(params, policy, drafter), generate, reward, logprob, update)


def optimizers_of(config: TrainConfig) -> Params:
    """A chain for each network; a frozen draft's leaves it as it is."""
    return make_optimizers(
        config.policy_optimizer, None if config.draft_training.mode == "frozen" else config.draft_optimizer
    )
