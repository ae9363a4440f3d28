"""The abstract state has the shapes, dtypes and shardings of the real state. tests/launch/test_abstract.py has more."""

from dataclasses import replace

import chex
import jax
import numpy as np

from specjax.parallel.memory import bytes_per_device
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.state import abstract_train_state, init_train_state
from specjax.types import TrainState
from tests.specjax.training import CONFIG, mesh_of, params_on


def described(state: TrainState) -> list[tuple]:
    return [(path, x.shape, x.dtype, x.sharding) for path, x in jax.tree.leaves_with_path(state)]


def test_the_abstract_state_with_everything_is_the_real_one() -> None:
    mesh, seconds = mesh_of(2, 2, 2), np.full((1, 2), 0.5, np.float32)
    rollout = replace(CONFIG.rollout, draft_length=0, draft_lengths=(0, 2))
    draft_training = DraftTrainingConfig(replay=2)
    config = replace(
        CONFIG, rollout=rollout, policy_optimizer=OptimizerConfig(kind="muon"), draft_training=draft_training
    )
    params, given = params_on(mesh), (config, mesh, True, seconds, (8, 6))
    real = init_train_state(params, *given)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    abstract = abstract_train_state(shapes, *given)
    assert described(abstract) == described(real)
    assert bytes_per_device(abstract) == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(real))
    np.testing.assert_array_equal(real.drafting.seconds, seconds)
    chex.assert_trees_all_equal(real.reference, params.policy)
