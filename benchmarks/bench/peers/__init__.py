"""Peers: other samplers that run the same weights, if they are installed."""

import importlib
from pathlib import Path
from typing import cast

from benchmarks.bench.models import BenchNetworks
from benchmarks.bench.peers.protocol import Peer, PeerCheckpoint, PeerSampler, failure
from models.hf.save import save_policy

PEERS = ("tunix", "huggingface", "vllm")


def load_peers(networks: BenchNetworks, directory: Path) -> dict[str, PeerSampler | str]:
    """Return every peer's samplers by name, or the reason for the table why one cannot be measured.

    They load the policy from `directory`, to which it is written in Hugging Face layout.
    """
    samplers: dict[str, PeerSampler | str] = {}
    try:
        save_policy(directory, networks.trained.policy, networks.decoder)
    except ImportError as error:
        return {name: str(error) for peer in PEERS for name in _peer(peer).NAMES}
    for peer in map(_peer, PEERS):
        try:
            samplers |= zip(peer.NAMES, peer.load(PeerCheckpoint(networks.decoder, directory)), strict=True)
        except Exception as error:
            samplers |= dict.fromkeys(peer.NAMES, failure(error))
    return samplers


def _peer(name: str) -> Peer:
    return cast(Peer, importlib.import_module(f"benchmarks.bench.peers.{name}"))
