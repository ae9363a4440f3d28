"""Asynchronous RL: rollouts on a mesh of their own, `lag` updates ahead of the training on another mesh.

Two programs, dispatched by one thread: rollout t + lag, by the networks of update t - 1, before update t. So the
rollout mesh generates while the training mesh trains. With lag 0 it is the synchronous step on two meshes.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from specjax import kernels
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES
from specjax.rewards import HostReward
from specjax.rollout.generate import Choice, place
from specjax.rollout.send import Send, copy_on
from specjax.train.stages import Stages
from specjax.train.train_step import StepResult, TrainStep
from specjax.types import Ahead, Params, Prompts, Reward, Rollout, TrainState

# The largest that `gap_alarm` may be.
NO_ALARM = 1e6


class Sent(NamedTuple):
    """Networks for a rollout, both of one update, and the draft length of each phase.

    version: int32, number of updates that the networks have seen.
    """

    params: Params
    chosen: Choice
    version: Int[Array, ""]


class AsynchronousStep:
    """Training step whose rollouts are generated ahead, on another mesh. Rollouts that wait are part of the state.

    Args:
        stages:       stages of the step on the training mesh.
        rollout_mesh: devices that the training mesh does not use; their number divides that of the training mesh.
    """

    def __init__(self, stages: Stages, rollout_mesh: Mesh) -> None:
        if set(rollout_mesh.devices.flat) & set(stages.mesh.devices.flat):
            raise ValueError(f"rollout_mesh = {rollout_mesh.devices.shape}: shares devices with the training mesh")
        # Log-probs of rollout and training differ because the policies do.
        stages = replace(stages, config=replace(stages.config, gap_alarm=NO_ALARM))
        self._stages, self._mesh = stages, rollout_mesh
        # Where one of them has several CPU devices, nothing may run beside its collectives.
        self._larger = max(stages.mesh, rollout_mesh, key=lambda mesh: mesh.size)
        self._train, self._reward = TrainStep(stages, from_another_mesh=True), jax.jit(stages.reward)
        self._send: Send | None = None
        with jax.set_mesh(rollout_mesh):
            self._generate = jax.jit(
                partial(_generate, replace(stages, mesh=rollout_mesh)),
                out_shardings=NamedSharding(rollout_mesh, P(BATCH_AXES)),
                compiler_options=kernels.compiler_options(stages.policy.dtype),
            )

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        """Begin the rollout of `prompts`, then train on the oldest one. The state is donated.

        The lag is the number of rollouts that wait in the state before: begin as many before the first step.
        """
        state = self.begin(state, prompts)
        oldest, *waiting = state.ahead
        # The only wait. The rollout after this one is under way.
        start = time.perf_counter()
        rollout, prompts, version = processes.fetch((oldest.rollout, oldest.prompts, oldest.version))
        waited_s = time.perf_counter() - start
        more: dict[str, Any] = {"asynchronous/lag": state.step - version, "asynchronous/waiting": len(waiting)}
        more["time/rollout_wait"] = waited_s
        placed = self._place(rollout)
        if isinstance(self._stages.reward_fn, HostReward):
            scores = self._stages.reward(rollout, prompts)
        else:
            scores = self._reward_of(placed, prompts)
        state, rollout, metrics = self._train.update(replace(state, ahead=()), prompts, placed, scores)
        return replace(state, ahead=tuple(waiting)), rollout, metrics | more

    def begin(self, state: TrainState, prompts: Prompts) -> TrainState:
        """Begin a rollout by the state's networks, for the step after all those that wait. Waits for nothing."""
        sent = self._sent(replace(state, ahead=()))
        with jax.set_mesh(self._mesh):
            prompts = place(prompts, self._mesh)
            rollout = kernels.finished(self._generate(sent, prompts, np.int32(len(state.ahead))), self._larger)
        # Copied because the state is donated to the step.
        drafting = None if state.drafting is None else jax.tree.map(jnp.copy, state.drafting)
        return replace(state, ahead=(*state.ahead, Ahead(prompts, rollout, sent.version, drafting)))

    def _sent(self, state: TrainState) -> Sent:
        if self._send is None:
            stages, everywhere = self._stages, NamedSharding(self._mesh, P())
            copy = copy_on(self._mesh, stages.policy, stages.drafter, state.params)
            chosen: Any = None if state.drafting is None else everywhere
            version: Any = everywhere
            layout = Sent(jax.tree.map(lambda x: x.sharding, copy), chosen, version)
            self._send = Send(self._prepare, layout, stages.mesh, self._mesh)
        return self._send(state)

    def _prepare(self, state: TrainState) -> Sent:
        return Sent(self._stages.prepare(state.params), self._stages.choose(state), state.step)

    def _place(self, rollout: Rollout) -> Rollout:
        """Put a rollout on the training mesh: its rows split, and what it counts for each shard of its own mesh not."""
        rows, everywhere = (NamedSharding(self._stages.mesh, spec) for spec in (P(BATCH_AXES), P()))
        count = len(rollout.lengths)
        return jax.tree.map(lambda x: processes.place(x, rows if len(x) == count else everywhere), rollout)

    def _reward_of(self, rollout: Rollout, prompts: Prompts) -> Reward:
        with jax.set_mesh(self._stages.mesh):
            return kernels.finished(self._reward(rollout, place(prompts, self._stages.mesh)), self._larger)


def _generate(stages: Stages, sent: Sent, prompts: Prompts, waiting: Int[Array, ""]) -> Rollout:
    return stages.generate(sent.params, prompts, sent.version + jnp.int32(waiting), sent.chosen)
