"""Answer a prompt: `python -m launch.generate CONFIG --prompt TEXT [--checkpoint DIR]`."""

from dataclasses import dataclass
from functools import partial

from launch.cli.console import console
from launch.cli.hosts import join_hosts
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_checkpoint, check_policy_source
from launch.cli.recipe_options import GENERATE
from launch.evaluation.one_prompt import answer_prompt
from launch.run.networks import params_of
from launch.run.pin_references import with_commits
from launch.setup.experiment import build_experiment
from specjax.checkpoint import Which
from specjax.options import Options, Positive


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(Options):
    """Options of launch.generate alone.

    Attributes:
        prompt:          Prompt to answer.
        checkpoint:      Directory of a run. None: the recipe's initial networks.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        samples:         Number of answers.
    """

    prompt: str
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    samples: Positive = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_checkpoint(self.checkpoint, self.checkpoint_step)


def main(argv: list[str]) -> int:
    """Print the answers, the generation speed and the acceptance length."""
    use_compile_cache()
    config, args = parse_run_and(
        GenerateArgs,
        argv,
        "python -m launch.generate",
        "Answer a prompt by speculative decoding.",
        GENERATE,
        allow_truncated_law=True,
    )
    config = join_hosts(config)
    check_policy_source(config, args.checkpoint)
    experiment = build_experiment(with_commits(config, args.checkpoint), training=False)
    params = params_of(args.checkpoint, experiment, args.checkpoint_step)
    show = partial(console.print, end="")
    console.print(answer_prompt(experiment, params, args.prompt, args.samples, show))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
