"""Answer a prompt: `python -m launch.generate CONFIG --prompt TEXT [--checkpoint DIR]`."""

import itertools
import time
from dataclasses import dataclass, replace

import jax
import numpy as np
from rich.console import Console

from launch.build.experiment import Experiment, build_experiment
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source
from launch.data.batches import PromptTable, fixed_batches
from launch.data.problems import Problem
from launch.evaluation.sampler import at_one_length
from launch.run.directory import params_of
from specjax.checkpoint import Which
from specjax.keys import seed_step
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import make_generate
from specjax.train.metrics import rollout_metrics
from specjax.types import Params, Rollout

console = Console(highlight=False, soft_wrap=True, markup=False)


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Options of launch.generate alone.

    Attributes:
        prompt:          what to answer.
        checkpoint:      the directory of a run; None takes the networks as the recipe starts them.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        samples:         how many answers.
    """

    prompt: str
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    samples: int = 1


def main(argv: list[str]) -> int:
    """Print the answers, and how they came about."""
    use_compile_cache()
    config, own = parse_run_and(
        GenerateArgs, argv, "python -m launch.generate", "Answer a prompt by speculative decoding.", trains=False
    )
    if own.samples < 1:
        raise ConfigError(f"samples = {own.samples}: must be at least 1")
    check_policy_source(config, own.checkpoint)
    setup = set_up(config, training=False)
    params = params_of(own.checkpoint, setup, own.checkpoint_step)
    rollout, seconds = _generate(setup, params, own)
    rows = zip(np.asarray(rollout.tokens), np.asarray(rollout.lengths), strict=True)
    # What follows the samples belongs to prompts that only fill up the mesh.
    for tokens, length in itertools.islice(rows, own.samples):
        console.print(experiment.tokenizer.decode(tokens[:length].tolist()), end="\n\n")
    console.print(_summary(rollout, seconds))
    return 0


def _generate(experiment: Experiment, params: Params, own: GenerateArgs) -> tuple[Rollout, float]:
    """The rollout of one prompt, and the seconds it took once compiled."""
    limit = experiment.config.data.max_prompt_tokens
    table = PromptTable.build([Problem(prompt=own.prompt, answer="")], experiment.tokenizer, limit)
    if table.dropped:
        raise ConfigError(f"prompt: must take 1 .. {limit} tokens (data.max_prompt_tokens)")
    (prompts,) = fixed_batches(table, batch_shards(experiment.mesh))
    networks = experiment.networks
    config = replace(at_one_length(experiment.train.rollout, networks.drafter), group_size=own.samples)
    generate = make_generate(networks.policy, networks.drafter, config, experiment.mesh)
    noise = seed_step(experiment.config.seed, 0)
    jax.block_until_ready(generate(params, prompts, noise))
    start = time.perf_counter()
    answers = jax.block_until_ready(generate(params, prompts, noise))
    return answers, time.perf_counter() - start


def _summary(rollout: Rollout, seconds: float) -> str:
    metrics = rollout_metrics(rollout)
    tokens, alpha = float(metrics["rollout/tokens"]), float(metrics["rollout/acceptance_length"])
    return f"{tokens:.0f} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s), {alpha:.2f} tokens a round"


if __name__ == "__main__":
    raise SystemExit(run_program(main))
