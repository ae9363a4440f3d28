"""A policy, a draft and a training job that compile in seconds, for tests of the training step."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import count
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxlib.version import __version__ as jaxlib

from models.config import DecoderConfig, Dtype
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.params import abstract_params, param_shardings
from specjax.drafters import HeadDrafter
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.train.batch import TrainBatch
from specjax.train.config import TrainConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.state import init_train_state
from specjax.types import Params, Policy, Prompts, PyTree, Reward, Rollout, TrainState

VOCAB = 16
GROUP = 4
BUDGET = 20
STOP = 3
SHAPE = dict(hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB)
DECODER = DecoderConfig(**SHAPE, num_layers=2, qk_norm=True, feature_layers=(0, 1))
HEAD = Eagle3Config(**SHAPE, feature_size=32, draft_vocab_size=VOCAB)
# XLA's default flags instead of those in tests/conftest.py, for tests of bit-identical results.
AS_SHIPPED = {"xla_backend_optimization_level": 3}
if jaxlib.startswith("0.10."):
    AS_SHIPPED |= {"xla_cpu_use_fusion_emitters": True}
# Without momentum and clipping, Adam's first moment is the last gradient: see `last_gradients`.
TRANSPARENT = OptimizerConfig(learning_rate=1e-2, b1=0.0, clip_norm=1e9)
CONFIG = TrainConfig(
    seed=7,
    rollout=RolloutConfig(group_size=GROUP, max_new_tokens=BUDGET, draft_length=2, stop_tokens=(STOP,)),
    policy_optimizer=TRANSPARENT,
    draft_optimizer=TRANSPARENT,
    draft_training=DraftTrainingConfig(anchors=6),
)


def networks(dtype: Dtype = "float32", unroll: int = 1) -> tuple[Policy, HeadDrafter]:
    policy = make_policy(replace(DECODER, dtype=dtype))
    return policy, make_eagle3(replace(HEAD, dtype=dtype), policy, unroll=unroll)


def mesh_of(*shape: int) -> Mesh:
    return make_mesh(MeshConfig(*shape))


@cache
def _values() -> Params:
    rng = np.random.default_rng(0)

    def fill(x: jax.ShapeDtypeStruct) -> np.ndarray:
        centre = 1.0 if x.ndim == 1 else 0.0
        return (centre + 0.3 * rng.standard_normal(x.shape)).astype(x.dtype)

    inits = partial(init_decoder, DECODER), partial(init_eagle3, HEAD)
    return Params(*(jax.tree.map(fill, abstract_params(init)) for init in inits))


def params_on(mesh: Mesh) -> Params:
    """Return parameters with the same numbers on every mesh, in new buffers that a step may donate."""
    inits = partial(init_decoder, DECODER), partial(init_eagle3, HEAD)
    return jax.device_put(_values(), Params(*(param_shardings(init, mesh) for init in inits)))


def state_on(mesh: Mesh, config: TrainConfig = CONFIG, with_reference: bool = False) -> TrainState:
    return init_train_state(params_on(mesh), config, mesh, with_reference)


def make_prompts(count: int = 8) -> Prompts:
    """Return ragged prompts whose ids are not their indices."""
    rng = np.random.default_rng(1)
    return Prompts(
        tokens=jnp.array(rng.integers(4, VOCAB, (count, 6)), jnp.int32),
        lengths=jnp.array(np.resize([6, 3, 1, 5, 4, 4, 2, 2], count), jnp.int32),
        id=jnp.array(np.arange(100, 100 + count)[::-1], jnp.int32),
    )


def ragged_batch(rows: int, width: int, vocab: int = VOCAB, failed: int = 5, samples: int = 1) -> TrainBatch:
    """Return ragged prompts and completions. Each token has its own advantage; row `failed` has no reward.

    samples: number of successive rows with the same prompt.
    """
    rng = np.random.default_rng(0)
    start = np.repeat(rng.integers(1, 5, (rows // samples, 1)), samples, axis=0)
    length = rng.integers(3, width - 5, (rows, 1))
    column, scored = np.arange(width)[None], jnp.arange(rows) != failed
    tokens = rng.integers(0, vocab, (rows, width))
    tokens = np.where(column < start, np.repeat(tokens[::samples], samples, axis=0), tokens)
    return TrainBatch(
        tokens=jnp.array(tokens, jnp.int32),
        completion=jnp.array((column >= start) & (column < start + length)),
        reward=jnp.where(scored, 1.0, jnp.nan),
        counted=scored,
        mu=jnp.array(rng.normal(-3.0, 0.5, (rows, width)), jnp.float32),
        advantage=jnp.array(rng.normal(size=(rows, width)), jnp.float32),
    )


NUMBERS = count()


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, made to fail if it is traced twice.

    It gets its own name, because chex counts functions of the same name together.
    """

    @wraps(function)
    def own(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    own.__name__ = f"traced_once_{next(NUMBERS)}"
    return chex.assert_max_traces(own, n=1)


def count_fives(rollout: Rollout, prompts: Prompts) -> Reward:
    """Traced reward: the number of tokens 5 in a completion; correct if there is one."""
    value = jnp.sum(rollout.tokens == 5, axis=1, dtype=jnp.float32)
    return Reward(value, (value > 0).astype(jnp.float32))


def last_gradients(state: TrainState) -> Params:
    """Return the exact gradients of the update that produced `state`, under the `TRANSPARENT` optimiser."""

    def moment(state: PyTree) -> PyTree:
        found = [x.mu for x in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(x)]
        return found[0] if found else {}

    return Params(moment(state.optimizer.policy), moment(state.optimizer.draft))


def is_adam(x: object) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def host_copy(tree: PyTree) -> PyTree:
    """Return copies of the arrays in host memory, which donation does not affect."""
    return jax.tree.map(lambda x: np.array(x), tree)


def relative_gap(tree: PyTree, expected: PyTree) -> float:
    """Return the largest norm of a leaf's difference, relative to the norm of the whole tree."""
    scale = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in map(np.asarray, jax.tree.leaves(expected))))
    gaps = jax.tree.map(
        lambda a, b: np.linalg.norm((np.asarray(a, np.float64) - np.asarray(b)).ravel()), tree, expected
    )
    return float(max(jax.tree.leaves(gaps)) / scale)


def assert_same_bits(tree: PyTree, expected: PyTree) -> None:
    for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
