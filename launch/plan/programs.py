"""The programs of a training step, compiled from shapes."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, get_args

import jax
import numpy as np

from configs.schema import RunConfig
from launch.errors import RunStopped, as_config_error, first_line
from launch.plan.devices import OPTION_SETS, planned
from launch.plan.flops import Flops, flops
from launch.plan.memory import components
from launch.plan.options import PlanConfig
from launch.plan.traffic import Collectives, collectives_of
from launch.predict.memory import PROGRAMS, Parts, ProgramName, program_mesh
from launch.setup.experiment import Experiment, abstract_experiment
from launch.setup.policy import longest_sequence
from launch.setup.state import abstract_state
from specjax.asynchronous.step import AsynchronousStep
from specjax.rewards import HostReward
from specjax.rollout.host_turns import TurnsProgram
from specjax.testing.hlo import Program
from specjax.train.train_step import TrainStep

CompilerOptions = Mapping[str, Any]
PlannedName = ProgramName | TurnsProgram
TURNS: tuple[TurnsProgram, ...] = get_args(TurnsProgram)


@dataclass(frozen=True)
class Planned:
    """A compiled program of the step.

    Attributes:
        memory:      Bytes per device by component, while it runs.
        collectives: Bytes that devices exchange.
        flops:       Operations of matrix products, over all devices.
        seconds:     Time to trace and compile it.
        options:     Options of XLA that it was compiled with.
    """

    memory: Parts
    collectives: Collectives
    flops: Flops
    seconds: float
    options: CompilerOptions

    @property
    def total(self) -> int:
        return sum(self.memory.values())


class Plan:
    """Programs `generate` and `update` of an experiment whose networks are shapes.

    A step with a traced reward fuses both into one program, which needs about the memory of the larger. In an
    asynchronous run each has a mesh of its own. With an environment on the host, `generate` is the programs of
    `HostTurns`.

    Of the ladder's windows, only the longest is compiled. The others are the same program for shorter rows.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        config = experiment.step_config
        if config.ladder:
            config = replace(config, ladder=(longest_sequence(config),))
        # `update` takes the scores as an argument, so any reward function serves.
        reward = HostReward(_no_scores, config.reward.parts)
        stages, rollout_mesh = experiment.stages(reward, config), experiment.rollout_mesh
        self._step = TrainStep(stages) if rollout_mesh is experiment.mesh else AsynchronousStep(stages, rollout_mesh)
        self._state = abstract_state(experiment)

    def program(self, name: PlannedName) -> Planned:
        """Trace and compile a program. Raises ConfigError if options contradict each other."""
        experiment, start = self.experiment, time.perf_counter()
        with as_config_error():
            traced = self.trace(name)
        compiled, options = self.compile(name, traced)
        seconds, text = time.perf_counter() - start, compiled.as_text()
        assert text is not None
        (_, *batches), _ = traced.args_info
        half = half_of(name)
        return Planned(
            components(half, experiment, self._state, batches, compiled, prepared=name in TURNS),
            collectives_of(Program(text), program_mesh(half, experiment)),
            flops(traced.jaxpr.jaxpr),
            seconds,
            options,
        )

    def trace(self, name: PlannedName) -> jax.stages.Traced:
        prompts = self.experiment.abstract_prompts(self.experiment.config.data.prompts)
        if name == "generate" or name == "update":
            return self._step.trace_half(name, self._state, prompts)
        assert isinstance(self._step, TrainStep)
        return self._step.trace_turns(name, self._state, prompts)

    def compile(self, name: PlannedName, traced: jax.stages.Traced) -> tuple[jax.stages.Compiled, CompilerOptions]:
        """Compile a program. Return it with the options that XLA accepted."""
        mesh = program_mesh(half_of(name), self.experiment)
        on_gpu = mesh.devices.flat[0].platform != "cpu"
        with jax.set_mesh(mesh):
            return compile_by_any(name, traced.lower(), OPTION_SETS if on_gpu else ({},))


def program_names(experiment: Experiment) -> tuple[PlannedName, ...]:
    """Return the names of the programs of a step, in order."""
    return (*TURNS, "update") if experiment.step_config.rollout.answers_on_host else PROGRAMS


def half_of(name: PlannedName) -> ProgramName:
    """Return the half of the step that a program is part of."""
    return "update" if name == "update" else "generate"


def compile_by_any(
    name: PlannedName, lowered: jax.stages.Lowered, option_sets: Sequence[CompilerOptions]
) -> tuple[jax.stages.Compiled, CompilerOptions]:
    """Compile with the first of these option sets that XLA accepts, and return that set too.

    Raises RunStopped if XLA refuses all of them.
    """
    refusals = []
    for options in option_sets:
        try:
            return lowered.compile(dict(options)), options
        except jax.errors.JaxRuntimeError as error:
            refusals.append(error)
    reasons = " / ".join(dict.fromkeys(map(first_line, refusals)))
    raise RunStopped(
        f"{name}: XLA cannot compile it for this kind of device: {reasons}; try another plan.gpu, mesh, model.dtype or "
        "rollout_dtype"
    ) from refusals[0]


def plan_program(config: RunConfig, plan: PlanConfig, name: PlannedName) -> Planned:
    """Compile a program of the step. Raises ConfigError if the run cannot be planned.

    In a process of its own, because XLA keeps gigabytes of each program that it has compiled. Raises RunStopped if XLA
    refuses the program, or if that process dies.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_plan_program, config, plan, name).result()
        except BrokenProcessPool as error:
            raise RunStopped(
                f"the process that compiled {name} died: it may need more memory than this machine has, or XLA ended "
                "it and says why above"
            ) from error


def _plan_program(config: RunConfig, plan: PlanConfig, name: PlannedName) -> Planned:
    return Plan(abstract_experiment(*planned(config, plan))).program(name)


def _no_scores(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    raise AssertionError("a plan does not run programs")
