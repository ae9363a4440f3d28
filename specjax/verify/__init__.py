"""Verification: decide how many drafted tokens are accepted, and draw the token after them.

Verifiers are pure functions of static shapes; draft lengths may differ by row, and noise is passed in as arrays. Three
verifiers share one interface:

- `rejection`, token-level speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
  arXiv 2302.01318): the emitted tokens follow the policy's law exactly.
- `block`, block verification (Sun et al. 2024, arXiv 2403.10444): the same law, and at least as many accepted tokens in
  expectation; the same number if the draft is deterministic.
- `coupled`, Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978): draft and policy share the noise of each position,
  so that the emitted tokens are those of plain sampling with that noise, whatever was drafted.

The first two consist of an accept law (`accept_law`, `block_law`), which a test can enumerate, and `draw`.
"""

from typing import Literal

from specjax.verify.base import Noise, Verdict, Verifier
from specjax.verify.block import block_law
from specjax.verify.coupled import coupled_noise, verify_coupled
from specjax.verify.law import AcceptLaw, LawOf, accept_law, draw, verifier_of

VerifierName = Literal["rejection", "block", "coupled"]

VERIFIERS: dict[VerifierName, Verifier] = {
    "rejection": verifier_of(accept_law),
    "block": verifier_of(block_law),
    # The bound (1 - tv) / (1 + tv) of arXiv 2408.07978, with the total variation tv = 1 - overlap.
    "coupled": Verifier(coupled_noise, verify_coupled, promises=lambda overlap: overlap / (2 - overlap)),
}


def find_verifier(chosen: VerifierName | Verifier) -> Verifier:
    """Return the verifier of that name, or `chosen` itself if it is a `Verifier`."""
    return VERIFIERS[chosen] if isinstance(chosen, str) else chosen


__all__ = [
    "VERIFIERS",
    "AcceptLaw",
    "LawOf",
    "Noise",
    "Verdict",
    "Verifier",
    "VerifierName",
    "accept_law",
    "block_law",
    "draw",
    "find_verifier",
    "verifier_of",
]
