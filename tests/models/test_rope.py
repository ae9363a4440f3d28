"""Rope frequencies agree with those of transformers (tests/golden/make_golden.py), and configs of rope are checked."""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.hf.rope import rope_from_hf, rope_to_hf
from models.rope import LinearScaling, Llama3Scaling, YarnScaling, frequencies, rope, rotation, scaling_from_json
from specjax.testing.hlo import Program
from tests.models.parity import GOLDEN
from tests.refusals import refuses

CASES = json.loads((GOLDEN / "rope.json").read_text())
FIELDS = {"max_position_embeddings": 2048}
LENGTH = "original_max_position_embeddings"
LLAMA3 = dict(rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=32)


def old_style(found: dict[str, Any]) -> dict[str, Any]:
    found = dict(found)
    return {"rope_theta": found.pop("rope_theta"), "rope_scaling": {"type": found.pop("rope_type"), **found}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['rope']['rope_type']}-{case['head_dim']}")
def test_frequencies_and_magnitude_are_those_of_transformers(case: dict[str, Any]) -> None:
    theta, scaling = rope_from_hf(FIELDS | {"rope_parameters": case["rope"]})
    half = case["head_dim"] // 2
    np.testing.assert_allclose(frequencies(half, theta, scaling), case["frequencies"], rtol=1e-6)
    x = jnp.ones((1, 1, 1, 2 * half))
    at_zero = rope(x, rotation(jnp.zeros((1, 1), jnp.int32), 2 * half, theta, scaling))
    np.testing.assert_allclose(at_zero, x * case["attention_factor"], rtol=1e-6)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case["rope"]["rope_type"])
def test_both_styles_the_export_and_our_own_json_say_the_same(case: dict[str, Any]) -> None:
    theta, scaling = rope_from_hf(FIELDS | {"rope_parameters": case["rope"]})
    assert rope_from_hf(FIELDS | old_style(case["rope"])) == (theta, scaling)
    assert rope_from_hf(FIELDS | rope_to_hf(theta, scaling)) == (theta, scaling)
    assert scaling is not None and scaling_from_json(json.loads(json.dumps(asdict(scaling)))) == scaling


def test_yarn_without_an_original_length_has_the_positions_of_the_model() -> None:
    scaling = rope_from_hf(FIELDS | {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": None}})[1]
    assert scaling == YarnScaling(4.0, 2048)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, 'rope_scaling.type = "dynamic": ..."default"..."linear"'),
        ({"rope_type": "linear"}, "rope_scaling.factor = null: "),
        ({"rope_type": "linear", "factor": 2, "truncate": True}, "rope_scaling.truncate = true: "),
        ({"rope_type": "yarn", "factor": -1}, "rope_scaling.factor = -1: "),
        ({"rope_type": "yarn", "factor": 2, "mscale": "1"}, 'rope_scaling.mscale = "1": '),
        ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "rope_scaling.truncate = 1: ...true...false"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}, "rope_scaling: beta_fast = 0.5: "),
        ({**LLAMA3, "high_freq_factor": 1}, "rope_scaling: high_freq_factor = 1.0: "),
        ({**LLAMA3, LENGTH: 1.5}, f"rope_scaling.{LENGTH} = 1.5: "),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with refuses(message):
        rope_from_hf(FIELDS | {"rope_scaling": fields})


def test_scalings_check_themselves_and_unknown_ones_are_refused() -> None:
    for make, refused in (
        (lambda: LinearScaling(0.0), "factor = 0.0: ...0"),
        (lambda: Llama3Scaling(8.0, -1.0, 4.0, 8192), "low_freq_factor = -1.0: ...0"),
        (lambda: Llama3Scaling(8.0, 1.0, 1.0, 8192), "high_freq_factor = 1.0: ...low_freq_factor"),
        (lambda: YarnScaling(2.0, 8, beta_fast=1.0, beta_slow=2.0), "beta_fast = 1.0: ...beta_slow"),
        (lambda: scaling_from_json({"factor": 2.0, "alpha": 1.0}), "rope_scaling: ...alpha, factor"),
    ):
        with refuses(refused):
            make()


@pytest.mark.parametrize("cached", [False, True])
def test_the_layers_of_a_forward_share_one_rotation(cached: bool) -> None:
    shape = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4)
    config = DecoderConfig(num_layers=3, sliding_window=3, sliding_layers=(1,), **shape)
    policy, start = make_policy(config), jnp.zeros(2, jnp.int32)
    params = nn.unbox(jax.eval_shape(partial(init_decoder, config), jax.random.key(0)))
    caches = (jax.eval_shape(lambda: policy.init_cache(2, 9)),) if cached else ()
    traced = jax.make_jaxpr(policy.apply)(params, jax.ShapeDtypeStruct((2, 5), jnp.int32), start, *caches)
    assert (str(traced).count(" cos "), str(traced).count(" sin ")) == (1, 1)
    compiled = jax.jit(policy.apply).lower(params, jax.ShapeDtypeStruct((2, 5), jnp.int32), start, *caches).compile()
    lines = [line for computation in Program(compiled.as_text()).computations.values() for line in computation]
    assert sum(line.opcode == "cosine" for line in lines) == 1


def test_a_rotation_at_one_token_of_each_row_is_that_of_its_position() -> None:
    positions, index = jnp.asarray([[0, 1, 2], [5, 6, 7]]), jnp.asarray([[2], [0]])
    whole, one = (rotation(x, 8, 1e4, None) for x in (positions, jnp.asarray([[2], [5]])))
    for got, wanted in zip(whole.at(index), one, strict=True):
        np.testing.assert_array_equal(got, wanted)
