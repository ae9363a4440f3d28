"""Variants of a run that does not fit, each with one option changed, to find out which saves the most memory."""

from collections.abc import Iterator
from dataclasses import replace

from configs.schema import RunConfig
from specjax.rollout.plan import lay_out


def alternatives(config: RunConfig, program: str, experts: bool) -> Iterator[tuple[str, RunConfig]]:
    """Yield (what changes, the changed config) for the options that may reduce the memory of `generate` or `update`.

    The number of devices stays the same, unless neither `data` nor `fsdp` can give devices to the axis that grows.

    experts: the policy is a mixture of experts, which `mesh.expert` splits.
    """
    yield from _rollout(config) if program == "generate" else _update(config)
    ahead, separate = config.asynchronous, program == "generate" and config.asynchronous.lag is not None
    section, current = ("asynchronous.rollout_mesh", ahead.rollout_mesh) if separate else ("mesh", config.mesh)
    for axis in ("tensor", "expert", "fsdp") if experts else ("tensor", "fsdp"):
        size = getattr(current, axis)
        for source in ("data", "fsdp"):
            source_size = getattr(current, source)
            if source != axis and source_size % 2 == 0:
                changes = {axis: 2 * size, source: source_size // 2}
                break
        else:
            changes = {axis: 2 * size}
        mesh = replace(current, **changes)
        text = ", ".join(f"{section}.{name} = {value}" for name, value in changes.items())
        suffix = "" if len(changes) == 2 else ", so twice the GPUs"
        variant = {"asynchronous": replace(ahead, rollout_mesh=mesh)} if separate else {"mesh": mesh}
        yield text + suffix, replace(config, **variant)


def _rollout(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    mesh = config.mesh if config.asynchronous.lag is None else config.asynchronous.rollout_mesh
    shards = mesh.data * mesh.fsdp
    sequences = config.data.prompts * config.rollout.group_size // shards
    phases = lay_out(config.rollout, sequences, config.data.max_prompt_tokens)
    limit = phases[0].slots // 2
    if limit:
        fewer_slots = tuple((min(slots, limit), window) for slots, window in phases)
        rollout = replace(config.rollout, phases=fewer_slots)
        yield f"rollout.phases with at most {limit} slots, so sequences wait", replace(config, rollout=rollout)


def _update(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    yield f"microbatches = {2 * config.microbatches}", replace(config, microbatches=2 * config.microbatches)
    if config.model.remat != "full":
        yield "model.remat = full", replace(config, model=replace(config.model, remat="full"))
    chunk = config.logit_chunk // 2 if config.logit_chunk else 1024
    yield f"logit_chunk = {chunk}", replace(config, logit_chunk=chunk)
