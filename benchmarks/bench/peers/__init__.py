"""Peers: other samplers that run the same weights, if they are installed."""

import importlib
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks.bench.models import Networks
from benchmarks.bench.peers.protocol import Checkpoint, Peer, Sampler, Unsupported, failure
from models.hf.save import save_policy

PEERS = ("tunix", "huggingface", "vllm")


class Present(NamedTuple):
    """A sampler that can be measured."""

    sampler: Sampler


class Absent(NamedTuple):
    """A sampler that cannot be measured, with the reason for the table."""

    reason: str


def load_peers(networks: Networks, directory: Path) -> dict[str, Present | Absent]:
    """Write the policy to `directory` in Hugging Face layout, load every peer from there and return them by name."""
    found: dict[str, Present | Absent] = {}
    try:
        save_policy(directory, networks.trained.policy, networks.decoder)
    except ImportError as error:
        return {name: Absent(str(error)) for peer in PEERS for name in _peer(peer).NAMES}
    for peer in map(_peer, PEERS):
        try:
            samplers = peer.load(Checkpoint(networks.decoder, directory))
            found |= {name: Present(sampler) for name, sampler in zip(peer.NAMES, samplers, strict=True)}
        except ImportError as error:
            found |= dict.fromkeys(peer.NAMES, Absent(f"not installed ({error.name or error})"))
        except Unsupported as error:
            found |= dict.fromkeys(peer.NAMES, Absent(str(error)))
        except Exception as error:
            found |= dict.fromkeys(peer.NAMES, Absent(failure(error)))
    return found


def _peer(name: str) -> Peer:
    return cast(Peer, importlib.import_module(f"benchmarks.bench.peers.{name}"))
