"""Estimate of a step before it is compiled: bytes that follow from shapes, and seconds by the hardware sheet."""

import math
from dataclasses import dataclass, replace
from typing import get_args

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.plan.memory import known_components
from launch.plan.options import PlanConfig
from launch.plan.programs import ProgramName
from launch.plan.rounds import deployment_on, round_times
from launch.setup.experiment import Experiment
from launch.setup.memory import abstract_copy
from launch.setup.policy import longest_sequence
from launch.setup.state import abstract_state
from models.sheets import decoder_sheet
from specjax.cost import HARDWARE, Hardware
from specjax.cost.sheets import Efficiency, forward
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import batch_shards

# Chance that a drafted token is accepted where all before it were: 2.77 tokens a round at draft length 3, the lower of
# the paper's two in-domain EAGLE-3 heads (RL-Think of arXiv 2604.26779).
ACCEPTANCE = 0.76


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

    def _step(self, decoding: float) -> float:
        """With a lag, rounds and update overlap, but neither overlaps the sending of weights."""
        phases = decoding, self.update
        return self.weights + (max(phases) if self.config.asynchronous.lag else sum(phases))


def estimate(experiment: Experiment, hardware: Hardware) -> MeshEstimate:
    """Return the estimate of a step. Compiles nothing."""
    state = abstract_state(experiment)
    known = {name: known_components(name, experiment, state) for name in get_args(ProgramName)}
    return MeshEstimate(
        experiment.config,
        {name: sum(parts.values()) for name, parts in known.items()},
        _weights_seconds(experiment, hardware),
        *_decoding_seconds(experiment, hardware),
        _update_seconds(experiment, hardware),
    )


def hardware_of(plan: PlanConfig, count: int) -> Hardware:
    """Return the sheet of the plan's devices, of which `count` are used."""
    hardware = HARDWARE[plan.gpu]
    if plan.gpu == "cpu":  # of one machine
        hardware = replace(hardware, domain=count)
    if plan.per_host is not None:
        hardware = replace(hardware, domain=min(plan.per_host, hardware.domain))
    return hardware


def _weights_seconds(experiment: Experiment, hardware: Hardware) -> float:
    """Return the seconds to gather the rollout's weights over fsdp, or to send them to another mesh and gather them."""
    mesh, rollout_mesh, copy = experiment.mesh, experiment.rollout_mesh, abstract_copy(experiment)
    if rollout_mesh is mesh:
        return bytes_per_device(replace(copy, memory=())) * _others(mesh, "fsdp") / _bandwidth(mesh, "fsdp", hardware)
    # The frozen base of adapters was sent before the first step.
    size = bytes_per_device((copy.policy, copy.draft))
    # Each device gets its own part of the copy. A device of a smaller mesh sends to several.
    shards, receivers = batch_shards(rollout_mesh), max(rollout_mesh.size // mesh.size, 1)
    between = _span_bandwidth(mesh.size + rollout_mesh.size, hardware)
    gathered = size * (1 - 1 / shards) / _bandwidth(rollout_mesh, "data", hardware)
    return receivers * size / shards / between + gathered


def _decoding_seconds(experiment: Experiment, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds to decode all rows, at draft length 0 and at the fastest of the run's draft lengths."""
    first, rollout = round_times(experiment, hardware)[0], experiment.config.rollout
    waves = math.ceil(experiment.sequences // batch_shards(experiment.rollout_mesh) / first.slots)
    tokens = waves * rollout.max_new_tokens
    fastest = min(first.seconds[k] / sum(ACCEPTANCE**i for i in range(k + 1)) for k in rollout.lengths)
    return tokens * first.seconds[0], tokens * fastest


def _update_seconds(experiment: Experiment, hardware: Hardware) -> float:
    """Return the seconds of all microbatches: products, sums over the model axes, and collectives of the weights."""
    config, networks, mesh = experiment.config, experiment.networks, experiment.mesh
    assert networks.decoder is not None
    item, width, updates = networks.policy.dtype.itemsize, longest_sequence(config), config.updates
    microbatches = updates.minibatches * config.microbatches
    groups = config.trained_groups(config.data.prompts)
    rows = groups * config.rollout.group_size / (batch_shards(mesh) * microbatches)
    deployment = replace(deployment_on(mesh, experiment), weight_bytes=item)
    policy = forward(decoder_sheet(networks.decoder), hardware, deployment, Efficiency(), layer=0.0)
    # Training samples nothing. A causal row attends to half of its positions on average, its prompt's included.
    budget = config.rollout.max_new_tokens
    tokens = budget + (width - budget) / config.sharing(networks.policy, int(rows), width - budget)
    positions = rows * width / 2 * width / tokens
    parts = replace(policy, sample=0.0).parts(rows, positions, queries=tokens, outputs=rows * budget)
    # A backward pass takes two forwards, beside frozen weights one, and exchanges as much as one. Full
    # rematerialization adds a forward.
    passes = 3 if config.model.remat == "full" else 2
    products = passes * float(sum(parts.values()))
    params, fsdp = networks.params, mesh.shape["fsdp"]
    if not params.base:
        products += float(sum(parts.values())) - float(parts["exchange"])
    trained = jax.tree.map(lambda x: x.update(dtype=networks.policy.dtype), params.policy)
    gradients, frozen = fsdp * bytes_per_device(trained), fsdp * bytes_per_device(params.base)
    # Each forward gathers the weights, and so does the backward pass. Gradients are scattered, then summed over `data`.
    gathered = passes * (frozen + gradients) + gradients
    moved = gathered * _others(mesh, "fsdp") / _bandwidth(mesh, "fsdp", hardware)
    moved += 2 * gradients / fsdp * _others(mesh, "data") / _bandwidth(mesh, "data", hardware)
    return updates.epochs * microbatches * (products + moved)


def _others(mesh: Mesh, axis: str) -> float:
    """Return the fraction of an array, split over this axis, that the other devices hold."""
    return 1 - 1 / mesh.shape[axis]


def _bandwidth(mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return bytes per second between the devices of an axis: of links if they join a whole group, or the network."""
    axes = mesh.axis_names[mesh.axis_names.index(axis) :]
    return _span_bandwidth(math.prod(mesh.shape[each] for each in axes), hardware)


def _span_bandwidth(span: int, hardware: Hardware) -> float:
    """Return bytes per second between the devices of a group of so many."""
    return hardware.link if span <= hardware.domain else hardware.network
