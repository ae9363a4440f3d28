"""Refusal of a step whose arrays do not fit a device, before anything is compiled."""

from dataclasses import replace
from functools import partial

from launch.errors import ConfigError
from launch.plan.alternatives import smaller_rollouts
from launch.plan.memory import known_components
from launch.predict.memory import PROGRAMS, of_step_rollout
from launch.setup.experiment import Experiment
from launch.setup.state import abstract_state
from specjax.parallel.memory import gib
from specjax.parallel.mesh import describe_mesh

# How often an option is halved in search of one that fits.
HALVINGS = 6


def check_bound(experiment: Experiment, usable: float) -> None:
    """Raise ConfigError if a program needs more than `usable` bytes of a device without its temporaries.

    The message names what makes a rollout fit, the smallest change first.
    """
    state, config = abstract_state(experiment), experiment.config
    for name in PROGRAMS:
        if (needed := sum(known_components(name, experiment, state).values())) > usable:
            section, mesh, remedies = "mesh", config.mesh, list[str]()
            if name == "generate":
                remedies = smaller_options(experiment, usable)
                if config.asynchronous.lag is not None:
                    section, mesh = "asynchronous.rollout_mesh", config.asynchronous.rollout_mesh
            raise ConfigError(
                f"{section} = {describe_mesh(mesh)}: {name} needs at least {gib(needed)} GiB per device without "
                f"temporaries, of {gib(usable)} that are usable; it may fit with "
                + ", or ".join([*remedies, "more GPUs (--plan.gpus)"])
            )


def smaller_options(experiment: Experiment, usable: float) -> list[str]:
    """Return options by which a rollout may fit, each with about its least memory, the smallest change first."""
    known = known_components("generate", experiment, abstract_state(experiment))
    others, found = sum(known.values()) - known["caches"], list[str]()
    smaller_than = partial(smaller_rollouts, phases=not experiment.step_config.rollout.answers_on_host)
    for option in (words.split()[0] for words, _ in smaller_than(experiment.config)):
        config = experiment.config
        for _ in range(HALVINGS):
            changes = {words.split()[0]: (words, smaller) for words, smaller in smaller_than(config)}
            if option not in changes:
                break
            words, config = changes[option]
            size = others + of_step_rollout(replace(experiment, config=config))["caches"]
            if size <= usable:
                found.append(f"{words} ({gib(size)} GiB)")
                break
    return found
