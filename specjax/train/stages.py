"""A training step, cut where the clock may look: prompts to updates, none of it jitted."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from specjax.drafters import Drafter
from specjax.parallel.mesh import batch_shards
from specjax.rewards import RewardFn
from specjax.rollout.generate import Choice, RolloutFn, per_shard, prepare
from specjax.rollout.speculative import speculative_rollout
from specjax.train.adaptation import adapt, due, replayed
from specjax.train.advantage import group_advantages, token_advantages, zero_variance
from specjax.train.batch import Batch, make_batch, split
from specjax.train.config import TrainConfig
from specjax.train.gradients import Sums, accumulate, log_probs_of
from specjax.train.ladder import sort_rows
from specjax.train.loss import price_of_kl
from specjax.train.metrics import Metrics, reward_metrics, rollout_metrics, update_metrics
from specjax.train.optimizer import make_optimizers
from specjax.train.selection import drop_truncated, keep_groups, overlong_punishment
from specjax.train.updates import run_updates
from specjax.types import Params, Policy, Prompts, PyTree, Reward, Rollout, TrainState


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
