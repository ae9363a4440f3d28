"""Seconds of the parts of a step by the cost model and a hardware sheet, before a GPU has run it."""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from launch.predict.memory import abstract_copy, microbatch_of
from launch.setup.experiment import Experiment
from models.sheets import decoder_sheet
from specjax.cost import Deployment, Hardware, NetworkSheet, cost_model
from specjax.cost.sheets import Efficiency, forward
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import batch_shards

# Chance that a drafted token is accepted where all before it were: 2.77 tokens a round at draft length 3, the lower of
# the paper's two in-domain EAGLE-3 heads (RL-Think of arXiv 2604.26779).
ACCEPTANCE = 0.76


class RoundTimes(NamedTuple):
    """Seconds of a round of a phase, by draft length. slots: rows of one data shard."""

    slots: int
    window: int
    seconds: dict[int, float]


def round_times(experiment: Experiment, hardware: Hardware) -> list[RoundTimes]:
    """Return the seconds of a round of each phase, at draft length 0 and at the run's draft lengths."""
    deployment = deployment_on(experiment.rollout_mesh, experiment)
    model = cost_model(_sheet(experiment), experiment.networks.draft.sheet, hardware, deployment)
    lengths = sorted({0, *experiment.config.rollout.lengths})
    return [
        RoundTimes(slots, window, {k: float(model.seconds(slots, slots * window, k)) for k in lengths})
        for slots, window in experiment.phases
    ]


def decoding_seconds(experiment: Experiment, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of the rounds of a rollout if no row ends early, without drafts and with.

    With drafts, at the fastest of the run's draft lengths if ACCEPTANCE holds.
    """
    first, rollout = round_times(experiment, hardware)[0], experiment.config.rollout
    waves = math.ceil(experiment.sequences // batch_shards(experiment.rollout_mesh) / first.slots)
    tokens = waves * rollout.max_new_tokens
    fastest = min(first.seconds[k] / sum(ACCEPTANCE**i for i in range(k + 1)) for k in rollout.lengths)
    return tokens * first.seconds[0], tokens * fastest


def weights_seconds(experiment: Experiment, hardware: Hardware) -> float:
    """Return the seconds to gather the rollout's weights over fsdp, or to send them to another mesh and gather them."""
    mesh, rollout_mesh, copy = experiment.mesh, experiment.rollout_mesh, abstract_copy(experiment)
    if rollout_mesh is mesh:
        return bytes_per_device(replace(copy, memory=())) * _others(mesh, "fsdp") / _bandwidth(mesh, "fsdp", hardware)
    # The frozen base of adapters was sent before the first step.
    size = bytes_per_device((copy.policy, copy.draft))
    # Each device gets its own part of the copy. A device of a smaller mesh sends to several.
    shards, receivers = batch_shards(rollout_mesh), max(rollout_mesh.size // mesh.size, 1)
    sent = receivers * size / shards / hardware.between(mesh.size + rollout_mesh.size)
    return sent + size * (1 - 1 / shards) / _bandwidth(rollout_mesh, "data", hardware)


def update_seconds(experiment: Experiment, hardware: Hardware) -> float:
    """Return the seconds of all microbatches of the policy, if nothing overlaps.

    They are products, sums over the model axes, and collectives of the weights.
    """
    config, params, mesh = experiment.config, experiment.networks.params, experiment.mesh
    dtype, budget, updates = experiment.networks.policy.dtype, config.rollout.max_new_tokens, config.updates
    (rows, tokens), width = microbatch_of(experiment), experiment.prompt_width + budget
    deployment = replace(deployment_on(mesh, experiment), weight_bytes=dtype.itemsize)
    # Training samples nothing. A causal row attends to half of its positions on average, its prompt's included.
    policy = replace(forward(_sheet(experiment), hardware, deployment, Efficiency(), layer=0.0), sample=0.0)
    queries, positions = tokens / rows, rows**2 * width**2 / 2 / tokens
    parts = policy.parts(rows, positions, queries, outputs=rows * budget)
    # A backward pass takes two forwards, beside frozen weights one, and exchanges as much as one. Full
    # rematerialization adds a forward.
    passes = 3 if config.model.remat == "full" else 2
    products = passes * float(sum(parts.values()))
    if not params.base:
        products += float(sum(parts.values())) - float(parts["exchange"])
    trained, fsdp = jax.tree.map(lambda x: x.update(dtype=dtype), params.policy), mesh.shape["fsdp"]
    gradients, frozen = fsdp * bytes_per_device(trained), fsdp * bytes_per_device(params.base)
    # Each forward gathers the weights, and so does the backward pass. Gradients are scattered, then summed over `data`.
    gathered = passes * (frozen + gradients) + gradients
    moved = gathered * _others(mesh, "fsdp") / _bandwidth(mesh, "fsdp", hardware)
    moved += 2 * gradients / fsdp * _others(mesh, "data") / _bandwidth(mesh, "data", hardware)
    return updates.epochs * updates.minibatches * config.microbatches * (products + moved)


def deployment_on(mesh: Mesh, experiment: Experiment) -> Deployment:
    """Return how the networks of a rollout are spread over a mesh and stored."""
    config, stored = experiment.config, experiment.networks.policy.dtype.itemsize
    return Deployment(
        tensor=mesh.shape["tensor"],
        expert=mesh.shape["expert"] * mesh.shape["tensor"],
        same_rows=True,
        weight_bytes=1 if config.model.rollout_dtype or config.lora.base_dtype else stored,
        cache_bytes=stored,
        factor_bytes=stored,
        draft_bytes=1 if config.draft.rollout_dtype else stored,
    )


def _sheet(experiment: Experiment) -> NetworkSheet:
    assert experiment.networks.decoder is not None
    return decoder_sheet(experiment.networks.decoder)


def _others(mesh: Mesh, axis: str) -> float:
    """Return the fraction of an array, split over this axis, that the other devices hold."""
    return 1 - 1 / mesh.shape[axis]


def _bandwidth(mesh: Mesh, axis: str, hardware: Hardware) -> float:
    """Return bytes per second between the devices of an axis: of links if they join a whole group, or the network."""
    axes = mesh.axis_names[mesh.axis_names.index(axis) :]
    return hardware.between(math.prod(mesh.shape[each] for each in axes))
