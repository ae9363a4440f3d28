"""Checks of options that must fit each other, before anything is loaded, and of what networks ask of a mesh."""

import math
from collections.abc import Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.errors import ConfigError, check_all
from launch.setup.networks import Networks
from specjax.options import nearest_divisors, nearest_multiples
from specjax.parallel.mesh import batch_shards


def check_experts(config: RunConfig, networks: Networks) -> None:
    """Raise ConfigError for devices along `expert` if neither network has experts: they would all do the same."""
    specs = [x.sharding.spec for x in jax.tree.leaves((networks.params.policy, networks.params.draft))]
    if networks.policy.mixture is not None or any("expert" in axes for axes in map(jax.tree.leaves, specs)):
        return
    for name, mesh in (("mesh", config.mesh), ("asynchronous.rollout_mesh", config.asynchronous.rollout_mesh)):
        if mesh.expert > 1:
            raise ConfigError(f"{name}.expert = {mesh.expert}: must be 1; neither network has a mixture of experts")


def check_correction(config: RunConfig) -> None:
    """Raise ConfigError if rollouts sample from another law than the one that is trained, and no weight corrects."""
    uncorrected = config.updates.several and not config.updates.recompute_old
    if config.loss.importance_cap is not None and not uncorrected:
        return
    needed = "updates.recompute_old = True" if uncorrected else "loss.importance_cap a number such as 2"
    for name, value, same in (
        ("model.rollout_dtype", config.model.rollout_dtype, None),
        ("lora.merged", config.lora.merged, False),
        ("asynchronous.lag", config.asynchronous.lag, 0),
        ("rollout.carry_over", config.rollout.carry_over, None),
    ):
        if value not in (None, same):
            raise ConfigError(f"{name} = {value}: must be {same}, or {needed}, to correct for it")


def check_divisibility(config: RunConfig, shards: int, rollout_shards: int) -> None:
    """Raise a ConfigError unless prompts, groups, minibatches and microbatches divide over the data shards.

    It has a line for each that does not. Those that depend on a refused number are checked with the nearest that works.
    """
    refused, prompts, groups, updates = list[str](), config.data.prompts, config.selection.groups, config.updates
    counts = {"mesh": shards, "asynchronous.rollout_mesh": rollout_shards}
    data_shards = math.lcm(shards, rollout_shards)
    failing = [f"{mesh}.data x {mesh}.fsdp = {count}" for mesh, count in counts.items() if prompts % count]
    if failing:
        if rollout_shards == shards:
            failing = failing[:1]
        near = nearest_multiples(prompts, data_shards)
        refused.append(f"data.prompts = {prompts}: must be a multiple of {' and of '.join(failing)}; nearest: {near}")
        prompts = _nearest_multiple(prompts, data_shards)
    share, finished = config.rollout.carry_over, config.rollout.finished_groups(prompts)
    if share is not None and (finished % data_shards or not 0 < finished < prompts):
        allowed = range(data_shards, prompts, data_shards)
        near = sorted(allowed, key=lambda count: abs(count - share * prompts))[:2]
        # Rounded up, because a share is rounded down to prompts.
        shares = " or ".join(f"{math.ceil(1e4 * count / prompts) / 1e4:g}" for count in sorted(near))
        refused.append(
            f"rollout.carry_over = {share}: finishes {finished} of data.prompts = {prompts} in a step; must be above "
            f"0, below {prompts} and a multiple of the {data_shards} data shards; "
            + (f"nearest: {shares}" if near else "needs more data.prompts")
        )
        finished = near[0] if near else prompts
    if groups % shards or groups > finished:
        near = nearest_multiples(min(groups, finished), shards)
        most = f"data.prompts = {prompts}" if share is None else f"{finished}, the prompts that a step finishes"
        refused.append(
            f"selection.groups = {groups}: must be a multiple of mesh.data x mesh.fsdp = {shards}, and at most {most}; "
            f"nearest: {near}"
        )
        groups = _nearest_multiple(min(groups, finished), shards)
    sequences, minibatches = (groups or finished) * config.rollout.group_size // shards, updates.minibatches
    if sequences % (minibatches * config.microbatches):
        name = f"updates.minibatches x microbatches = {minibatches} x {config.microbatches}"
        if minibatches == 1:
            name = f"microbatches = {config.microbatches}"
        option, value, number = "microbatches", config.microbatches, sequences // minibatches
        if sequences % minibatches:
            option, value, number = "updates.minibatches", minibatches, sequences
        refused.append(
            f"{name}: must divide {sequences}, the sequences that a data shard trains on per step"
            f"{f' with data.prompts = {prompts}' * (prompts != config.data.prompts)}; nearest {option}: "
            f"{nearest_divisors(value, number)}"
        )
    if refused:
        raise ConfigError(*refused)


def check_shards(config: RunConfig, meshes: Sequence[Mesh]) -> None:
    """Raise ConfigError unless the batches of a training step, and of a new run's distillation, divide over the meshes.

    meshes: those that could be made, of the one that trains and the one that generates.
    """
    if not meshes:
        return
    shards, rollout_shards = batch_shards(meshes[0]), batch_shards(meshes[-1])
    checks = [partial(check_divisibility, config, shards, rollout_shards)]
    if config.distill.steps and not config.resume:
        checks.append(partial(check_distillation_batch, config, shards))
    check_all(checks)


def check_distillation_batch(config: RunConfig, shards: int) -> None:
    """Raise ConfigError unless the microbatches of distillation divide over the data shards."""
    rows, parts = config.distill.batch_size, config.distill.microbatches * shards
    if rows % parts:
        raise ConfigError(
            f"distill.batch_size = {rows}: must be a multiple of distill.microbatches x mesh.data x mesh.fsdp = "
            f"{parts}; nearest: {nearest_multiples(rows, parts)}"
        )


def _nearest_multiple(value: int, factor: int) -> int:
    return max(1, round(value / factor)) * factor


def check_windows(config: RunConfig) -> None:
    """Raise ConfigError if a phase's window is shorter than the longest prompt."""
    for _, window in config.rollout.phases:
        if window < config.data.max_prompt_tokens:
            raise ConfigError(
                f"rollout.phases = {config.rollout.phases}: a window of {window} is too short for a prompt; "
                f"must be at least data.max_prompt_tokens = {config.data.max_prompt_tokens}"
            )
