"""The programs of a training step, compiled from shapes."""

import time
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from launch.build.experiment import Experiment
from launch.build.state import abstract_state
from launch.plan.devices import PLAN_OPTIONS
from launch.plan.flops import Flops, flops
from launch.plan.memory import Components, components
from launch.plan.traffic import Collectives, collectives_of
from specjax.rewards import HostReward
from specjax.testing.hlo import Program
from specjax.train.stages import Stages
from specjax.train.train_step import TrainStep

ProgramName = Literal["generate", "update"]


@dataclass(frozen=True)
class Planned:
    """A compiled program of the step.

    Attributes:
        memory:      Bytes per device by component, while it runs.
        collectives: Bytes that devices exchange.
        flops:       Operations of matrix products, over all devices.
        seconds:     Time to trace and compile it.
        text:        The compiled program.
    """

    memory: Components
    collectives: Collectives
    flops: Flops
    seconds: float
    text: str

    @property
    def total(self) -> int:
        return sum(self.memory.values())


class Plan:
    """Programs `generate` and `update` of an experiment whose networks are shapes. `programs` compiles them.

    A step with a traced reward fuses both into one program, which needs about the memory of the larger.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        config, networks = experiment.config, experiment.networks
        # `update` takes the scores as an argument, so any reward function serves.
        reward = HostReward(_no_scores, config.reward.parts)
        functions = experiment.rollout_fn, experiment.loss_fn
        self._step = TrainStep(Stages(networks.policy, networks.drafter, reward, config, experiment.mesh, *functions))
        self._state = abstract_state(experiment)

    def programs(self, names: tuple[ProgramName, ...] = ("generate", "update")) -> dict[ProgramName, Planned]:
        """Trace and compile the named programs. Raises ValueError if options contradict each other."""
        experiment, planned = self.experiment, dict[ProgramName, Planned]()
        prompts = experiment.abstract_prompts(experiment.config.data.prompts)
        on_gpu = experiment.mesh.devices.flat[0].platform != "cpu"
        for name in names:
            start = time.perf_counter()
            traced = self._step.trace_half(name, self._state, prompts)
            with jax.set_mesh(experiment.mesh):
                compiled = traced.lower().compile(PLAN_OPTIONS if on_gpu else None)
            seconds, text = time.perf_counter() - start, compiled.as_text()
            assert text is not None
            (_, *batches), _ = traced.args_info
            planned[name] = Planned(
                components(name, experiment, self._state, batches, compiled),
                collectives_of(Program(text), experiment.mesh),
                flops(traced.jaxpr.jaxpr),
                seconds,
                text,
            )
        return planned


def _no_scores(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    raise AssertionError("a plan does not run programs")
