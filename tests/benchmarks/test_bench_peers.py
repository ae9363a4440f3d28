"""benchmarks.bench's peers: a missing peer gets a row that says so, an installed one runs our own weights."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from benchmarks.bench.models import BenchNetworks, random_networks, random_prompts
from benchmarks.bench.peers import load_peers, vllm
from benchmarks.bench.peers.protocol import Peer, PeerCheckpoint, PeerSampler, Unsupported
from benchmarks.bench.presets import LongTail
from benchmarks.bench.sections.peers import PLAIN, _loaded_peers, peers, rollouts
from benchmarks.bench.timers import rollout_timer
from models.hf.save import save_policy
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from tests.benchmarks.presets import SMALL
from tests.refusals import refuses

PACKAGES = {"tunix": "tunix", "huggingface": "torch", "vllm": "vllm"}


@pytest.fixture(scope="module")
def networks() -> BenchNetworks:
    """Return networks, untied and with large weights, so that greedy text does not repeat itself."""
    own = random_networks(replace(SMALL, decoder=replace(SMALL.decoder, tie_embeddings=False)))
    return replace(own, trained=replace(own.trained, policy=jax.tree.map(lambda x: 2 * x, own.trained.policy)))


@pytest.fixture(autouse=True)
def nothing_loaded():
    _loaded_peers.cache_clear()


@pytest.mark.slow
def test_absent_peers_have_rows_that_say_so(networks: BenchNetworks, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("safetensors")
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    rows = {row["sampler"]: row for row in [*peers(networks, SMALL)][-1].rows}
    ours, theirs = [name for name in rows if "specjax" in str(name)], [n for n in rows if "specjax" not in str(n)]
    assert ours == [PLAIN, "specjax, k = 2, forced"] and {"Tunix", "Hugging Face", "vLLM"} <= set(theirs)
    assert all("not installed" in str(rows[name]["note"]) and rows[name]["tokens/s"] is None for name in theirs)
    assert all(isinstance(rows[name]["tokens/s"], float) and not rows[name]["note"] for name in ours)


def test_without_safetensors_all_are_absent(networks: BenchNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    found = load_peers(networks, tmp_path / "policy")
    assert len(found) == 6 and all(isinstance(peer, str) and "not installed" in peer for peer in found.values())


@pytest.mark.slow
def test_peers_generate_whole_rollouts_and_quarters(networks: BenchNetworks, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, list[int]]] = []

    def generate(prompts: np.ndarray, lengths: np.ndarray, greedy: bool) -> np.ndarray:
        assert not greedy and len(prompts) == len(lengths)
        asked.append((len(prompts), lengths.tolist()))
        return np.zeros((len(prompts), lengths.max()), np.int32)

    found = {"patient": PeerSampler(generate), "lonely": PeerSampler(generate, 1), "gone": "gone"}
    monkeypatch.setattr("benchmarks.bench.sections.peers.load_peers", lambda *_: found)
    preset = replace(SMALL, tail=LongTail(median=4, factor=4, every=4), repeats=1)
    *_, section = rollouts(networks, preset)
    rows = {str(row["sampler"]): row for row in section.rows}
    assert list(rows)[2:] == ["patient, 16 at a time", "patient, 4 at a time", "lonely", "gone"]
    (size, lengths), quarters = asked[0], asked[1:5]
    assert size == 16 and max(lengths) == 16 and min(lengths) < 6 and [n for n, _ in quarters] == [4] * 4
    assert [length for _, part in quarters for length in part] == lengths
    assert rows["lonely"]["note"] == "takes 1 row" and rows["gone"]["note"] == "gone"
    for name in (PLAIN, "specjax, k = 2, forced", "patient, 4 at a time"):
        assert isinstance(rows[name]["tokens/s"], float) and not rows[name]["note"]
    assert section.notes[0].startswith("16 completions, one in 4 of 16 tokens, the others around 4; prompts of ")


def test_a_peer_that_fails_ends_no_benchmark(networks: BenchNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """This holds if it breaks while it is loaded or while it runs."""
    pytest.importorskip("safetensors")

    def load(checkpoint: PeerCheckpoint) -> tuple[PeerSampler, ...]:
        raise AttributeError("module has no attribute 'x'\nin another release")

    monkeypatch.setattr("benchmarks.bench.peers._peer", lambda name: SimpleNamespace(NAMES=(name,), load=load))
    found = load_peers(networks, tmp_path / "policy")
    assert found["tunix"] == "AttributeError: module has no attribute 'x'"

    def generate(prompts: np.ndarray, lengths: np.ndarray, greedy: bool) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr("benchmarks.bench.sections.peers.load_peers", lambda *_: {"large": PeerSampler(generate)})
    rows = {row["sampler"]: row for row in [*peers(networks, replace(SMALL, repeats=1))][-1].rows}
    assert rows["large"]["note"] == "MemoryError: no reason given" and rows["large"]["tokens/s"] is None
    assert isinstance(rows[PLAIN]["tokens/s"], float)


def test_vllm_gets_the_length_of_each_row():
    class Law(NamedTuple):
        temperature: float
        max_tokens: int
        ignore_eos: bool
        detokenize: bool

    def generate(inputs: list[dict[str, list[int]]], laws: list[Law], use_tqdm: bool) -> list[SimpleNamespace]:
        assert [row["prompt_token_ids"] for row in inputs] == [[7, 8], [9, 9]] and not use_tqdm
        assert all(law.ignore_eos and law.temperature == 1.0 for law in laws)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5] * law.max_tokens)]) for law in laws]

    package, engine = SimpleNamespace(SamplingParams=Law), SimpleNamespace(generate=generate)
    tokens = vllm._generate(package, engine, np.array([[7, 8], [9, 9]]), np.array([3, 1]), False)
    assert tokens.tolist() == [[5, 5, 5], [5, 0, 0]]


def check_same_tokens(peer: Peer, networks: BenchNetworks, directory: Path) -> None:
    """Verify that all samplers of the peer give our greedy tokens, which would differ with other weights."""
    prompts = random_prompts(networks, 1, 5)
    save_policy(directory, networks.trained.policy, networks.decoder)
    config = RolloutConfig(group_size=1, max_new_tokens=12, draft_length=0, law=SamplingLaw(temperature=0.0))
    expected = np.asarray(rollout_timer(networks, prompts, config, forced=False).generate(0, np.float32(0)).tokens)
    assert len(set(expected[0])) > 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samplers = peer.load(PeerCheckpoint(networks.decoder, directory))
        assert len(samplers) == len(peer.NAMES)
        for sampler in samplers:
            given = np.asarray(prompts.tokens), np.array([12])
            np.testing.assert_array_equal(sampler.generate(*given, True), expected)
            sampled = sampler.generate(*given, False)
            assert sampled.shape == expected.shape and (sampled != expected).any()


def test_hugging_face_runs_our_weights(networks: BenchNetworks, tmp_path: Path):
    pytest.importorskip("torch")
    from benchmarks.bench.peers import huggingface

    check_same_tokens(huggingface, networks, tmp_path / "policy")


def test_tunix_runs_our_weights(networks: BenchNetworks, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tunix")
    from benchmarks.bench.peers import tunix

    # It relies on type promotions that our tests forbid.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check_same_tokens(tunix, networks, tmp_path / "policy")
    other = replace(networks.decoder, rope_theta=1e4)
    with refuses("only Qwen3 with rope_theta 1e+06", Unsupported):
        tunix.load(PeerCheckpoint(other, tmp_path / "policy"))
