"""The interface of a peer: another sampler that loads the same weights from the same directory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from models.config import DecoderConfig


class PeerCheckpoint(NamedTuple):
    """The policy in Hugging Face layout, written by `models.hf.save`."""

    decoder: DecoderConfig
    directory: Path


@dataclass(frozen=True)
class PeerSampler:
    """Sampler of a peer, which generates completions of given lengths.

    No token ends a completion. Tokens beyond a row's length do not count; most samplers run every row to the longest.

    generate:  (prompts int32 [B, P], lengths int32 [B], greedy) -> int32 [B, longest]; temperature 1 unless greedy.
    most_rows: largest B that the sampler supports.
    """

    generate: Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
    most_rows: int = 2**30


class Peer(Protocol):
    """Interface of a module in benchmarks.bench.peers.

    NAMES: names of its samplers for the table.
    load:  returns the samplers in that order. Raises ImportError if the package is missing, Unsupported if it cannot
           run this policy.
    """

    NAMES: tuple[str, ...]

    def load(self, checkpoint: PeerCheckpoint) -> tuple[PeerSampler, ...]: ...


class Unsupported(ValueError):
    """Raised if a peer cannot run this policy. The message is a short reason for the table."""


def failure(error: Exception) -> str:
    """Return one line about a peer's error for the table, so that the error does not end the bench."""
    if isinstance(error, ImportError):
        return f"not installed ({error.name or error})"
    if isinstance(error, Unsupported):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
