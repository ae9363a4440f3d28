"""Accuracy, pass@k and majority@k: `python -m launch.evaluate CONFIG [--checkpoint DIR] [--section.field VALUE ...]`.

Completions are generated as in training: the same speculative rollout, the same reward. What they are drawn from is
`--rollout.law`; no draft changes it.
"""

from rich.console import Console

from launch.build.experiment import build_experiment
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source, write_results
from launch.cli.reads import EVALUATE
from launch.evaluation.options import EvaluateArgs
from launch.evaluation.sets import evaluate_sets, load_sets
from launch.run.directory import params_of
from launch.timing import provenance

console = Console(highlight=False, soft_wrap=True, markup=False)


def main(argv: list[str]) -> int:
    """Evaluate every set of problems, print the results and write them where asked."""
    use_compile_cache()
    description = "Accuracy, pass@k and majority@k."
    config, own = parse_run_and(
        EvaluateArgs, argv, "python -m launch.evaluate", description, EVALUATE, allow_truncated_law=True
    )
    check_policy_source(config, own.checkpoint)
    sets = load_sets(config, own.files)
    experiment = build_experiment(config, training=False)
    params = params_of(own.checkpoint, experiment, own.checkpoint_step)
    found = provenance("launch.evaluate") | {"recipe": config.name}
    found |= {"checkpoint": own.checkpoint, "checkpoint_step": own.checkpoint_step}
    write_results(own.json, found | evaluate_sets(experiment, params, sets, own, console))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
