"""Interface of a verifier: the noise it needs for a round, and its verdict on a proposal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt32


class Noise(NamedTuple):
    """All random numbers of a round.

    draft:   [B, K, V], Gumbel noise with which the drafter samples its proposal.
    uniform: [B] in [0, 1), from which an accept law decides how many drafted tokens are accepted.
    emit:    [B, 1, V], Gumbel noise with which the token after them is drawn; [B, K+1, V] for `coupled`.
    """

    draft: Float[Array, "B K V"]
    uniform: Float[Array, "B"]
    emit: Float[Array, "B rows V"]


class Verdict(NamedTuple):
    """Result of one verification.

    accepted: int32 [B], 0 .. K, number of drafted tokens accepted. token: int32 [B], the token emitted after them.
    """

    accepted: Int[Array, "B"]
    token: Int[Array, "B"]


@dataclass(frozen=True)
class Verifier:
    """A verification method. `RolloutConfig.verifier` takes one, or the name of one.

    noise:    (sequence keys [B], position of the first token the round emits [B], K, V) -> Noise.
    verify:   (log_p, log_q, draft, length, noise) -> Verdict, arguments as for `specjax.verify.accept_law`.
    promises: overlap sum_v min(p, q) -> lower bound on the probability that a draft's first token is accepted.
    """

    noise: Callable[[UInt32[Array, "B 2"], Int[Array, "B"], int, int], Noise]
    verify: Callable[[Array, Array, Array, Array, Noise], Verdict]
    promises: Callable[[Array], Array] = lambda overlap: overlap
