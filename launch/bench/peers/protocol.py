"""What a peer is: another sampler that loads the same weights from the same directory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from models.config import DecoderConfig


class Checkpoint(NamedTuple):
    """The policy in Hugging Face layout, written by `models.hf_export`."""

    decoder: DecoderConfig
    directory: Path


@dataclass(frozen=True)
class Sampler:
    """(prompts int32 [B, P], tokens to generate, greedy) -> int32 [B, tokens]; at temperature 1 unless greedy, and
    with nothing that ends a completion early. `most_rows` is the largest B that it takes.
    """

    generate: Callable[[np.ndarray, int, bool], np.ndarray]
    most_rows: int = 2**30


class Peer(Protocol):
    """A module beside this one.

    NAMES: of its samplers, as they stand in the table.
    load:  the samplers in that order. Raises ImportError where the package is missing, Unsupported where it cannot
           run this policy.
    """

    NAMES: tuple[str, ...]

    def load(self, checkpoint: Checkpoint) -> tuple[Sampler, ...]: ...


class Unsupported(ValueError):
    """Why a peer cannot run this policy, in a few words."""
