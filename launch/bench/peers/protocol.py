"""The interface of a peer: another sampler that loads the same weights from the same directory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from models.config import DecoderConfig


class Checkpoint(NamedTuple):
    """The policy in Hugging Face layout, written by `models.hf.save`."""

    decoder: DecoderConfig
    directory: Path


@dataclass(frozen=True)
class Sampler:
    """(prompts int32 [B, P], lengths int32 [B], greedy) -> int32 [B, longest]; at temperature 1 unless greedy.

    No token ends a completion: each has its length, and what lies beyond it does not count. Most samplers go on with
    all rows until the longest is done, as they would with rows that have ended. `most_rows` is the largest B.
    """

    generate: Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
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


def failure(error: Exception) -> str:
    """Return a peer's failure in a few words for the table: it must not end the bench."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
