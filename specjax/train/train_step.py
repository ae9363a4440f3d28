"""The training step as one jitted program, from prompts to updates.

`make_train_step` fuses the stages of `specjax.train.stages`. `specjax.train.timed_step` runs and times them one by one.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from specjax import kernels
from specjax.cost import init_drafting
from specjax.drafters import Drafter
from specjax.parallel.mesh import BATCH_AXES
from specjax.rewards import RewardFn
from specjax.rollout.generate import RolloutFn, place
from specjax.rollout.speculative import speculative_rollout
from specjax.train.adaptation import init_adaptation
from specjax.train.config import TrainConfig, check_groups
from specjax.train.loss import LossFn, policy_loss
from specjax.train.metrics import Metrics
from specjax.train.optimizer import init_moments
from specjax.train.stages import Stages, optimizers_of
from specjax.types import Params, Policy, Prompts, Rollout, TrainState

StepResult = tuple[TrainState, Rollout, Metrics]


class TrainStep:
    """Training step compiled for its mesh. States keep the sharding of the first one it is called with."""

    def __init__(self, step: Callable[[TrainState, Prompts], StepResult], mesh: Mesh, dtype: jnp.dtype) -> None:
        self._step, self._mesh, self._dtype, self._jitted = step, mesh, dtype, None

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        with jax.set_mesh(self._mesh):
            return kernels.finished(self._jit(state)(state, place(prompts, self._mesh)), self._mesh)

    def lower(self, state: TrainState, prompts: Prompts) -> jax.stages.Lowered:
        """Return the lowered program, for inspection."""
        with jax.set_mesh(self._mesh):
            return self._jit(state).lower(state, place(prompts, self._mesh))

    def _jit(self, state: TrainState) -> jax.stages.Wrapped:
        if self._jitted is None:
            layout = jax.tree.map(lambda x: x.sharding, state)
            rows = NamedSharding(self._mesh, P(BATCH_AXES))
            # Old parameters and moments are not needed after the update. Donated, they are updated in place.
            self._jitted = jax.jit(
                self._step,
                in_shardings=(layout, rows),
                out_shardings=(layout, rows, None),
                donate_argnums=0,
                compiler_options=kernels.compiler_options(self._dtype),
            )
        return self._jitted


def make_train_step(
    policy: Policy,
    drafter: Drafter,
    reward_fn: RewardFn,
    config: TrainConfig,
    mesh: Mesh,
    rollout_fn: RolloutFn = speculative_rollout,
    loss_fn: LossFn = policy_loss,
) -> TrainStep:
    """Return `step`, one compiled program that is traced once: `state, rollout, metrics = step(state, prompts)`.

    reward_fn:  (rollout, prompts) -> Reward, traced, or `host_reward` around a host scorer.
    rollout_fn: (policy, drafter, params, prompts, seed_step, config) -> Rollout; it runs on each data shard and sees
                that shard's prompts alone. Of its Rollout only tokens and lengths are required.
    loss_fn:    (LossInputs, LossConfig) -> LossOutput, the policy's loss for each token (specjax.train.loss).

    Raises ValueError if samples are compared within groups of one. The state is donated: parameters and moments are
    updated in place. A call raises ValueError if the prompts or the
    selected groups do not divide over the mesh, if the training sequences of a shard do not divide into minibatches and
    microbatches, if a rollout does not have group_size sequences per prompt, or if there is a KL coefficient but no
    reference policy.
    """
    check_groups(config)
    stages = Stages(policy, drafter, reward_fn, config, mesh, rollout_fn, loss_fn)

    def step(state: TrainState, prompts: Prompts) -> StepResult:
        params = stages.prepare(state.params)
        rollout = stages.generate(params, prompts, state.step, stages.choose(state))
        scores, sequences, metrics = stages.reward(rollout, prompts)
        batch = stages.advantage(sequences, stages.logprob(state, sequences))
        state, losses = stages.update(state, batch)
        state = stages.remember(state, prompts, rollout, losses)
        return state, replace(rollout, reward=scores, batch=batch), metrics | losses

    return TrainStep(step, mesh, policy.dtype)


def init_train_state(
    params: Params,
    config: TrainConfig,
    mesh: Mesh,
    with_reference: bool = False,
    seconds: Float[np.ndarray, "phases lengths"] | None = None,
    prompts: tuple[int, int] | None = None,
) -> TrainState:
    """Return a fresh state around `params`, which must be on the mesh already. Moments are sharded as their parameters.

    with_reference: keep a copy of the current policy as the reference for KL.
    seconds:        seconds of a round, for each phase that `lay_out` returns and each of the rollout's draft_lengths;
                    required if draft_lengths is set.
    prompts:        (prompts per step, padded width); required if rollouts are replayed.
    """
    lengths = config.rollout.draft_lengths
    if lengths and seconds is None:
        raise ValueError(f"draft_lengths = {lengths}: to choose among them, the seconds of a round must be given")
    drafting = adaptation = rows = None
    if seconds is not None:
        drafting = jax.device_put(init_drafting(lengths, seconds), NamedSharding(mesh, P()))
    if prompts is not None:
        groups = config.selection.groups or prompts[0]
        rows = groups * config.rollout.group_size, prompts[1] + config.rollout.max_new_tokens
    if jax.tree.leaves(params.draft):
        adaptation = init_adaptation(config.draft_training, rows, mesh)
    optimizers = optimizers_of(config)
    return TrainState(
        step=jax.device_put(jnp.int32(0), NamedSharding(mesh, P())),
        params=params,
        optimizer=Params(
            policy=init_moments(optimizers.policy, params.policy, mesh),
            draft=init_moments(optimizers.draft, params.draft, mesh),
        ),
        reference=jax.tree.map(jnp.copy, params.policy) if with_reference else None,
        drafting=drafting,
        adaptation=adaptation,
    )
