"""Stages of a training step, from prompts to updates. None of them is jitted by itself."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from specjax.adapters import joined
from specjax.cache import tokens_at
from specjax.carry_over.groups import carry_over_metrics, carry_over_of, divide_groups
from specjax.carry_over.rollout import carry_over, carry_over_fn
from specjax.cost import choose, update_drafting
from specjax.drafters import Drafter
from specjax.keys import SeedStep
from specjax.log_probs import laws
from specjax.parallel.mesh import batch_shards
from specjax.rewards import RewardFn, with_returns
from specjax.rollout.generate import Choice, RolloutFn, per_shard, prepare
from specjax.rollout.host_turns import HostTurns, check_rollout_fn
from specjax.rollout.plan import RolloutConfig, choose_lengths
from specjax.rollout.speculative import speculative_rollout
from specjax.train.advantage import group_advantages, token_advantages, zero_variance
from specjax.train.batch import ScoredSequences, Sequences, TrainBatch, join_completions, split
from specjax.train.config import TrainConfig
from specjax.train.draft.anchors import with_keys
from specjax.train.draft.replay import replay_rows
from specjax.train.draft.schedule import draft_is_due, update_schedule
from specjax.train.gradients import accumulate, log_probs_of
from specjax.train.hints import HintTemplate, group_hints
from specjax.train.ladder import sort_rows
from specjax.train.loss import LossFn, kl_cost, policy_loss
from specjax.train.loss_context import LossContext
from specjax.train.loss_sums import Sums
from specjax.train.metrics import Metrics, reward_metrics, rollout_metrics, update_metrics
from specjax.train.optimizer import learning_rate, make_optimizers
from specjax.train.selection import drop_truncated, keep_groups, overlong_punishment
from specjax.train.updates import run_updates
from specjax.types import CarryOver, Hints, Params, Policy, Prompts, PyTree, Reward, Rollout, TrainState, pytree


@pytree
class LogProbs:
    """Log-probs of completion tokens under policies that are not trained, as in `TrainBatch`."""

    old: Float[Array, "R S"] | None
    reference: Float[Array, "R S"] | None


@dataclass(frozen=True)
class Stages:
    """The stages of a step for one mesh, in the order of the methods; a profile shows each under its name."""

    policy: Policy
    drafter: Drafter
    reward_fn: RewardFn
    config: TrainConfig
    mesh: Mesh
    rollout_fn: RolloutFn = speculative_rollout
    loss_fn: LossFn = policy_loss
    # The policy itself, or the network of `TrainState.teacher`, if `config.teacher` has one.
    teacher: Policy | None = None
    # Where hints stand in the teacher's prompts; None exactly with `config.teacher.hint` none.
    hint_template: HintTemplate | None = None
    # Rollouts are those of earlier networks, so that they differ from training for no fault.
    lagging: bool = False
    # Nothing is drafted: all phases run at draft length 0, the first one, and rounds of others are not compiled.
    undrafted: bool = False

    def __post_init__(self) -> None:
        if (self.teacher is None) != (self.config.teacher.kind == "none"):
            raise ValueError(f"teacher.kind = {self.config.teacher.kind}: must be none exactly without a teacher")
        if (self.hint_template is None) != (self.config.teacher.hint == "none"):
            raise ValueError(f"teacher.hint = {self.config.teacher.hint}: must be none exactly without a hint_template")
        if self.undrafted and self.config.rollout.lengths[0]:
            raise ValueError(
                f"draft_lengths = {self.config.rollout.lengths}: must begin with 0 for a step without drafts"
            )

    def loss_context(self, sequences: Sequences) -> LossContext:
        """Return the functions and options of the losses, for one update with these rows."""
        config, rollout = self.config, self.config.rollout
        (rows, width), budget = sequences.tokens.shape, rollout.max_new_tokens
        rows //= batch_shards(self.mesh) * config.updates.minibatches * config.microbatches
        return LossContext(
            *(self.policy, self.drafter, rollout.law, config.loss, self.loss_fn),
            verifier=rollout.verifier,
            microbatches=config.microbatches,
            ladder=config.ladder,
            budget=budget,
            logit_chunk=config.logit_chunk,
            train_draft=config.draft_training.mode == "online",
            anchors=config.draft_training.anchors,
            samples=config.sharing(self.policy, rows, width - budget),
            teacher=self.teacher,
            distillation=config.teacher,
            hint_template=self.hint_template,
            stop_tokens=tuple(rollout.stop_tokens),
        )

    def prepare(self, params: Params) -> Params:
        """Cast and gather the parameters for the rollout."""
        return prepare(self.policy, self.drafter, params)

    def choose(self, state: TrainState) -> Choice:
        """Return the draft length of each phase, as an index; None where nothing is to be chosen."""
        if state.drafting is None or self.undrafted:
            return None
        return choose(state.drafting, self.config.rollout.lengths)

    @jax.named_scope("generate")
    def generate(
        self,
        params: Params,
        prompts: Prompts,
        step: Array,
        chosen: Choice,
        carried: CarryOver | None = None,
        version: Array | None = None,
    ) -> Rollout:
        """Generate the completions.

        step:    keys the noise. chosen: the draft length of each phase, as an index.
        carried: groups of the rollout before that go on; None without carry-over.
        version: number of updates that the policy has seen; None: as many as `step`.
        """
        rollout_fn = self.rollout_fn if carried is None else carry_over_fn(self.rollout_fn)
        generate = per_shard(rollout_fn, self.policy, self.drafter, self._rollout, self.mesh)
        if carried is not None:
            generate = carry_over(generate, carried, step if version is None else version)
        return generate(params, prompts, self.seed_step(step), chosen)

    def seed_step(self, step: Array) -> SeedStep:
        """Return what keys the noise of a step."""
        return jnp.int32(self.config.seed), step

    @cached_property
    def host_turns(self) -> HostTurns | None:
        """Generates in place of `generate` with an environment on the host; None without one."""
        if not self.config.rollout.answers_on_host:
            return None
        check_rollout_fn(self.rollout_fn)
        return HostTurns(self.policy, self.drafter, self._rollout, self.mesh)

    @property
    def _rollout(self) -> RolloutConfig:
        return choose_lengths(self.config.rollout, 0 if self.undrafted else None)

    @jax.named_scope("reward")
    def reward(self, rollout: Rollout, prompts: Prompts) -> Reward:
        """Score the completions."""
        size = self.config.rollout.group_size
        if len(rollout.lengths) != size * len(prompts.lengths):
            raise ValueError(
                f"the rollout has {len(rollout.lengths)} sequences of {len(prompts.lengths)} prompts: must be "
                f"group_size = {size} of each"
            )
        width, budget = rollout.tokens.shape[1], self.config.rollout.max_new_tokens
        if width != budget:
            raise ValueError(
                f"the rollout has room for {width} tokens of a completion: must be max_new_tokens = {budget}"
            )
        return with_returns(self.reward_fn)(rollout, prompts)

    @jax.named_scope("select")
    def select(self, rollout: Rollout, prompts: Prompts, scores: Reward) -> tuple[ScoredSequences, Metrics]:
        """Select the sequences to train on."""
        config, selection = self.config, self.config.selection
        punishment = overlong_punishment(rollout.lengths, config.rollout.max_new_tokens, selection)
        sequences = join_completions(prompts, rollout, scores.value + punishment)
        sequences = replace(sequences, hints=self._hints(rollout, prompts, scores))
        if config.loss.routing == "replay" and sequences.routes is None:
            raise ValueError("loss.routing = replay: the rollout has no routes; must be recompute")
        if selection.drop_truncated:
            sequences = drop_truncated(sequences, rollout)
        # True also of groups whose rewards are withheld.
        equal = zero_variance(scores.value, config.rollout.group_size)
        groups = divide_groups(rollout, len(equal), config.rollout)
        if selection.groups:
            sequences = keep_groups(sequences, equal, selection.groups, self.mesh)
        elif groups is not None:
            sequences = keep_groups(sequences, ~groups.trained, config.trained_groups(len(equal)), self.mesh)
        rows, parts = len(sequences.tokens) // batch_shards(self.mesh), config.updates.minibatches * config.microbatches
        if rows % parts:
            raise ValueError(
                f"minibatches x microbatches = {parts}: must divide the {rows} sequences of a data shard that train"
            )
        trained = jnp.any(sequences.trained, axis=1)
        metrics, withheld = rollout_metrics(rollout), 0
        if groups is not None:
            metrics, withheld = metrics | carry_over_metrics(rollout, groups), jnp.sum(~groups.trained)
        return sequences, metrics | reward_metrics(scores, equal, trained, punishment, withheld)

    def _hints(self, rollout: Rollout, prompts: Prompts, scores: Reward) -> Hints | None:
        """Return the hint of each sequence; None without any."""
        size = self.config.rollout.group_size
        match self.config.teacher.hint:
            case "none":
                return None
            case "group":
                return group_hints(rollout, scores.correct > 0.5, size)
            case "solution":
                if prompts.hints is None:
                    raise ValueError("teacher.hint = solution: the prompts have no hints")
                return jax.tree.map(lambda x: jnp.repeat(x, size, axis=0), prompts.hints)

    @jax.named_scope("logprob")
    def logprob(self, state: TrainState, sequences: ScoredSequences) -> LogProbs:
        """Run the forwards of policies that are not trained: the reference policy and the anchor of the ratio."""
        loss, updates = self.config.loss, self.config.updates
        context = replace(self.loss_context(sequences), microbatches=updates.minibatches * self.config.microbatches)

        def under(weights: PyTree, rows: Sequences = sequences) -> Array:
            return log_probs_of(context, weights, rows, self.mesh)

        if state.reference is None and loss.kl_coefficient:
            raise ValueError(f"kl_coefficient = {loss.kl_coefficient}: the state has no reference policy")
        # The reference policy has experts of its own choice.
        own_routes = replace(sequences, routes=None)
        reference = None
        if state.reference is not None:
            reference = under(state.reference or state.params.base, own_routes)
        old = None
        if updates.recompute_old or ((updates.several or loss.in_reward) and sequences.mu is None):
            old = under(joined(state.params).policy)
        elif updates.several:
            old = sequences.mu
        return LogProbs(old, reference)

    @jax.named_scope("advantage")
    def advantage(self, sequences: ScoredSequences, log_probs: LogProbs) -> TrainBatch:
        """Compute the advantages from the rewards, less the KL cost if that is part of the reward."""
        config, reward = self.config, sequences.reward
        if not config.teacher.learns_from_rewards:
            reward = jnp.zeros_like(reward)
        cost = None
        if config.loss.in_reward:
            anchor = sequences.mu if log_probs.old is None else log_probs.old
            cost = kl_cost(anchor, log_probs.reference, sequences.completion, config.loss)
        if cost is not None and config.loss.kl_in == "token":
            advantage = token_advantages(reward, cost, sequences.completion)
        else:
            paid = reward if cost is None else reward - jnp.sum(cost, axis=1)
            each = group_advantages(paid, config.rollout.group_size, config.advantage)
            advantage = jnp.where(sequences.completion, each[:, None], 0.0)
        return TrainBatch(**vars(sequences), **vars(log_probs), advantage=advantage)

    @jax.named_scope("update")
    def update(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        """Update both networks, and the reference policy where it follows the policy."""
        config, updates, context = self.config, self.config.updates, self.loss_context(batch)
        due = draft_is_due(config.draft_training, state, batch)
        train_draft = due if context.train_draft else False

        # The updates do not carry the frozen base along.
        base, changing = state.params.base, replace(state.params, base=())
        teacher = self._teacher_weights(state)

        def gradients(params: Params, batch: TrainBatch, replay: Sequences | None) -> tuple[Params, Sums]:
            return accumulate(context, replace(params, base=base), batch, due, replay, teacher)

        replay = replay_rows(state)
        if context.anchors:
            seed_step = jnp.int32(config.seed), state.step
            batch = with_keys(batch, seed_step, 0)
            replay = None if replay is None else with_keys(replay, seed_step, 1)
        rows = batch
        if config.ladder:
            sort = partial(sort_rows, mesh=self.mesh, parts=config.microbatches, minibatches=updates.minibatches)
            rows, replay = sort(batch), None if replay is None else jax.lax.map(sort, replay)
        optimizers = optimizers_of(config)
        params, moments, report = run_updates(
            gradients, optimizers, changing, state.optimizer, rows, replay, train_draft, updates
        )
        with_draft = bool(jax.tree.leaves(state.params.draft))
        gap_alarm = math.inf if self.lagging or config.gap_alarm is None else config.gap_alarm
        alarm = gap_alarm, config.loss.by_sequence
        metrics = update_metrics(report, batch, *alarm, with_draft=with_draft, train_draft=train_draft)
        metrics["learning_rate/policy"] = learning_rate(config.policy_optimizer, state.optimizer.policy)
        if train_draft is not False:
            metrics["learning_rate/draft"] = learning_rate(config.draft_optimizer, state.optimizer.draft)
        # Acceptance is predicted under the whole law, and for the networks of this step.
        draft, comparable = report.first_update.draft, not (config.rollout.law.truncates or self.lagging)
        options = dict(may_draft=any(config.rollout.lengths), comparable=comparable)
        state, acceptance = update_schedule(config.draft_training, state, batch, draft, due, **options)
        step, reference = state.step + 1, state.reference
        if reference is not None and config.reference_every:
            renew = step % config.reference_every == 0
            reference = jax.tree.map(lambda new, old: jnp.where(renew, new, old), params.policy, reference)
        state = replace(state, step=step, params=replace(params, base=base), optimizer=moments, reference=reference)
        return state, metrics | acceptance

    def _teacher_weights(self, state: TrainState) -> PyTree:
        """Return the teacher's parameters; None if it has the policy's, or there is none."""
        kind = self.config.teacher.kind
        weights = state.params.base if kind == "base" else state.teacher
        if kind in ("network", "base") and not weights:
            raise ValueError(f"teacher.kind = {kind}: the state has no such parameters")
        return weights

    @jax.named_scope("teacher")
    def run_teacher(self, state: TrainState, batch: TrainBatch) -> Float[Array, "parts R N"]:
        """Run the teacher once, as an update does. Return the log-prob of its likeliest token at each drawn one.

        Only probes call it, to time the teacher.
        """
        context, weights = self.loss_context(batch), self._teacher_weights(state)
        weights = joined(state.params).policy if weights is None else weights

        def run(part: TrainBatch) -> Array:
            output, longer = context.teacher_forward(weights, part)
            teacher, at = laws(weights, output, context.law), part.places(context.budget) - 1
            source = tokens_at(teacher.source, at if longer is None else at + longer[:, None])
            return teacher.by_position(lambda source: jnp.max(teacher.log_probs(source), axis=-1), source)

        return jax.lax.map(run, split(batch, self.config.updates.minibatches * context.microbatches, context.samples))

    def remember(self, state: TrainState, prompts: Prompts, rollout: Rollout, metrics: Metrics) -> TrainState:
        """Return the state with what the rollout leaves: drafter memory, carry-over, draft-length statistics.

        metrics: those of `update`.
        """
        if self.drafter.memory is not None:
            memory = self.drafter.memory.remember(state.params.memory, prompts, rollout)
            state = replace(state, params=replace(state.params, memory=memory))
        if state.carried is not None:
            state = replace(state, carried=carry_over_of(self.config.rollout, prompts, rollout))
        if state.drafting is None:
            return state
        predicted = metrics.get("draft/predicted_acceptance")
        return replace(state, drafting=update_drafting(state.drafting, rollout, predicted, self.config.rollout.lengths))


def optimizers_of(config: TrainConfig) -> Params:
    """Return an optax chain for each network. The chain of a frozen draft does not change it."""
    return make_optimizers(
        config.policy_optimizer, None if config.draft_training.mode == "frozen" else config.draft_optimizer
    )
