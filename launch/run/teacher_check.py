"""A look at how a teacher ends its answers before a run takes its first step."""

from dataclasses import replace

import numpy as np

from launch.console import console
from launch.data.batches import fixed_batches
from launch.errors import ConfigError
from launch.evaluation.sampler import Sampler
from launch.setup.experiment import Experiment
from specjax.drafters import NoDrafter
from specjax.parallel import processes
from specjax.parallel.memory import bytes_per_device, device_memory
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import copy_on
from specjax.types import Params

# Prompts that the teacher answers, and the share of a device that networks may take beside its caches.
PROMPTS, MOST_MEMORY = 8, 0.7


def check_teacher(experiment: Experiment) -> None:
    """Let a teacher with weights of its own answer the first prompts, and print how its answers end.

    They may end by the policy's stop tokens, or by the teacher's own. Raises ConfigError if none of several ends by the
    policy's: the policy would learn never to end. With an environment, whose turns go on, nothing is checked, nor if a
    device cannot hold the teacher as rollouts need it, gathered over data and fsdp.
    """
    teacher, config = experiment.teacher, experiment.config
    if teacher is None or teacher.params is None or experiment.environment_of is not None:
        return
    params, shards = Params(teacher.params, {}), batch_shards(experiment.mesh)
    copy = copy_on(experiment.mesh, teacher.policy, NoDrafter(), params)
    if bytes_per_device((params, copy, experiment.networks.params)) > MOST_MEMORY * device_memory(experiment.mesh):
        console.print("teacher: a rollout of its own would not fit; how its answers end is not checked")
        return
    own, budget = config.rollout.stop_tokens, config.rollout.max_new_tokens
    others = [token for token in teacher.stop_tokens if token not in own]
    rollout_options = replace(config.rollout, stop_tokens=(*own, *others))
    networks = replace(experiment.networks, policy=teacher.policy, drafter=NoDrafter())
    answering = replace(experiment, config=replace(config, rollout=rollout_options), networks=networks)
    sampler = Sampler(answering, NoDrafter(), samples=1)
    count = -(-PROMPTS // shards) * shards
    (prompts,) = fixed_batches(experiment.train_prompts.first(count), count)
    rollout, _ = sampler.generate(params, prompts)
    tokens, lengths, stopped = processes.fetch((rollout.tokens, rollout.lengths, rollout.stopped))
    # Filler rows have negative ids.
    tokens, lengths, stopped = (x[prompts.id >= 0] for x in (tokens, lengths, stopped))
    last = np.take_along_axis(tokens, np.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    ended, as_policy = int(stopped.sum()), int((stopped & ~np.isin(last, others)).sum())
    owner = f"teacher.path = {config.teacher.path}"
    if ended > 1 and not as_policy:
        names = ", ".join(experiment.tokenizer.with_special_tokens([token]) or str(token) for token in others)
        raise ConfigError(
            f"{owner}: none of its {ended} finished answers ends by a stop token of the policy, so that the policy "
            f"would learn never to end; must be a teacher that does, or rollout.stop_tokens must have {names}"
        )
    console.print(
        f"teacher: {ended} of {len(stopped)} answers to training prompts end within {budget} tokens, {as_policy} as "
        "the policy's do" + ". WARNING: none ends; raise rollout.max_new_tokens" * (ended == 0)
    )
