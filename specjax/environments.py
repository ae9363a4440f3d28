"""Environments that answer between the turns of a sequence: functions in JAX, or episodes on the host."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.types import Ending, Prompts, PyTree

T = TypeVar("T")


class Observation(NamedTuple):
    """Answers to the turns of all rows.

    Attributes:
        tokens:  int32 [B, O], of which the first `lengths` are appended to the sequence.
        lengths: int32 [B], 0 .. O.
        done:    bool [B], the sequence ends with its turn. Nothing is appended.
        reward:  float32 [B], of the turn.
        ending:  int8 [B], the `Ending` of sequences that are done; None: STOP.
    """

    tokens: Int[Array, "B O"]
    lengths: Int[Array, "B"]
    done: Bool[Array, "B"]
    reward: Float[Array, "B"]
    ending: Int[Array, "B"] | None = None


@runtime_checkable
class Environment(Protocol):
    """An environment in JAX: functions over its own state, whose arrays have the row first.

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


class Answer(NamedTuple):
    """Answer to a turn of one sequence.

    Attributes:
        tokens: appended to the sequence, at most `HostEnvironment.width`. Nothing is appended if the sequence ends.
        reward: of the turn.
        ending: why the sequence ends with its turn: STOP, FAILED or TIMED_OUT. GOING: it does not.
    """

    tokens: Sequence[int] = ()
    reward: float = 0.0
    ending: Ending = Ending.GOING


@runtime_checkable
class Episode(Protocol):
    """Conversation of one sequence with its environment. Methods return at once."""

    def step(self, turn: Sequence[int]) -> Future[Answer]:
        """Begin to answer a turn, given its tokens with what ended them. The future holds no exception."""
        ...

    def end(self) -> Future[float]:
        """Begin to end the episode. Return its last reward; NaN: the sequence has none. Called once, in any case."""
        ...


@runtime_checkable
class HostEnvironment(Protocol):
    """An environment on the host. The rollout's program stops for its answers and goes on with its caches kept.

    Answers may come at any time and in any order. What a sequence gets must depend on its own problem, seed and turns
    only, or a run cannot be repeated. An environment for which that is not so has an attribute `deterministic = False`.
    """

    @property
    def width(self) -> int:
        """Return O, the most tokens of an observation."""
        ...

    def begin(self, problem: int, seed: int) -> Episode:
        """Begin an episode. problem: `Prompts.id`. seed: 64 bits, of the sequence."""
        ...


def at_once(value: T) -> Future[T]:
    """Return a future that holds the value, for an episode that answers without waiting."""
    future = Future[T]()
    future.set_result(value)
    return future
