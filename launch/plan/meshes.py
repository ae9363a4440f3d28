"""Choice of a mesh for a number of GPUs: `--plan.mesh auto`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from configs.schema import RunConfig
from launch.cli.microbatches import with_fitting_microbatches
from launch.errors import ConfigError
from launch.plan.devices import hardware_of, mesh_over, planned_devices
from launch.plan.estimate import MeshEstimate, estimate
from launch.plan.options import PlanConfig
from launch.predict.clock import ACCEPTANCE
from launch.setup.experiment import abstract_experiment
from specjax.parallel.memory import gib
from specjax.parallel.mesh import AXES, MeshConfig, describe_mesh

# Meshes that are shown.
SHOWN = 6
SPLITS = (1, 2, 4, 8)
# Steps that differ by less are equally fast: the latency of a collective is assumed.
NEAR = 1.03


class Refused(NamedTuple):
    """A mesh that the run cannot have, and why."""

    mesh: MeshConfig
    reason: str


def rank_meshes(config: RunConfig, plan: PlanConfig, usable: float) -> tuple[list[MeshEstimate], list[Refused]]:
    """Return the estimates of sensible meshes, the best first, and the meshes that the run refuses.

    Meshes that may fit come first, as `by_seconds` orders them, then the others, by memory. Compiles nothing.

    usable: bytes of a device that programs may take.

    Raises ConfigError if the run is refused on every mesh.
    """
    count = plan.gpus or math.prod(config.mesh.shape)
    devices = planned_devices(plan, count)
    hardware = hardware_of(plan, count)
    # What one device refuses, every mesh refuses.
    single = abstract_experiment(replace(config, mesh=MeshConfig()), mesh_over(devices[:1], MeshConfig()))
    mixture = single.networks.policy.mixture is not None
    estimates, refused = [], []
    linked = min(hardware.domain, count)
    joined = next(size for size in range(linked, 0, -1) if count % size == 0)
    for mesh in sensible_meshes(count, joined, mixture):
        try:
            experiment = abstract_experiment(with_mesh(config, mesh), mesh_over(devices, mesh))
            estimates.append(estimate(experiment, hardware))
        except ConfigError as error:
            refused.append(Refused(mesh, "; ".join(error.args)))
    if not estimates:
        raise ConfigError(f"plan.gpus = {count}: no mesh of so many GPUs is possible; {refused[0].reason}")
    fitting = by_seconds([each for each in estimates if each.largest <= usable])
    too_large = sorted((each for each in estimates if each.largest > usable), key=lambda each: each.largest)
    return [*fitting, *too_large], refused


def by_seconds(estimates: Sequence[MeshEstimate]) -> list[MeshEstimate]:
    """Return estimates by the seconds of a step with drafts; of those NEAR the best, first those without collectives.

    A round has collectives where `tensor` or `expert` divides the policy.
    """
    limit = NEAR * min((each.seconds for each in estimates), default=0.0)

    def order(each: MeshEstimate) -> tuple[bool, float]:
        divided = each.config.mesh.tensor * each.config.mesh.expert > 1
        return divided or each.seconds > limit, each.seconds

    return sorted(estimates, key=order)


def enough_gpus(config: RunConfig, plan: PlanConfig, count: int, usable: float) -> int | None:
    """Return 2, 4 or 8 times `count`: the first number of GPUs on which a mesh may fit; None if there is none."""
    for gpus in (2 * count, 4 * count, 8 * count):
        try:
            estimates, _ = rank_meshes(config, replace(plan, gpus=gpus), usable)
        except ConfigError:
            continue
        if estimates[0].largest <= usable:
            return gpus
    return None


def sensible_meshes(count: int, joined: int, mixture: bool) -> Iterator[MeshConfig]:
    """Yield meshes of `count` devices, of which each `joined` neighbours are linked; `joined` divides `count`.

    `tensor` stays within linked devices. `fsdp` takes all others, or all linked ones with `data` over the rest.

    mixture: the policy is a mixture of experts. `expert` and `tensor` then fill a host of 8 or two.
    """
    host = max(size for size in SPLITS if joined % size == 0)
    pairs = [(1, tensor) for tensor in SPLITS]
    if mixture:
        pairs = [(1, 1), *((host // tensor, tensor) for tensor in SPLITS if tensor <= host), (4, 4)]
    for expert, tensor in dict.fromkeys(pairs):
        model = expert * tensor
        if joined % tensor or count % model:
            continue
        yield MeshConfig(fsdp=count // model, expert=expert, tensor=tensor)
        if joined < count and joined % model == 0:
            yield MeshConfig(data=count // joined, fsdp=joined // model, expert=expert, tensor=tensor)


def with_mesh(config: RunConfig, mesh: MeshConfig) -> RunConfig:
    """Return the config with this mesh, microbatches that fit it, and as many slots in all.

    A data shard of half the devices has half the slots: their caches take about the same memory per device.
    """
    ratio = config.mesh.data * config.mesh.fsdp / (mesh.data * mesh.fsdp)
    phases = tuple((max(round(slots * ratio), 1), window) for slots, window in config.rollout.phases)
    return with_fitting_microbatches(replace(config, mesh=mesh, rollout=replace(config.rollout, phases=phases)))


def mesh_options(config: RunConfig, recipe: RunConfig) -> str:
    """Return the options that give a run the mesh, the microbatches and the slots of `config`."""
    words = [f"--mesh.{axis} {size}" for axis, size in zip(AXES, config.mesh.shape, strict=True)]
    if config.microbatches != recipe.microbatches:
        words.append(f"--microbatches {config.microbatches}")
    if config.rollout.phases != recipe.rollout.phases:
        words.append("--rollout.phases " + " ".join(f"{slots} {window}" for slots, window in config.rollout.phases))
    return " ".join(words)


def mesh_table(estimates: Sequence[MeshEstimate], refused: Sequence[Refused], usable: float) -> Iterator[str]:
    """Yield the lines of the ranked estimates and of the refused meshes."""
    titles = "generate, GiB", "update, GiB", "update, s", "plain step, s", "drafted step, s"
    yield f"{'meshes, estimated':34}" + "".join(f"{title:>16}" for title in titles)
    for row in estimates[:SHOWN]:
        sizes = "".join(f"{f'>= {gib(size)}':>16}" for size in row.memory.values())
        seconds = "".join(f"{value:>16,.1f}" for value in (row.update, row.plain_seconds, row.seconds))
        yield f"  {describe_mesh(row.config.mesh):32}{sizes}{seconds}" + "  too large" * (row.largest > usable)
    for refusal in refused:
        yield f"  {describe_mesh(refusal.mesh):32}  refused: {refusal.reason}"
    yield "  GiB per device: state, copies, caches and gradients, from their shapes. Temporaries come on top."
    yield "  Seconds: by the hardware sheet, not measured. Plain: at draft length 0. Drafted: at the best of the run's"
    yield f"  draft lengths, a token accepted with {ACCEPTANCE} if those before it are. All completions have"
    yield "  max_new_tokens, collectives and products do not overlap; draft training and rewards are left out."
    yield f"  Sorted by drafted steps. Within {NEAR - 1:.0%} of the best, rounds without collectives come first."
