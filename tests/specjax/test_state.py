"""The abstract state has the shapes, dtypes and shardings of the real state, and so gives the same program."""

from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest

from specjax.parallel.memory import bytes_per_device
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.state import abstract_train_state, init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import TrainState
from tests.specjax.training import CONFIG, count_fives, make_prompts, mesh_of, networks, params_on

MESH = mesh_of(2, 2, 2)
POLICY, DRAFTER = networks()
EVERYTHING = replace(
    CONFIG,
    rollout=replace(CONFIG.rollout, draft_length=0, draft_lengths=(0, 2)),
    policy_optimizer=OptimizerConfig(kind="muon"),
    draft_training=DraftTrainingConfig(replay=2),
)
ARGUMENTS: dict[str, Any] = dict(with_reference=True, seconds=np.full((1, 2), 0.5, np.float32), prompts=(8, 6))


def described(state: TrainState) -> list[tuple[Any, ...]]:
    return [(path, x.shape, x.dtype, x.sharding) for path, x in jax.tree.leaves_with_path(state)]


@pytest.mark.parametrize("whole", [False, True], ids=["plain", "everything"])
def test_the_abstract_state_is_the_real_one(whole: bool) -> None:
    config, kept = (EVERYTHING, ARGUMENTS) if whole else (CONFIG, {})
    params = params_on(MESH)
    real = init_train_state(params, config, MESH, **kept)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    abstract = abstract_train_state(shapes, config, MESH, **kept)
    assert described(abstract) == described(real)
    assert bytes_per_device(abstract) == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(real))
    if whole:
        np.testing.assert_array_equal(real.drafting.seconds, kept["seconds"])
        chex.assert_trees_all_equal(real.reference, params.policy)


def test_a_step_lowers_from_shapes_alone() -> None:
    step, params, prompts = make_train_step(POLICY, DRAFTER, count_fives, CONFIG, MESH), params_on(MESH), make_prompts()
    text = step.lower(init_train_state(params, CONFIG, MESH), prompts).as_text()
    shapes = abstract_train_state(params, CONFIG, MESH), jax.eval_shape(lambda: prompts)
    assert step.lower(*shapes).as_text() == text
