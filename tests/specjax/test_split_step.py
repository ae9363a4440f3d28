"""The step as two programs around a host scorer, compared with the fused step."""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.rewards import HostReward, host_reward
from specjax.rollout.generate import place
from specjax.rollout.speculative import speculative_rollout
from specjax.train.config import TrainConfig
from specjax.train.selection import SelectionConfig
from specjax.train.stages import Stages
from specjax.train.timed_step import StagedStep
from specjax.train.train_step import make_train_step
from tests.specjax.training import (
    CONFIG,
    host_copy,
    last_gradients,
    make_prompts,
    mesh_of,
    networks,
    relative_gap,
    state_on,
    traced_once,
)

POLICY, DRAFTER = networks()
SELECTED = replace(CONFIG, selection=SelectionConfig(groups=len(make_prompts().lengths) // 2))


def count_fives(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens == 5, False).sum(axis=1)
    return counts.astype(np.float32), (counts > 0).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "config"),
    [pytest.param((1, 1, 1), CONFIG, id="one"), pytest.param((2, 2, 2), SELECTED, id="mesh", marks=pytest.mark.slow)],
)
def test_two_programs_take_the_step_of_one(shape: tuple[int, int, int], config: TrainConfig) -> None:
    """Take three steps. Programs are traced once, tokens are equal, gradients are equal up to rounding."""
    mesh = mesh_of(*shape)
    fused = make_train_step(POLICY, DRAFTER, host_reward(count_fives, mesh), config, mesh)
    split = make_train_step(POLICY, DRAFTER, HostReward(count_fives), config, mesh, traced_once(speculative_rollout))
    states = state_on(mesh), state_on(mesh)
    for _ in range(3):
        (one, rollout, metrics), (two, other, others) = (
            fused(states[0], make_prompts()),
            split(states[1], make_prompts()),
        )
        np.testing.assert_array_equal(rollout.tokens, other.tokens)
        np.testing.assert_array_equal(rollout.reward.value, other.reward.value)
        assert metrics.keys() == others.keys()
        gradients = last_gradients(host_copy(one)), last_gradients(host_copy(two))
        assert relative_gap(*gradients) < 1e-6
        states = one, two


def test_no_program_holds_a_callback_and_the_state_is_donated() -> None:
    mesh = mesh_of(1, 1, 1)
    step = make_train_step(POLICY, DRAFTER, HostReward(count_fives), CONFIG, mesh)
    state, prompts = state_on(mesh), place(make_prompts(), mesh)
    rollout = step.generate(state, prompts)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    scores = HostReward(count_fives)(rollout, prompts)
    arguments = jax.tree.map(jax.typeof, (state, prompts, rollout, scores))
    step.update(state, prompts, rollout, scores)
    assert all(x.is_deleted() for x in jax.tree.leaves((state, rollout.tokens)))
    with jax.set_mesh(mesh):
        for name, program in step._jitted.items():
            assert "callback" not in program.lower(*arguments[: 2 if name == "generate" else 4]).as_text()


def test_a_staged_step_counts_the_scorer_as_reward() -> None:
    def slow(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.2)
        return count_fives(*arrays)

    mesh = mesh_of(1, 1, 1)
    staged = StagedStep(Stages(POLICY, DRAFTER, HostReward(slow), CONFIG, mesh))
    (state, rollout, _), _ = staged(state_on(mesh), make_prompts())
    split = make_train_step(POLICY, DRAFTER, HostReward(count_fives), CONFIG, mesh)
    expected, other, _ = split(state_on(mesh), make_prompts())
    np.testing.assert_array_equal(rollout.tokens, other.tokens)
    assert relative_gap(last_gradients(host_copy(state)), last_gradients(host_copy(expected))) < 1e-6
    _, seconds = staged(state, make_prompts())
    assert seconds["reward"] >= 0.2
