"""Estimate of a step before it is compiled: bytes that follow from shapes, and seconds by the hardware sheet."""

import math
from dataclasses import dataclass, replace
from typing import get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.plan.memory import Components, known_components
from launch.plan.programs import ProgramName
from launch.plan.rounds import rollout_deployment, round_times
from launch.setup.experiment import Experiment
from launch.setup.policy import longest_sequence
from launch.setup.state import abstract_state
from models.sheets import decoder_sheet
from specjax.cost import Hardware
from specjax.cost.sheets import Efficiency, forward
from specjax.parallel.mesh import batch_shards


@dataclass(frozen=True)
class MeshEstimate:
    """Estimate of a step on one mesh.

    Attributes:
        config:   The run with that mesh, and with microbatches that divide its rows.
        memory:   Bytes per device that each program needs at least: its temporaries are not counted.
        rollout:  Seconds of the rollout if no row ends early and no draft is accepted.
        update:   Seconds of the policy's update if nothing overlaps.
    """

    config: RunConfig
    memory: dict[ProgramName, int]
    rollout: float
    update: float

    @property
    def largest(self) -> int:
        return max(self.memory.values())

    @property
    def seconds(self) -> float:
        return self.rollout + self.update


def estimate(experiment: Experiment, hardware: Hardware) -> MeshEstimate:
    """Return the estimate of a step. Compiles nothing."""
    state = abstract_state(experiment)
    known = {name: known_components(name, experiment, state) for name in get_args(ProgramName)}
    return MeshEstimate(
        experiment.config,
        {name: sum(parts.values()) for name, parts in known.items()},
        _rollout_seconds(experiment, hardware, known["generate"]),
        _update_seconds(experiment, hardware, known["update"]),
    )


def _rollout_seconds(experiment: Experiment, hardware: Hardware, known: Components) -> float:
    """Return the seconds to gather the weights and to decode all rows, one token per round."""
    config, mesh = experiment.config, experiment.mesh
    first = round_times(experiment, hardware)[0]
    waves = math.ceil(experiment.sequences // batch_shards(mesh) / first.slots)
    gathered = known["copy for the rollout"] * _others(mesh, "fsdp") / _bandwidth(mesh, "fsdp", hardware)
    return gathered + waves * config.rollout.max_new_tokens * first.seconds[0]


def _update_seconds(experiment: Experiment, hardware: Hardware, known: Components) -> float:
    """Return the seconds of all microbatches: products, sums over the model axes, and collectives of the weights."""
    config, networks, mesh = experiment.config, experiment.networks, experiment.mesh
    assert networks.decoder is not None
    item, width, updates = networks.policy.dtype.itemsize, longest_sequence(config), config.updates
    microbatches = updates.minibatches * config.microbatches
    groups = config.selection.groups or config.data.prompts
    rows = groups * config.rollout.group_size / (batch_shards(mesh) * microbatches)
    deployment = replace(rollout_deployment(experiment), weight_bytes=item)
    policy = forward(decoder_sheet(networks.decoder), hardware, deployment, Efficiency(), layer=0.0)
    # Training samples nothing. A causal row attends to half of its positions on average.
    parts = replace(policy, sample=0.0).parts(rows, rows * width / 2, queries=width)
    # A backward pass takes two forwards, and exchanges as much as one. Full rematerialization adds a forward.
    passes = 4 if config.model.remat == "full" else 3
    products = passes * float(sum(parts.values())) - float(parts["exchange"])
    fsdp = mesh.shape["fsdp"]
    weights = known["policy"] * fsdp * item / jnp.dtype(config.model.param_dtype).itemsize
    # Each forward gathers the weights, and so does the backward pass. Gradients are scattered, then summed over `data`.
    moved = passes * weights * _others(mesh, "fsdp") / _bandwidth(mesh, "fsdp", hardware)
    moved += 2 * weights / fsdp * _others(mesh, "data") / _bandwidth(mesh, "data", hardware)
    return updates.epochs * microbatches * (products + moved)


def _others(mesh: Mesh, axis: str) -> float:
    """Return the fraction of an array, split over this axis, that the other devices hold."""
    return 1 - 1 / mesh.shape[axis]


def _bandwidth(mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return bytes per second between the devices of an axis: of links if they join a whole group, or the network."""
    axes = mesh.axis_names[mesh.axis_names.index(axis) :]
    span = math.prod(mesh.shape[each] for each in axes)
    return hardware.link if span <= hardware.domain else hardware.network
