"""Environments that answer between the turns of a sequence, as functions in JAX."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.types import Prompts, PyTree


class Observation(NamedTuple):
    """Answer to a turn.

    Attributes:
        tokens: int32 [B, O], appended to the sequence: its first `count` tokens.
        count:  int32 [B], 0 .. O.
        done:   bool [B], the sequence ends with its turn. Nothing is appended.
        reward: float32 [B], of the turn.
        failed: bool [B], the sequence ends because the environment failed; None: none did.
    """

    tokens: Int[Array, "B O"]
    count: Int[Array, "B"]
    done: Bool[Array, "B"]
    reward: Float[Array, "B"]
    failed: Bool[Array, "B"] | None = None


@runtime_checkable
class Environment(Protocol):
    """An environment of a rollout's sequences, as functions over its own state, whose arrays have the row first.

    Each row is a sequence of its own: what a row gets must depend on that row's arguments only, or completions depend
    on what they are generated beside.
    """

    @property
    def width(self) -> int:
        """Return O, the most tokens of an observation."""
        ...

    def begin(self, prompts: Prompts, keys: UInt32[Array, "B 2"]) -> PyTree:
        """Return the state of sequences of these prompts, one of each. keys: a PRNG key for each."""
        ...

    def step(
        self, state: PyTree, tokens: Int[Array, "B C"], start: Int[Array, "B"], end: Int[Array, "B"]
    ) -> tuple[PyTree, Observation]:
        """Return the state and the observation after turns: tokens[b, start[b] : end[b]], with what ended them.

        It is called with all rows. Only those whose turn has just ended read the results.
        """
        ...
