"""Answer a prompt: `python -m launch.generate CONFIG|RUN [--prompt TEXT] [--samples N]`.

Without `--prompt` it shows the first training problem as the model is asked, and answers it.
"""

from dataclasses import dataclass
from itertools import count, repeat

from launch.cli.options import parse_run_and
from launch.cli.paths import check_checkpoint, check_policy_source
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipe_options import GENERATE
from launch.console import console
from launch.environments.build import showing_tools
from launch.evaluation.one_prompt import answer_prompt, as_asked, given_problem
from launch.jobs.hosts import join_hosts
from launch.run.networks import params_of, without_idle_draft
from launch.run.pin_references import with_commits
from launch.setup.experiment import build_experiment
from launch.setup.problems import build_problems, build_tokenizer, check_sources
from specjax.checkpoint import Which
from specjax.options import NonNegative, Options


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(Options):
    """Options of launch.generate alone.

    Attributes:
        prompt:          Prompt to answer, text or JSON of messages. None: the first problem, shown as it is asked.
        checkpoint:      Directory of a run. None: the recipe's initial networks.
        checkpoint_step: Checkpoint of that run: newest, best or a step.
        samples:         Number of answers. 0: show the prompt only, without loading the model.
    """

    prompt: str | None = None
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    samples: NonNegative = 1

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
    config = with_commits(join_hosts(config), args.checkpoint)
    if args.prompt is None:
        check_sources(config)
    problem = build_problems(config).train[0] if args.prompt is None else given_problem(args.prompt)
    if args.prompt is None or args.samples == 0:
        console.print(as_asked(problem, showing_tools(config, build_tokenizer(config))))
    if args.samples == 0:
        return 0
    check_policy_source(config, args.checkpoint)
    experiment = build_experiment(config, training=False)
    experiment, idle = without_idle_draft(args.checkpoint, experiment, args.checkpoint_step)
    # A single answer comes in many pieces.
    params = params_of(args.checkpoint, experiment, args.checkpoint_step)
    places = repeat("") if args.samples == 1 else (f"[{number}] " for number in count(1))

    def show(piece: str) -> None:
        console.print(next(places) + piece, end="")

    console.print(", ".join([answer_prompt(experiment, params, problem.prompt, args.samples, show), *idle]))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
