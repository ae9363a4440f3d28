"""launch.bench's peers: where one is missing a row says so, and where it is there it runs our very weights."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from launch.bench.generation import Generation
from launch.bench.networks import Networks, random_networks, random_prompts
from launch.bench.peers import PLAIN, Absent, load_peers, peers
from launch.bench.peers.protocol import Checkpoint, Peer, Unsupported
from models.hf_export import save_policy
from specjax.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from tests.launch.test_bench import SMALL

PACKAGES = {"tunix": "tunix", "huggingface": "torch", "vllm": "vllm"}


@pytest.fixture(scope="module")
def networks() -> Networks:
    """With an output layer of its own and enlarged weights: else the likeliest token repeats the one before it."""
    own = random_networks(replace(SMALL, decoder=replace(SMALL.decoder, tie_embeddings=False)))
    return replace(own, trained=replace(own.trained, policy=jax.tree.map(lambda x: 2 * x, own.trained.policy)))


@pytest.mark.slow
def test_absent_peers_have_rows_that_say_so(networks: Networks, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("safetensors")
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    rows = {row["sampler"]: row for row in peers(networks, SMALL).rows}
    ours, theirs = [name for name in rows if "specjax" in str(name)], [n for n in rows if "specjax" not in str(n)]
    assert ours == [PLAIN, "specjax, k = 2, forced"] and {"Tunix", "Hugging Face", "vLLM"} <= set(theirs)
    assert all("not installed" in str(rows[name]["note"]) and rows[name]["tokens/s"] is None for name in theirs)
    assert all(isinstance(rows[name]["tokens/s"], float) and not rows[name]["note"] for name in ours)


def test_without_safetensors_all_are_absent(networks: Networks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    found = load_peers(networks, tmp_path / "policy")
    assert len(found) == 6 and all(
        isinstance(peer, Absent) and "not installed" in peer.reason for peer in found.values()
    )


def check_same_tokens(peer: Peer, networks: Networks, directory: Path) -> None:
    """Greedily, every sampler of the peer gives our tokens, which they could not with other weights."""
    prompts = random_prompts(networks, 1, 5)
    save_policy(directory, networks.trained.policy, networks.decoder)
    config = RolloutConfig(group_size=1, max_new_tokens=12, draft_length=0, law=SamplingLaw(temperature=0.0))
    expected = np.asarray(Generation(networks, prompts, config, forced=False).generate().tokens)
    assert len(set(expected[0])) > 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samplers = peer.load(Checkpoint(networks.decoder, directory))
        assert len(samplers) == len(peer.NAMES)
        for sampler in samplers:
            np.testing.assert_array_equal(sampler.generate(np.asarray(prompts.tokens), 12, True), expected)
            sampled = sampler.generate(np.asarray(prompts.tokens), 12, False)
            assert sampled.shape == expected.shape and (sampled != expected).any()


def test_hugging_face_runs_our_weights(networks: Networks, tmp_path: Path):
    pytest.importorskip("torch")
    from launch.bench.peers import huggingface

    check_same_tokens(huggingface, networks, tmp_path / "policy")


def test_tunix_runs_our_weights(networks: Networks, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix")
    from launch.bench.peers import tunix

    # It counts on promotions that our tests refuse.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check_same_tokens(tunix, networks, tmp_path / "policy")
    other = replace(networks.decoder, rope_theta=1e4)
    with pytest.raises(Unsupported, match="only Qwen3 with rope_theta 1e\\+06"):
        tunix.load(Checkpoint(other, tmp_path / "policy"))
