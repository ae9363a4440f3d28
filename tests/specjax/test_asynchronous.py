"""Rollouts on a mesh of their own, against the same stages on one mesh."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.parallel.mesh import MeshConfig, disjoint_mesh
from specjax.rewards import HostReward
from specjax.train.asynchronous import AsynchronousStep
from specjax.train.config import TrainConfig
from specjax.train.stages import Stages
from specjax.train.train_step import TrainStep
from specjax.train.updates import UpdateConfig
from specjax.types import Params, Prompts
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


class Both:
    """The same steps on one mesh and on two, each program compiled once."""

    def __init__(self, config: TrainConfig, shape: tuple[int, ...], rollout_shape: tuple[int, ...]) -> None:
        self.stages = stages_on(*shape, config=config)
        self.step = TrainStep(self.stages)
        rollout_mesh = disjoint_mesh(MeshConfig(*rollout_shape), self.stages.mesh)
        self.asynchronous = AsynchronousStep(self.stages, rollout_mesh)

    def by_hand(self, lag: int, steps: int) -> tuple[Params, list[np.ndarray]]:
        """Every rollout by a copy of the networks from `lag` updates before."""
        state, tokens = state_on(self.stages.mesh, self.stages.config), []
        copies = [host_copy(state.params)] * (lag + 1)
        for prompts in batches(steps):
            behind = jax.device_put(copies[-1 - lag], jax.tree.map(lambda x: x.sharding, state.params))
            rollout = self.step.generate(replace(state, params=behind), prompts)
            tokens.append(np.asarray(rollout.tokens))
            state, _, _ = self.step.update(state, prompts, rollout, self.stages.reward(rollout, prompts))
            copies.append(host_copy(state.params))
        return copies[-1], tokens

    def ahead(self, lag: int, steps: int) -> tuple[Params, list[np.ndarray]]:
        state, tokens, prompts = state_on(self.stages.mesh, self.stages.config), [], batches(steps + lag)
        for batch in prompts[:lag]:
            state = self.asynchronous.begin(state, batch)
        for number, batch in enumerate(prompts[lag:]):
            state, rollout, metrics = self.asynchronous(state, batch)
            tokens.append(np.asarray(rollout.tokens))
            assert int(metrics["asynchronous/lag"]) == min(lag, number) and metrics["asynchronous/waiting"] == lag
        return host_copy(state.params), tokens


@pytest.fixture(scope="module")
def single() -> Both:
    return Both(COUPLED, (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_rollouts_are_those_of_the_networks_some_updates_before_to_the_bit(single: Both, lag: int) -> None:
    """Without lag they are the synchronous step's."""
    (wanted, tokens), (found, others) = single.by_hand(lag, 3), single.ahead(lag, 3)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("rollout_shape", [(2, 1, 1), (2, 1, 2), (1, 1, 1)])
def test_networks_move_between_meshes_of_other_shapes(rollout_shape: tuple[int, ...]) -> None:
    both = Both(COUPLED, (2, 2, 1), rollout_shape)
    (wanted, tokens), (found, others) = both.by_hand(1, 3), both.ahead(1, 3)
    jax.tree.map(np.testing.assert_array_equal, others, tokens)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)


@pytest.mark.slow
def test_a_rollout_ends_while_the_update_before_its_own_goes_on() -> None:
    """An order of events, not of times: of the two that are under way, the short one is ready first."""
    long = replace(COUPLED, updates=UpdateConfig(epochs=40, recompute_old=True))
    stages = stages_on(1, 1, 1, config=long)
    step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(), stages.mesh))
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
    with pytest.raises(ValueError, match="rollout_mesh = .* shares devices"):
        AsynchronousStep(stages, mesh_of(1, 1, 1))
    with pytest.raises(ValueError, match="rollout_mesh = .*: needs 7 devices"):
        disjoint_mesh(MeshConfig(7), stages.mesh)
    with pytest.raises(ValueError, match="its 3 devices must divide 2"):
        AsynchronousStep(stages, disjoint_mesh(MeshConfig(3), stages.mesh)).begin(state_on(stages.mesh), make_prompts())
