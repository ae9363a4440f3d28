"""The step as two programs around a host scorer, and stage by stage, compared with the fused step.

test_meshes.py checks that timed stages give the results of the fused step.
"""

import time
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from specjax.program import Program, finish_compiling
from specjax.rewards import HostReward, host_reward
from specjax.rollout.generate import place
from specjax.rollout.speculative import speculative_rollout
from specjax.train.config import TrainConfig
from specjax.train.selection import SelectionConfig
from specjax.train.stages import Stages
from specjax.train.timed_step import Clock, StagedStep
from specjax.train.train_step import TrainStep, make_train_step
from tests.compiled import compilations
from tests.specjax import training
from tests.specjax.training import CONFIG, host_copy, last_gradients, make_prompts, mesh_of, relative_gap, state_on

POLICY, DRAFTER = training.networks()
SELECTED = replace(CONFIG, selection=SelectionConfig(groups=len(make_prompts().lengths) // 2))


def count_fives(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens == 5, False).sum(axis=1)
    return counts.astype(np.float32), (counts > 0).astype(np.float32)


def slow(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    time.sleep(0.2)
    return count_fives(*arrays)


@cache
def split_on(shape: tuple[int, int, int], config: TrainConfig) -> TrainStep:
    """Return a step that fails if its rollout is traced twice."""
    rollout_fn = training.traced_once(speculative_rollout)
    return make_train_step(POLICY, DRAFTER, HostReward(count_fives), config, mesh_of(*shape), rollout_fn)


@pytest.mark.parametrize(
    ("shape", "config"),
    [pytest.param((1, 1, 1), CONFIG, id="one"), pytest.param((2, 2, 2), SELECTED, id="mesh", marks=pytest.mark.slow)],
)
def test_split_and_staged_steps_take_the_step_of_one_program(shape: tuple[int, int, int], config: TrainConfig) -> None:
    """Take three steps. Programs are traced once, tokens are equal, gradients are equal up to rounding.

    Both programs are compiled ahead, for what they are called with. The stages, on one device only, count the scorer's
    time as that of the reward.
    """
    mesh, split = mesh_of(*shape), split_on(shape, config)
    fused = make_train_step(POLICY, DRAFTER, host_reward(count_fives, mesh), config, mesh)
    stages = StagedStep(Stages(POLICY, DRAFTER, HostReward(slow), config, mesh))
    one, two, three = (state_on(mesh) for _ in range(3))
    split.start_compiling(two, make_prompts())
    finish_compiling()
    for _ in range(3):
        one, rollout, metrics = fused(one, make_prompts())
        with compilations() as heard:
            two, other, others = split(two, make_prompts())
        assert not {"generate", "update"} & {name for name, _ in heard}
        assert metrics.keys() == others.keys()
        found = [(two, other)]
        if shape == (1, 1, 1):
            (three, third, _), seconds = stages(three, make_prompts())
            assert seconds["reward"] >= 0.2
            found += [(three, third)]
        for state, again in found:
            np.testing.assert_array_equal(rollout.tokens, again.tokens)
            np.testing.assert_array_equal(rollout.reward.value, again.reward.value)
            assert relative_gap(last_gradients(host_copy(one)), last_gradients(host_copy(state))) < 1e-6


def test_no_program_holds_a_callback_and_the_state_is_donated() -> None:
    mesh, step = mesh_of(1, 1, 1), split_on((1, 1, 1), CONFIG)
    state, prompts = state_on(mesh), place(make_prompts(), mesh)
    rollout = step.generate(state, prompts)
    scores = HostReward(count_fives)(rollout, prompts)
    arguments = jax.tree.map(jax.typeof, (state, prompts, rollout, scores))
    step.update(jax.tree.map(jnp.copy, state), prompts, jax.tree.map(jnp.copy, rollout), scores)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    step.update(state, prompts, rollout, scores)
    assert all(x.is_deleted() for x in jax.tree.leaves((state, rollout.tokens)))
    for name, program in step._programs.items():
        assert "callback" not in program.trace(*arguments[: 2 if name == "generate" else 4]).lower().as_text()


@pytest.mark.parametrize(("pure", "ran"), [(False, [1, 2]), (True, [2, 3])])
def test_a_pure_program_is_run_once_more_the_first_time(pure: bool, ran: list[int]) -> None:
    runs = []

    def counted(x: jax.Array) -> jax.Array:
        io_callback(lambda: runs.append(0), None)
        return 2 * x

    clock, program = Clock(), Program(counted, mesh_of(1, 1, 1))
    for count in ran:
        result, seconds = clock(program, jnp.float32(3), pure=pure)
        assert result == 6 and seconds > 0
        jax.effects_barrier()
        assert len(runs) == count
