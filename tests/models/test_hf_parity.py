"""Our decoder agrees with stored outputs of transformers (tests/golden/make_golden.py). Needs no torch."""

import jax
import numpy as np
import pytest

from models.hf.config import read_hf_config
from models.hf.load import load_policy
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.parity import FEATURE_LAYERS, GOLDEN, Case, check_cached_decode, check_full_forward, close, load_case


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama", "qwen3_windows", "qwen3_moe"])
def case(request: pytest.FixtureRequest) -> Case:
    with np.load(GOLDEN / request.param / "expected.npz") as expected:
        return load_case(GOLDEN / request.param, dict(expected))


def test_full_forward(case: Case):
    check_full_forward(case)


def test_prefill_and_cached_decode(case: Case):
    check_cached_decode(case)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("qwen3", MeshConfig(data=2, fsdp=2, tensor=2)),
        ("qwen3_moe", MeshConfig(expert=4)),
        ("qwen3_moe", MeshConfig(data=2, expert=2, tensor=2)),
    ],
)
def test_full_forward_on_a_mesh(name: str, shape: MeshConfig):
    """Some layers of the mixture are dense."""
    directory, mesh = GOLDEN / name, make_mesh(shape)
    config = read_hf_config(directory, FEATURE_LAYERS)
    assert config.experts is None or config.expert_layers == (0, 2, 3)
    with np.load(directory / "expected.npz") as expected, jax.set_mesh(mesh):
        # A fourth row, so that the mesh divides the batch.
        tokens, logits = (np.concatenate([expected[name], expected[name][:1]]) for name in ("tokens", "logits"))
        case = Case(config, load_policy(directory, config, mesh), {})
        close(case.apply(tokens, np.zeros(4)).logits, logits)
