"""Seconds of a training step from the seconds of its stages, synchronous or with lag."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the stages of a step beside generation.

    Attributes:
        other:          Data, preparation and reward.
        logprob:        Forward of the policy to get log-probs; 0 where the verification gives them.
        train:          Forward, backward and update of the policy.
        draft_training: The same for the draft.
        movement:       Weights moved from the trainer to the generator; 0 within one program.
    """

    other: float = 0.0
    logprob: float = 0.0
    train: float = 0.0
    draft_training: float = 0.0
    movement: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self.other + self.logprob + self.train + self.draft_training + self.movement


class SimulatedStep(NamedTuple):
    """Seconds of a step, and the seconds of its generation that nothing hides."""

    seconds: float
    exposed: float


def step_seconds(generation: Sequence[float], other_stages: float, lag: int) -> SimulatedStep:
    """Return the mean seconds of a step in the steady state.

    generation: seconds of successive rollouts, which repeat. other_stages: seconds of all other stages.
    lag:        steps by which the generator's weights may be older. At 0 it waits for the update of the step before;
                otherwise it generates ahead, on GPUs of its own.
    """
    generated, trained, ends = 0.0, 0.0, []
    count = len(generation)
    steps = 4 * max(count, lag + 1)
    waited = 0.0
    for step in range(steps):
        weights = ends[step - 1 - lag] if step > lag else 0.0
        generated = max(generated, weights) + generation[step % count]
        waited += max(generated - trained, 0.0) if step >= steps // 2 else 0.0
        trained = max(trained, generated) + other_stages
        ends.append(trained)
    half = steps - steps // 2
    return SimulatedStep((ends[-1] - ends[steps // 2 - 1]) / half, waited / half)
