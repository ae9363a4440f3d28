"""Faults in a head's checkpoint that do not change shapes. They reduce acceptance enough to raise the alarm."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.run.draft_monitor import wrongly_loaded
from models.checkpoints.draft import SavedDraft
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.files import read_json, write_json
from models.hf.drafts.reader import load_public_draft
from models.hf.drafts.writer import save_public_draft
from models.params import init_params
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, PyTree
from tests.refusals import refuses
from tests.tiny import distilled

VOCAB, ROWS, LENGTH, STEPS = 11, 16, 10, 150
ALARM = 0.1
LAYER = dict(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=2, head_dim=8, rope_theta=2.0)
POLICY = DecoderConfig(**LAYER, vocab_size=VOCAB, num_layers=6, feature_layers=(2, 3, 4))
IDS = np.array([0, 1, 2, 4, 5, 7, 8, 10], np.int32)
HEAD = Eagle3Config(**LAYER, feature_size=48, vocab_size=VOCAB, draft_vocab_size=len(IDS))
ONE = make_mesh(MeshConfig())


@pytest.fixture(scope="module")
def weights() -> PyTree:
    """Return random weights, large enough that the policy's distributions are far from uniform."""
    init = jax.jit(lambda key: nn.unbox(init_decoder(POLICY, key)))
    return jax.tree.map(lambda x: 2 * x, init(jax.random.key(0)))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).integers(VOCAB, size=(ROWS, LENGTH)), jnp.int32)


def forward(weights: PyTree, tokens: jax.Array, layers: tuple[int, ...], early: int = 0) -> PolicyOutput:
    """Return the features that a head reads, each `early` positions before the token that it belongs to."""
    policy = make_policy(replace(POLICY, feature_layers=layers))
    output = policy.apply(weights, tokens, jnp.zeros(ROWS, jnp.int32))
    return replace(output, features=jnp.roll(output.features, -early, axis=1))


def trained_head(weights: PyTree, tokens: jax.Array, early: int = 0) -> SavedDraft:
    """Return a head trained on the outputs of `forward`."""
    drafter, everywhere = make_eagle3(HEAD, make_policy(POLICY), IDS, unroll=1), jnp.ones(tokens.shape, bool)

    @jax.jit
    def train(params: Params) -> PyTree:
        output = forward(params.policy, tokens, POLICY.feature_layers, early)
        return distilled(drafter, params, tokens, output, everywhere, SamplingLaw(), STEPS)

    draft = train(Params(weights, init_params(partial(init_eagle3, HEAD), jax.random.key(1), ONE)))
    return SavedDraft(HEAD, draft, IDS, POLICY.feature_layers)


def acceptance(head: SavedDraft, weights: PyTree, tokens: jax.Array, early: int = 0) -> float:
    """Return the mean overlap of the head's law with the policy's."""
    config, draft, ids, layers = head
    drafter = make_eagle3(config, make_policy(POLICY), ids, unroll=1)

    @jax.jit
    def overlap(draft: PyTree) -> jax.Array:
        output, everywhere = forward(weights, tokens, layers, early), jnp.ones(tokens.shape, bool)
        return jnp.sum(drafter.loss(Params(weights, draft), tokens, output, everywhere, SamplingLaw()).overlap)

    return float(overlap(draft)) / (ROWS * (LENGTH - 2))


def assert_alarm(promised: float, found: float) -> None:
    """Verify that a run warns in its first step if its head's file states `promised`, but the head reaches `found`."""
    stated = MadeFor("the policy", POLICY.hidden_size, POLICY.num_layers, 1.0, promised)
    assert promised > 0.5 and found < promised - ALARM
    draft: Any = SimpleNamespace(made_for=stated, read_from="draft.path", usual_causes="")
    assert wrongly_loaded(draft, promised, 1.0, "a command") is None
    assert wrongly_loaded(draft, found, 1.0, "a command") is not None


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, weights: PyTree, tokens: jax.Array) -> Path:
    """Return a head distilled from the policy, in the layout of SpecForge."""
    directory = tmp_path_factory.mktemp("published") / "head"
    save_public_draft(directory, trained_head(weights, tokens), "specforge")
    return directory


@pytest.fixture(scope="module")
def correct_acceptance(published: Path, weights: PyTree, tokens: jax.Array) -> float:
    return acceptance(load_public_draft(published, ONE), weights, tokens)


# Valid ids in ascending order, as a map requires. Without t2d the fault cannot be seen.
OTHER_IDS = np.array([0, 2, 3, 4, 6, 7, 9, 10])
FAULTS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray | None]]] = {
    # Layers are counted as in speculators, so the head reads the layer after each of its own.
    "layer ids of the other dialect": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, {}),
    "one layer too low": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, {}),
    "another rope": ({"rope_theta": 10_000.0}, {}),
    "another map": ({}, {"d2t": OTHER_IDS - np.arange(len(IDS)), "t2d": None}),
}


# The fast tests plant one of them, because distilling the correct head takes long.
QUICK = "another map"


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_changed_file_raises_the_alarm(
    tmp_path: Path, published: Path, weights: PyTree, tokens: jax.Array, correct_acceptance: float, fault: str
):
    fields, tensors = FAULTS[fault]
    changed = {**load_file(published / "model.safetensors"), **tensors}
    save_file({name: x for name, x in changed.items() if x is not None}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", read_json(published / "config.json") | fields)
    assert_alarm(correct_acceptance, acceptance(load_public_draft(tmp_path, ONE), weights, tokens))


def test_a_map_with_its_flags_is_refused_at_load(tmp_path: Path, published: Path):
    tensors = load_file(published / "model.safetensors") | {"d2t": OTHER_IDS - np.arange(len(IDS))}
    save_file(tensors, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", read_json(published / "config.json"))
    with refuses("t2d:...11...d2t"):
        load_public_draft(tmp_path, ONE)


@pytest.mark.slow
def test_a_head_of_an_earlier_policy_raises_the_alarm(
    published: Path, weights: PyTree, tokens: jax.Array, correct_acceptance: float
):
    """The policy has changed by as much as its random weights differ from each other."""
    keys = jax.random.split(jax.random.key(5), len(jax.tree.leaves(weights)))
    keys = jax.tree.unflatten(jax.tree.structure(weights), list(keys))
    later = jax.tree.map(lambda x, key: x + jnp.std(x) * jax.random.normal(key, x.shape), weights, keys)
    assert_alarm(correct_acceptance, acceptance(load_public_draft(published, ONE), later, tokens))


@pytest.mark.slow
def test_a_head_trained_one_position_off_raises_the_alarm(tmp_path: Path, weights: PyTree, tokens: jax.Array):
    """Its trainer paired each token with its own feature. That predicts well, but rollouts do not have it in time."""
    save_public_draft(tmp_path / "head", trained_head(weights, tokens, early=1), "specforge")
    head = load_public_draft(tmp_path / "head", ONE)
    assert_alarm(acceptance(head, weights, tokens, early=1), acceptance(head, weights, tokens))
