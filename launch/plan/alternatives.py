"""Variants of a run that does not fit, each with one option changed, the smallest change first."""

from collections.abc import Iterator
from dataclasses import replace

from configs.schema import RunConfig
from specjax.rollout.plan import lay_out

FEW_POSITIONS = 64


def alternatives(config: RunConfig, program: str, experts: bool) -> Iterator[tuple[str, RunConfig]]:
    """Yield (options to pass, the changed config) for what may reduce the memory of a program of the step.

    First those that change no token, then those that change the batch, then meshes. The number of devices stays the
    same, unless neither `data` nor `fsdp` can give devices to the axis that grows.

    experts: the policy is a mixture of experts, which `mesh.expert` splits.
    """
    # Other programs of a rollout are those with an environment on the host, which has no phases.
    yield from _update(config) if program == "update" else smaller_rollouts(config, phases=program == "generate")
    ahead, separate = config.asynchronous, program == "generate" and config.asynchronous.lag is not None
    section, current = ("asynchronous.rollout-mesh", ahead.rollout_mesh) if separate else ("mesh", config.mesh)
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
        text = " ".join(f"--{section}.{name} {value}" for name, value in changes.items())
        suffix = "" if len(changes) == 2 else ", so twice the GPUs"
        variant = {"asynchronous": replace(ahead, rollout_mesh=mesh)} if separate else {"mesh": mesh}
        yield text + suffix, replace(config, **variant)


def smaller_rollouts(config: RunConfig, phases: bool) -> Iterator[tuple[str, RunConfig]]:
    """Yield the same for half the slots, so that sequences wait, and for half the prompts or tokens of a prompt.

    phases: sequences may wait.
    """
    mesh = config.mesh if config.asynchronous.lag is None else config.asynchronous.rollout_mesh
    shards, data = mesh.data * mesh.fsdp, config.data
    sequences = data.prompts * config.rollout.group_size // shards
    laid = lay_out(config.rollout, sequences, data.max_prompt_tokens)
    limit = laid[0].slots // 2
    if limit and phases:
        fewer_slots = tuple(dict.fromkeys((min(slots, limit), window) for slots, window in laid))
        words = " ".join(f"{slots} {window}" for slots, window in fewer_slots)
        yield f"--rollout.phases {words}", replace(config, rollout=replace(config.rollout, phases=fewer_slots))
    if data.prompts % (2 * shards) == 0:
        prompts = data.prompts // 2
        yield f"--data.prompts {prompts}", replace(config, data=replace(data, prompts=prompts))
    if data.max_prompt_tokens > 1:
        tokens = data.max_prompt_tokens // 2
        yield f"--data.max-prompt-tokens {tokens}", replace(config, data=replace(data, max_prompt_tokens=tokens))


def _update(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    microbatches = 2 * config.microbatches
    yield f"--microbatches {microbatches}", replace(config, microbatches=microbatches)
    if config.model.remat != "full":
        yield "--model.remat full", replace(config, model=replace(config.model, remat="full"))
    # By default it follows from the rows of a microbatch, and is seldom smaller than this.
    if chunk := config.logit_chunk // 2 if config.logit_chunk else FEW_POSITIONS:
        yield f"--logit-chunk {chunk}", replace(config, logit_chunk=chunk)
