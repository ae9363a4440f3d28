import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.checkpoints.policy import load_policy_checkpoint, save_policy_checkpoint
from models.config import DecoderConfig
from models.decoder import init_decoder
from models.files import read_json, write_json
from models.params import abstract_params, by_path, init_params, param_shardings
from models.rope import Llama3Scaling
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.refusals import refuses

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


def test_policy_checkpoint(tmp_path: Path, params):
    mixed = {**params, "norm": jax.tree.map(lambda x: x.astype("float32"), params["norm"])}
    save_policy_checkpoint(tmp_path / "policy", mixed, CONFIG)
    config, loaded = load_policy_checkpoint(tmp_path / "policy", ONE)
    assert config == CONFIG
    assert same(loaded, mixed)
    with refuses("policy:...empty"):
        save_policy_checkpoint(tmp_path / "policy", mixed, CONFIG)

    def refused(message: str) -> None:
        with refuses(message):
            load_policy_checkpoint(tmp_path / "policy", ONE)

    path = tmp_path / "policy" / "config.json"
    fields = read_json(path)
    for changed, message in [
        ({**fields, "qkv_bias": True}, "params: ...config.json"),
        ({**fields, "num_layers": 3}, "params: ...config.json"),
        ({**fields, "colour": "red"}, "config.json: ...colour"),
        ({name: value for name, value in fields.items() if name != "head_dim"}, "config.json: ...head_dim"),
    ]:
        write_json(path, changed)
        refused(message)
    write_json(path, fields)
    (tmp_path / "policy" / "params" / "_METADATA").unlink()
    refused("params: ")
    shutil.rmtree(tmp_path / "policy" / "params")
    refused("params: no such directory")
