"""Answers of a policy to one prompt."""

import math

from launch.build.experiment import Experiment
from launch.build.memory import check_rollout
from launch.cli.errors import ConfigError
from launch.data.batches import fixed_batches
from launch.data.problems import Problem
from launch.evaluation.sampler import Sampler
from specjax.parallel.mesh import batch_shards
from specjax.train.metrics import rollout_metrics
from specjax.types import Params


def answer_prompt(experiment: Experiment, params: Params, prompt: str, samples: int) -> tuple[list[str], str]:
    """Return `samples` answers as text, and one line with their tokens, seconds and acceptance length.

    Raises ConfigError if the prompt is empty or too long.
    """
    limit = experiment.config.data.max_prompt_tokens
    table = experiment.encode_prompts([Problem(prompt=prompt, answer="")])
    if table.dropped:
        raise ConfigError(f"prompt: must take 1 .. {limit} tokens (data.max_prompt_tokens)")
    sampler, shards = Sampler(experiment, experiment.networks.drafter, samples, step=0), batch_shards(experiment.mesh)
    check_rollout(experiment, sampler.rollout, shards, {"samples": samples})
    (prompts,) = fixed_batches(table, shards)
    rollout, seconds = sampler.generate(params, prompts)
    # Later rows belong to filler prompts, which make the batch a multiple of the data shards.
    rows = zip(rollout.tokens[:samples].tolist(), rollout.lengths[:samples].tolist(), strict=True)
    metrics = rollout_metrics(rollout)
    tokens, acceptance_length = float(metrics["rollout/tokens"]), float(metrics["rollout/acceptance_length"])
    speed = f"{tokens:.0f} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s)"
    # A completion of one token needs no verification.
    summary = speed if math.isnan(acceptance_length) else f"{speed}, acceptance length {acceptance_length:.2f}"
    return [experiment.tokenizer.decode(tokens[:length]) for tokens, length in rows], summary
