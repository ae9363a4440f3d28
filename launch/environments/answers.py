"""Answers of an environment on the host, in text. Imports nothing heavy: every episode's process loads it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

# role and content, as chat templates get them.
TextMessage = Mapping[str, Any]


class Step(NamedTuple):
    """Answer to a turn.

    Attributes:
        observation: text, which the model reads as a message of the user; or messages with role and content. Not read
                     if `done`.
        reward:      of the turn. The rewards of an episode are added up.
        done:        whether the episode ends with this turn.
    """

    observation: str | Sequence[TextMessage] = ""
    reward: float = 0.0
    done: bool = False


class Failure(NamedTuple):
    """Why an episode ended without an answer. kind: the environment raised or died, or did not answer in time."""

    kind: Literal["failed", "timed_out"]
    reason: str


class TextEnvironment(Protocol):
    """A user's environment: one object for each episode, which is one completion of one problem.

    It should be a function of (problem, seed, turns), so that an interrupted run can repeat it. `begin` and `end` may
    be missing. An exception ends the episode, which then has no reward. A class attribute `roles` names the roles of
    its messages, if they are others than ("user",). A class attribute `deterministic = False` says that it is no such
    function.
    """

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        """Begin the episode. problem: {"prompt", "answer", "columns"}, as a scorer of one's own gets it."""
        ...

    def step(self, turn: str) -> Step | str | None:
        """Answer the text of a turn. Text: an observation. None: the episode ends."""
        ...

    def end(self) -> float | None:
        """End the episode. Return its last reward, added to those of its steps; None: 0.

        It is called in any case, but for an environment that hangs or dies.
        """
        ...
