"""The answers to one prompt."""

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.data.batches import fixed_batches
from launch.data.problems import Problem
from launch.evaluation.sampler import Sampler
from specjax.parallel.mesh import batch_shards
from specjax.train.metrics import rollout_metrics
from specjax.types import Params


def answer_prompt(experiment: Experiment, params: Params, prompt: str, samples: int) -> tuple[list[str], str]:
    """Return `samples` answers as text, and a line that says how they were generated."""
    limit = experiment.config.data.max_prompt_tokens
    table = experiment.encode_prompts([Problem(prompt=prompt, answer="")])
    if table.dropped:
        raise ConfigError(f"prompt: must take 1 .. {limit} tokens (data.max_prompt_tokens)")
    (prompts,) = fixed_batches(table, batch_shards(experiment.mesh))
    rollout, seconds = Sampler(experiment, experiment.networks.drafter, samples, step=0).generate(params, prompts)
    # Rows after the samples belong to prompts that only fill up the mesh.
    rows = zip(rollout.tokens[:samples].tolist(), rollout.lengths[:samples].tolist(), strict=True)
    metrics = rollout_metrics(rollout)
    tokens, alpha = float(metrics["rollout/tokens"]), float(metrics["rollout/acceptance_length"])
    summary = f"{tokens:.0f} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s), {alpha:.2f} tokens a round"
    return [experiment.tokenizer.decode(tokens[:length]) for tokens, length in rows], summary
