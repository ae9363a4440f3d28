"""Gaps between the log-probs of rollout and training that are small per token and large per sequence."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from launch.run.console import logprob_alarm
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import SeedStep
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.testing import tiny_policy
from specjax.train.config import TrainConfig
from specjax.train.loss import LossConfig
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Params, Policy, Prompts, Reward, Rollout

BUDGET, GAP = 20, 0.04
POLICY, WEIGHTS = tiny_policy()
PROMPTS = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.arange(2, dtype=jnp.int32))
ONE_ROW, ALTERNATING = np.eye(4)[2][:, None], np.where(np.arange(BUDGET) % 2, -1, 1)
# [rows, tokens] for each step: no gaps, gaps that cancel over a sequence, that add up, that add up in one sequence.
GAPS = GAP * np.stack(np.broadcast_arrays(np.zeros((4, BUDGET)), ALTERNATING, 1.0, ONE_ROW)).astype(np.float32)


def off_by_gaps(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    rollout = speculative_rollout(policy, drafter, params, prompts, seed_step, config)
    return replace(rollout, full=rollout.full - jnp.asarray(GAPS)[seed_step[1]])


def counted(rollout: Rollout, prompts: Prompts) -> Reward:
    value = jnp.sum(rollout.tokens == 1, axis=1, dtype=jnp.float32)
    return Reward(value, value)


def measured(loss: LossConfig) -> list[dict[str, Array]]:
    """Return the metrics of a step of each of `GAPS`."""
    config = TrainConfig(rollout=RolloutConfig(group_size=2, max_new_tokens=BUDGET, draft_length=0), loss=loss)
    mesh = make_mesh(MeshConfig(1, 1, 1))
    state = init_train_state(Params(jax.tree.map(jnp.copy, WEIGHTS), {}), config, mesh)
    step = make_train_step(POLICY, NoDrafter(), counted, config, mesh, off_by_gaps)
    steps = []
    for _ in GAPS:
        state, _, metrics = step(state, PROMPTS)
        steps.append(metrics)
    return steps


SLOW = pytest.mark.slow
LOSSES = {
    "token": (LossConfig(), False),
    "icepop": (LossConfig(importance="icepop"), False),
    "no weight": (LossConfig(importance="sequence", importance_cap=None), False),
    "weight": (LossConfig(importance="sequence"), True),
    "ratio": (LossConfig(ratio="sequence"), True),
}


@pytest.mark.parametrize(
    "name", ["token", "weight", *(pytest.param(name, marks=SLOW) for name in ("icepop", "no weight", "ratio"))]
)
def test_row_26_gaps_that_add_up_raise_the_alarm_by_sequence(name: str) -> None:
    assert all(loss.by_sequence == expected for loss, expected in LOSSES.values())
    loss, by_sequence = LOSSES[name]
    metrics = measured(loss)
    largest = [float(step["rollout/sequence_logprob_gap_max"]) for step in metrics]
    mean = [float(step["rollout/sequence_logprob_gap_mean"]) for step in metrics]
    assert largest == pytest.approx([0, 0, BUDGET * GAP, BUDGET * GAP], abs=1e-3)
    assert mean == pytest.approx([0, 0, BUDGET * GAP, BUDGET * GAP / 4], abs=1e-3)
    assert all(step["rollout/logprob_gap_mean"] < TrainConfig().gap_alarm for step in metrics)
    alarms = [int(step["rollout/logprob_alarm"]) for step in metrics]
    assert alarms == [0, 0, *[int(by_sequence)] * 2]


def test_row_26_the_alarm_says_both_gaps() -> None:
    line = logprob_alarm(3, 0.011, 0.67, None)
    assert "0.011 on average over tokens" in line and "0.670 over a sequence" in line and "\n" not in line
