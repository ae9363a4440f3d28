from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.config import DecoderConfig
from models.decoder import init_decoder
from models.params import abstract_params, by_path, init_params, param_shardings
from models.rope import Llama3Scaling
from specjax.parallel.mesh import MeshConfig, make_mesh

SHAPE = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
KINDS = dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32), dtype="bfloat16", param_dtype="bfloat16")
CONFIG = DecoderConfig(**SHAPE, **KINDS, feature_layers=(0,))
INIT = partial(init_decoder, CONFIG)
ONE, EIGHT = make_mesh(MeshConfig()), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.fixture(scope="module")
def params():
    return init_params(INIT, jax.random.key(0), EIGHT)


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y) and x.dtype == y.dtype, a, b)))


def test_shardings_and_shapes(params):
    found, expected = by_path(params), by_path(abstract_params(INIT, EIGHT))
    assert found.keys() == expected.keys()
    for path, x in found.items():
        assert (x.shape, x.dtype, x.sharding) == (expected[path].shape, expected[path].dtype, expected[path].sharding)
    spec = {path: sharding.spec for path, sharding in by_path(param_shardings(INIT, EIGHT)).items()}
    assert spec["embed", "embedding"] == P("tensor", "fsdp")
    assert spec["layer_0", "attention", "k", "kernel"] == P("fsdp", "tensor", None)
    assert spec["layer_0", "attention", "o", "kernel"] == P("tensor", None, "fsdp")
    assert spec["layer_0", "mlp", "down", "kernel"] == P("tensor", "fsdp")
    assert spec["norm", "scale"] == P(None)


def test_initialisation_does_not_depend_on_the_mesh(params):
    assert same(params, init_params(INIT, jax.random.key(0), ONE))
