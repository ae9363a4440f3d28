"""Faults in a head's checkpoint that no shape tells: they cost it acceptance, by more than the alarm lets pass."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch.drafting import misloaded
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.draft_checkpoint import SavedDraft
from models.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.eagle3_files import load_eagle3, save_eagle3
from models.files import read_json, write_json
from models.made_for import MadeFor
from models.params import init_params
from specjax.mesh import MeshConfig, make_mesh
from specjax.sampling import SamplingLaw
from specjax.types import Params, PyTree

VOCAB, ROWS, LENGTH, STEPS = 11, 16, 10, 150
ALARM = 0.1
LAYER = dict(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=2, head_dim=8, rope_theta=2.0)
POLICY = DecoderConfig(**LAYER, vocab_size=VOCAB, num_layers=6, feature_layers=(2, 3, 4))
IDS = np.array([0, 1, 2, 4, 5, 7, 8, 10], np.int32)
HEAD = Eagle3Config(**LAYER, feature_size=48, vocab_size=VOCAB, draft_vocab_size=len(IDS))
ONE = make_mesh(MeshConfig())


@pytest.fixture(scope="module")
def weights() -> PyTree:
    """Random, and large enough for a policy that has opinions."""
    init = jax.jit(lambda key: nn.unbox(init_decoder(POLICY, key)))
    return jax.tree.map(lambda x: 2 * x, init(jax.random.key(0)))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).integers(VOCAB, size=(ROWS, LENGTH)), jnp.int32)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, weights: PyTree, tokens: jax.Array) -> Path:
    """A head distilled from the policy, as SpecForge would have written it."""
    policy, optimiser = make_policy(POLICY), optax.adam(0.02)
    drafter = make_eagle3(HEAD, policy, IDS, unroll=1)

    @jax.jit
    def train(draft: PyTree) -> PyTree:
        output = policy.apply(weights, tokens, jnp.zeros(ROWS, jnp.int32))

        def step(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], None]:
            draft, state = carry

            def loss(draft: PyTree) -> jax.Array:
                everywhere = jnp.ones(tokens.shape, bool)
                result = drafter.loss(Params(weights, draft), tokens, output, everywhere, SamplingLaw())
                return result.loss / tokens.size

            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimiser.update(jax.grad(loss)(draft), state)
                return (optax.apply_updates(draft, updates), state), None

        return jax.lax.scan(step, (draft, optimiser.init(draft)), length=STEPS)[0][0]

    draft = train(init_params(partial(init_eagle3, HEAD), jax.random.key(1), ONE))
    directory = tmp_path_factory.mktemp("published") / "head"
    save_eagle3(directory, SavedDraft(HEAD, draft, IDS, POLICY.feature_layers), "specforge")
    return directory


@pytest.fixture(scope="module")
def acceptance(weights: PyTree, tokens: jax.Array) -> Callable[[Path], float]:
    """Of the head in a directory, as it would be loaded: the mean overlap of its law with the policy's."""

    def acceptance(directory: Path) -> float:
        config, draft, ids, layers = load_eagle3(directory, ONE)
        policy = make_policy(replace(POLICY, feature_layers=layers))
        drafter = make_eagle3(config, policy, ids, unroll=1)

        @jax.jit
        def overlap(draft: PyTree) -> jax.Array:
            output = policy.apply(weights, tokens, jnp.zeros(ROWS, jnp.int32))
            everywhere = jnp.ones(tokens.shape, bool)
            return jnp.sum(drafter.loss(Params(weights, draft), tokens, output, everywhere, SamplingLaw()).overlap)

        return float(overlap(draft)) / (ROWS * (LENGTH - 2))

    return acceptance


@pytest.fixture(scope="module")
def sound(acceptance: Callable[[Path], float], published: Path) -> float:
    return acceptance(published)


FAULTS: dict[str, dict[str, Any]] = {
    # As if they were counted as speculators counts them: each is read as the layer after its own.
    "layer ids of the other dialect": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}},
    "one layer too low": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    "another rope": {"rope_theta": 10_000.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_acceptance_falls(
    tmp_path: Path, published: Path, acceptance: Callable[[Path], float], sound: float, fault: str
):
    assert sound > 0.5
    tensors, fields = published / "model.safetensors", read_json(published / "config.json")
    (tmp_path / "model.safetensors").write_bytes(tensors.read_bytes())
    write_json(tmp_path / "config.json", fields | FAULTS[fault])
    assert (found := acceptance(tmp_path)) < sound - ALARM
    # A run that loads it so says so in its first step.
    stated = MadeFor("the policy", POLICY.hidden_size, POLICY.num_layers, 1.0, sound)
    assert (
        misloaded("draft.path", sound, 1.0, stated) is None and misloaded("draft.path", found, 1.0, stated) is not None
    )
