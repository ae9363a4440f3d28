"""Episodes of environments on the host, each limited in time, beside each other."""

from concurrent.futures import Future
from typing import Any, Protocol

from launch.environments.answers import Failure, Step


class Episode(Protocol):
    """One completion's conversation with an environment of its own.

    Its calls run one after the other, in the order in which they are made, beside calls of other episodes. A failure is
    the answer to all later calls. `end` must be called in any case.
    """

    def step(self, turn: str) -> Future[Step | Failure]:
        """Return the answer to a turn. The future never raises."""
        ...

    def end(self) -> Future[float | Failure]:
        """End the episode and return its last reward, 0.0 if it has none. The future never raises."""
        ...


class Episodes(Protocol):
    """Runs episodes of one environment."""

    def begin(self, problem: dict[str, Any], seed: int) -> Episode:
        """Return a new episode at once. A failure of its beginning is the answer to its calls.

        problem: {"prompt", "answer", "columns"}. Raises TypeError if JSON cannot hold it.
        """
        ...

    def close(self) -> None:
        """End all episodes. Calls that wait are answered by a failure."""
        ...
