"""Estimate of a step before it is compiled: bytes that follow from shapes, and seconds by the hardware sheet."""

import math
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig
from launch.plan.memory import known_components
from launch.predict.clock import decoding_seconds, update_seconds, weights_seconds
from launch.predict.memory import PROGRAMS, ProgramName
from launch.setup.experiment import Experiment
from launch.setup.state import abstract_state
from specjax.cost import Hardware


@dataclass(frozen=True)
class MeshEstimate:
    """Estimate of a step on one mesh, or on the two of an asynchronous run.

    Attributes:
        config:  The run with that mesh, and with microbatches that divide its rows.
        memory:  Bytes per device that each program needs at least: its temporaries are not counted.
        weights: Seconds until the rollout has its weights: gathered, or sent to their own mesh.
        plain:   Seconds of the rollout's rounds at draft length 0 if no row ends early.
        drafted: The same at the fastest of the run's draft lengths if ACCEPTANCE holds.
        update:  Seconds of the policy's update if nothing overlaps.
    """

    config: RunConfig
    memory: dict[ProgramName, int]
    weights: float
    plain: float
    drafted: float
    update: float

    @property
    def gpus(self) -> int:
        """Devices of the step."""
        ahead = self.config.asynchronous
        return math.prod(self.config.mesh.shape) + (0 if ahead.lag is None else math.prod(ahead.rollout_mesh.shape))

    @property
    def largest(self) -> int:
        return max(self.memory.values())

    @property
    def seconds(self) -> float:
        """Seconds of a step with drafts."""
        return self._step(self.drafted)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step at draft length 0."""
        return self._step(self.plain)

    @property
    def figures(self) -> dict[str, Any]:
        """Bytes and seconds, for JSON."""
        return {
            "memory_at_least": self.memory,
            "weights_s": self.weights,
            "plain_rounds_s": self.plain,
            "drafted_rounds_s": self.drafted,
            "update_s": self.update,
            "step_s": self.seconds,
        }

    def _step(self, decoding: float) -> float:
        """With a lag, rounds and update overlap, but neither overlaps the sending of weights."""
        phases = decoding, self.update
        return self.weights + (max(phases) if self.config.asynchronous.lag else sum(phases))


def estimate(experiment: Experiment, hardware: Hardware) -> MeshEstimate:
    """Return the estimate of a step. Compiles nothing."""
    state = abstract_state(experiment)
    return MeshEstimate(
        experiment.config,
        {name: sum(known_components(name, experiment, state).values()) for name in PROGRAMS},
        weights_seconds(experiment, hardware),
        *decoding_seconds(experiment, hardware),
        update_seconds(experiment, hardware),
    )
