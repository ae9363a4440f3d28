"""The interface of a verifier: the noise it wants for a round, and its verdict on a proposal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt32


class Noise(NamedTuple):
    """All the randomness of a round.

    draft:   [B, K, V] Gumbels with which the drafter samples its proposal.
    uniform: [B] in [0, 1), decides how many drafts an accept law keeps.
    emit:    Gumbels with which the token after them is drawn: [B, 1, V], or [B, K+1, V] for `coupled`.
    """

    draft: Float[Array, "B K V"]
    uniform: Float[Array, "B"]
    emit: Float[Array, "B rows V"]


class Verdict(NamedTuple):
    """accepted: int32 [B], 0 .. K, the drafts kept. token: int32 [B], the one emitted after them."""

    accepted: Int[Array, "B"]
    token: Int[Array, "B"]


@dataclass(frozen=True)
class Verifier:
    """A way to verify, which `RolloutConfig.verifier` takes by name or as it is.

    noise:    (sequence keys [B], position of the first token the round emits [B], K, V) -> Noise
    verify:   (log_p, log_q, draft, length, noise) -> Verdict, arguments as for `specjax.verify.accept_law`.
    promises: the least probability that a draft's first token is accepted where sum_v min(p, q) is the argument.
    """

    noise: Callable[[UInt32[Array, "B 2"], Int[Array, "B"], int, int], Noise]
    verify: Callable[[Array, Array, Array, Array, Noise], Verdict]
    promises: Callable[[Array], Array] = lambda overlap: overlap
