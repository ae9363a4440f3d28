"""Rollouts on a mesh of their own, against the same stages on one mesh."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.parallel.mesh import MeshConfig
from specjax.parallel.send import disjoint_mesh
from specjax.rewards import HostReward
from specjax.train.asynchronous import AsynchronousStep
from specjax.train.config import TrainConfig
from specjax.train.stages import Stages
from specjax.train.train_step import TrainStep
from specjax.train.updates import UpdateConfig
from specjax.types import Prompts, TrainState
from tests.specjax.test_split_step import count_fives
from tests.specjax.training import CONFIG, host_copy, make_prompts, mesh_of, networks, state_on

POLICY, DRAFTER = networks()
COUPLED = replace(CONFIG, rollout=replace(CONFIG.rollout, verifier="coupled"))


def stages_on(*shape: int, config: TrainConfig = COUPLED) -> Stages:
    return Stages(POLICY, DRAFTER, HostReward(count_fives), config, mesh_of(*shape))


def batches(count: int) -> list[Prompts]:
    """Batches that differ."""
    prompts = make_prompts()
    return [replace(prompts, id=prompts.id + 100 * number) for number in range(count)]


def by_hand(stages: Stages, lag: int, steps: int) -> tuple[TrainState, list[np.ndarray]]:
    """The same steps on one mesh: every rollout by a copy of the networks from `lag` updates before."""
    step, state, tokens = TrainStep(stages), state_on(stages.mesh, stages.config), []
    copies = [host_copy(state)] * (lag + 1)
    for number, prompts in enumerate(batches(steps)):
        behind = jax.device_put(copies[-1 - lag].params, jax.tree.map(lambda x: x.sharding, state.params))
        rollout = step.generate(replace(state, params=behind), prompts)
        tokens.append(np.asarray(rollout.tokens))
        state, _, _ = step.update(state, prompts, rollout, stages.reward(rollout, prompts))
        copies.append(host_copy(state))
        assert int(state.step) == number + 1
    return host_copy(state), tokens


def ahead(stages: Stages, rollout_shape: tuple[int, ...], lag: int, steps: int) -> tuple[TrainState, list[np.ndarray]]:
    step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(*rollout_shape), stages.mesh), lag)
    state, tokens, prompts = state_on(stages.mesh, stages.config), [], batches(steps + lag)
    for batch in prompts[:lag]:
        state = step.begin(state, batch)
    for number, batch in enumerate(prompts[lag:]):
        state, rollout, metrics = step(state, batch)
        tokens.append(np.asarray(rollout.tokens))
        assert int(metrics["asynchronous/lag"]) == min(lag, number)
    return host_copy(replace(state, ahead=())), tokens


def test_without_lag_one_device_each_takes_the_synchronous_step_bit_for_bit() -> None:
    stages = stages_on(1, 1, 1, config=CONFIG)
    (wanted, tokens), (found, others) = by_hand(stages, 0, 3), ahead(stages, (1, 1, 1), 0, 3)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rollouts_are_those_of_the_networks_some_updates_before(lag: int) -> None:
    stages = stages_on(1, 1, 1)
    (wanted, tokens), (found, others) = by_hand(stages, lag, 4), ahead(stages, (1, 1, 1), lag, 4)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


@pytest.mark.slow
def test_networks_move_between_meshes_of_other_shapes() -> None:
    (wanted, tokens), (found, others) = by_hand(stages_on(2, 2, 1), 1, 3), ahead(stages_on(2, 2, 1), (2, 1, 2), 1, 3)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found.params, wanted.params)


def test_a_rollout_ends_while_the_update_before_its_own_goes_on() -> None:
    """By the order of events, not by time: of the two that are under way, the short one is ready first."""
    long = replace(COUPLED, updates=UpdateConfig(epochs=40, recompute_old=True))
    stages = stages_on(1, 1, 1, config=long)
    step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(), stages.mesh), 1)
    prompts = batches(4)
    state = step.begin(state_on(stages.mesh, long), prompts[0])
    for batch in prompts[1:]:
        state, _, metrics = step(state, batch)
        jax.block_until_ready(state.ahead[0].rollout)
        overlapped = not metrics["loss/policy"].is_ready()
    # The steps before compiled.
    assert overlapped


def test_what_cannot_be_is_refused() -> None:
    stages = stages_on(2, 1, 1)
    with pytest.raises(ValueError, match="lag = -1: must be at least 0"):
        AsynchronousStep(stages, disjoint_mesh(MeshConfig(), stages.mesh), -1)
    with pytest.raises(ValueError, match="rollout_mesh = .* shares devices"):
        AsynchronousStep(stages, mesh_of(1, 1, 1), 1)
    with pytest.raises(ValueError, match="state.ahead: 0 rollouts wait, must be lag = 1"):
        step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(), stages.mesh), 1)
        step(state_on(stages.mesh), make_prompts())
    with pytest.raises(ValueError, match="its 3 devices must divide 2"):
        step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(3), stages.mesh), 0)
        step(state_on(stages.mesh), make_prompts())
