"""The training step, from prompts to updates: one jitted program, or two around a scorer on the host.

`train_step` is the step, in the order in which it runs. `make_train_step` compiles it for a mesh.
`specjax.train.timed_step` runs and times its stages one by one.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.adapters import joined
from specjax.drafters import Drafter
from specjax.keys import SeedStep
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES, shapes_on
from specjax.program import Program
from specjax.rewards import HostReward, RewardFn
from specjax.rollout.generate import Choice, RolloutFn, abstract_prompts, copy_on, place
from specjax.rollout.host_turns import HostTurns, TurnsProgram
from specjax.rollout.speculative import speculative_rollout
from specjax.train.config import TrainConfig, check_carry_over, check_groups, check_mixture
from specjax.train.draft.replay import check_replay
from specjax.train.hints import HintTemplate
from specjax.train.loss import LossFn, policy_loss
from specjax.train.metrics import Metrics
from specjax.train.selection import withhold_rewards
from specjax.train.stages import Stages
from specjax.types import Params, Policy, Prompts, Reward, Rollout, TrainState

StepResult = tuple[TrainState, Rollout, Metrics]


def train_step(stages: Stages, state: TrainState, prompts: Prompts) -> StepResult:
    """Return the next state, the scored rollout and the metrics of one step."""
    rollout = generate(stages, state, prompts)
    scores = stages.reward(rollout, prompts)
    return update(stages, state, prompts, rollout, scores)


def generate(stages: Stages, state: TrainState, prompts: Prompts) -> Rollout:
    """Return completions of the state's policy, drafted by the state's draft."""
    params = stages.prepare(state.params)
    draft_lengths = stages.choose(state)
    return stages.generate(params, prompts, state.step, draft_lengths, state.carried)


def update(stages: Stages, state: TrainState, prompts: Prompts, rollout: Rollout, scores: Reward) -> StepResult:
    """Train on scored completions: return the next state, the scored rollout and the metrics."""
    check_replay(state, rollout)
    scores = withhold_rewards(scores, rollout, stages.config.rollout)
    sequences, metrics = stages.select(rollout, prompts, scores)
    log_probs = stages.logprob(state, sequences)
    batch = stages.advantage(sequences, log_probs)
    state, losses = stages.update(state, batch)
    state = stages.remember(state, prompts, rollout, losses)
    # The routes are in the rollout itself.
    return state, replace(rollout, reward=scores, batch=replace(batch, routes=None)), metrics | losses


def start_compiling_turns(turns: HostTurns, stages: Stages, state: TrainState, prompts: Prompts) -> Rollout:
    """Start to compile the programs of a rollout with an environment on the host. Return the shapes of the rollout."""
    return turns.start_compiling_prepared(*_turns_args(stages, state, prompts))


def _turns_args(stages: Stages, state: TrainState, prompts: Prompts) -> tuple[Params, Prompts, SeedStep, Choice]:
    """Return what the programs of `HostTurns` are compiled for."""
    everywhere = NamedSharding(stages.mesh, P())
    with jax.set_mesh(stages.mesh):
        params = joined(copy_on(stages.mesh, stages.policy, stages.drafter, state.params))
        chosen = shapes_on(everywhere, jax.eval_shape(stages.choose, state))
    return params, prompts, stages.seed_step(jnp.int32(0)), chosen


class TrainStep:
    """Training step compiled for the mesh. States keep the sharding of the first one it is called with.

    With a traced reward it is one program. With a `HostReward` it is two, with the same functions: `generate`, and
    `update` from advantages on. The host scores between them, so that no program holds a callback and both are found in
    the compile cache. An environment on the host divides the step too, and `generate` itself (`HostTurns`).
    """

    def __init__(self, stages: Stages, from_another_mesh: bool = False) -> None:
        self._stages, self._mesh, self._rows = stages, stages.mesh, NamedSharding(stages.mesh, P(BATCH_AXES))
        # A rollout of another mesh has counts for each shard of that one, so it keeps its layout.
        self._of_rollout = None if from_another_mesh else self._rows
        self._programs: dict[str, Program] = {}
        self._host_turns = stages.host_turns
        self._divided = self._host_turns is not None or isinstance(stages.reward_fn, HostReward)

    def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
        """Take a step. The state is donated."""
        if self._divided:
            rollout = self.generate(state, prompts)
            state, rollout, metrics = self.update(state, prompts, rollout, self._reward(state, rollout, prompts))
            return state, rollout, metrics | ({} if self._host_turns is None else self._host_turns.seconds)
        return self._program("step", state)(state, place(prompts, self._mesh))

    def generate(self, state: TrainState, prompts: Prompts) -> Rollout:
        """Return the completions of the state's policy: the first of two programs."""
        if self._host_turns is not None:
            seed_step, chosen = self._stages.seed_step(state.step), self._stages.choose(state)
            return self._host_turns(state.params, prompts, seed_step, chosen)
        return self._program("generate", state)(state, place(prompts, self._mesh))

    def update(self, state: TrainState, prompts: Prompts, rollout: Rollout, scores: Reward) -> StepResult:
        """Train on scored completions: the second of two programs. The state and the rollout are donated."""
        scores = processes.place(scores, self._rows)
        return self._program("update", state)(state, place(prompts, self._mesh), rollout, scores)

    def _reward(self, state: TrainState, rollout: Rollout, prompts: Prompts) -> Reward:
        if isinstance(self._stages.reward_fn, HostReward):
            return self._stages.reward(rollout, prompts)
        return self._program("reward", state)(rollout, place(prompts, self._mesh))

    def start_compiling(self, state: TrainState, prompts: Prompts) -> None:
        """Start to compile the programs of a step, beside each other and beside what runs. See `lower`."""
        args = state, abstract_prompts(prompts, self._mesh)
        if not self._divided:
            self._program("step", state).start_compiling(*args)
            return
        if self._host_turns is None:
            rollout = self._program("generate", state).start_compiling(*args)
        else:
            rollout = start_compiling_turns(self._host_turns, self._stages, state, prompts)
            if not isinstance(self._stages.reward_fn, HostReward):
                self._program("reward", state).start_compiling(shapes_on(self._rows, rollout), args[1])
        self.start_compiling_update(*args, rollout)

    def start_compiling_update(self, state: TrainState, prompts: Prompts, rollout: Rollout) -> None:
        """Start to compile `update` for rollouts of these shapes. See `lower` for the other arguments."""
        self._program("update", state).start_compiling(*self._update_args(state, prompts, rollout))

    def lower(self, state: TrainState, prompts: Prompts) -> jax.stages.Lowered:
        """Return the lowered program of a step with a traced reward, for inspection. Runs and allocates nothing.

        state, prompts: arrays or ShapeDtypeStructs, the state's with shardings. The devices of the mesh may be absent.
        """
        with jax.set_mesh(self._mesh):
            return self._program("step", state).trace(state, abstract_prompts(prompts, self._mesh)).lower()

    def trace_half(self, name: Literal["generate", "update"], state: TrainState, prompts: Prompts) -> jax.stages.Traced:
        """Return the traced program `generate` or `update`, to lower or to inspect. See `lower` for the arguments.

        With an environment on the host, the programs in place of `generate` are those of `trace_turns`.
        """
        # Traced once for both programs: jax keeps the trace.
        if self._host_turns is not None:
            assert name == "update"
            return self.trace_update(state, prompts, self.trace_turns("finish", state, prompts).out_info)
        generate = self._program("generate", state).trace(state, abstract_prompts(prompts, self._mesh))
        if name == "generate":
            return generate
        rollout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), generate.out_info)
        return self.trace_update(state, prompts, rollout)

    def trace_turns(self, name: TurnsProgram, state: TrainState, prompts: Prompts) -> jax.stages.Traced:
        """Return a traced program of a rollout with an environment on the host. See `lower` for the arguments."""
        assert self._host_turns is not None
        return self._host_turns.trace(name, *_turns_args(self._stages, state, prompts))

    def trace_update(self, state: TrainState, prompts: Prompts, rollout: Rollout) -> jax.stages.Traced:
        """Return the traced program `update` for a rollout of these shapes. See `lower` for the other arguments."""
        return self._program("update", state).trace(*self._update_args(state, prompts, rollout))

    def _update_args(
        self, state: TrainState, prompts: Prompts, rollout: Rollout
    ) -> tuple[TrainState, Prompts, Rollout, Reward]:
        """Return what `update` is traced for. It has the shardings of its calls: with others it is another program."""
        prompts = abstract_prompts(prompts, self._mesh)
        if self._of_rollout is not None:
            rollout = shapes_on(self._of_rollout, rollout)
        if isinstance(self._stages.reward_fn, HostReward):
            scores = self._stages.reward_fn.shapes(rollout)
        else:
            with jax.set_mesh(self._mesh):
                scores = jax.eval_shape(self._stages.reward, rollout, prompts)
        return state, prompts, rollout, shapes_on(self._rows, scores)

    def _program(self, name: str, state: TrainState) -> Program:
        """Return a program of the step, made on first use.

        Old parameters and moments are not needed after the update. Donated, they are updated in place.
        """
        if name not in self._programs:
            layout, rows, rollout = jax.tree.map(lambda x: x.sharding, state), self._rows, self._of_rollout
            function, inputs, outputs, donated = {
                "step": (train_step, (layout, rows), (layout, rows, None), (0,)),
                "generate": (generate, (layout, rows), rows, ()),
                "reward": (Stages.reward, (rows, rows), rows, ()),
                "update": (update, (layout, rows, rollout, rows), (layout, rollout, None), (0, 2)),
            }[name]
            self._programs[name] = Program(
                partial(function, self._stages),
                self._mesh,
                compute_dtype=self._stages.policy.dtype,
                in_shardings=inputs,
                out_shardings=outputs,
                donate_argnums=donated,
            )
        return self._programs[name]


def make_train_step(
    policy: Policy,
    drafter: Drafter,
    reward_fn: RewardFn,
    config: TrainConfig,
    mesh: Mesh,
    rollout_fn: RolloutFn = speculative_rollout,
    loss_fn: LossFn = policy_loss,
    teacher: Policy | None = None,
    hint_template: HintTemplate | None = None,
) -> TrainStep:
    """Return `step`, compiled and traced once: `state, rollout, metrics = step(state, prompts)`.

    reward_fn:  (rollout, prompts) -> Reward, traced: the step is one program. A `HostReward`: it is two, and the host
                scores between them. `host_reward` around a scorer keeps one program, with a callback.
    rollout_fn: (policy, drafter, params, prompts, seed_step, config) -> Rollout; it runs on each data shard and sees
                that shard's prompts alone. Of its Rollout only tokens and lengths are required.
    loss_fn:    (LossInputs, LossConfig) -> LossOutput, the policy's loss for each token (specjax.train.loss).
    teacher:    the network of `TrainState.teacher`, or with `config.teacher.kind` base or self the policy.
    hint_template: where hints stand in the teacher's prompts, with `config.teacher.hint`.

    Raises ValueError if samples are compared within groups of one. The state is donated: parameters and moments are
    updated in place. A call raises ValueError if the prompts or the
    selected groups do not divide over the mesh, if the training sequences of a shard do not divide into minibatches and
    microbatches, if a rollout does not have group_size sequences per prompt, or if there is a KL coefficient but no
    reference policy.
    """
    check_groups(config)
    check_mixture(config, policy)
    check_carry_over(config.rollout, drafter)
    return TrainStep(Stages(policy, drafter, reward_fn, config, mesh, rollout_fn, loss_fn, teacher, hint_template))
