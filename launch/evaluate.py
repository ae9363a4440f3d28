"""Measure accuracy, pass@k and majority@k: `python -m launch.evaluate CONFIG|RUN [--option VALUE ...]`.

Completions are generated and scored as in training, by the same speculative rollout and the same reward.
`--rollout.law` sets their distribution; the draft does not change it.
"""

from dataclasses import replace

from configs.schema.rewards import NO_REWARD
from launch.cli.options import parse_run_and
from launch.cli.paths import check_policy_source, write_results
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipe_options import EVALUATE
from launch.console import wide_console as console
from launch.data.hub import with_commit
from launch.errors import ConfigError
from launch.evaluation.options import EvaluateArgs
from launch.evaluation.sets import evaluate_sets, load_sets
from launch.jobs.hosts import join_hosts
from launch.phases.long_phases import long_phases_beside
from launch.phases.signals import StopSignals
from launch.run.networks import params_of, without_idle_draft
from launch.run.pin_references import with_commits, with_step
from launch.setup.experiment import build_experiment
from launch.timing import provenance


def main(argv: list[str]) -> int:
    """Evaluate every set of problems, print the results, and write them to `--json`."""
    use_compile_cache()
    description = "Measure accuracy, pass@k and majority@k."
    config, args = parse_run_and(
        EvaluateArgs, argv, "python -m launch.evaluate", description, EVALUATE, allow_truncated_law=True
    )
    if config.reward.scorer == NO_REWARD:
        raise ConfigError("reward.scorer = none: no answer is correct; must be a scorer, as --reward.scorer math")
    config = join_hosts(config)
    check_policy_source(config, args.checkpoint)
    config = with_commits(config, args.checkpoint)
    args = replace(args, files=tuple(with_commit(path, "dataset") for path in args.files))
    sets, args = load_sets(config, args.files), with_step(args)
    files = {"json": args.json, "save": args.save}
    with StopSignals(console.print) as signals, long_phases_beside(files, signals, config, args):
        experiment = build_experiment(config, training=False)
        params = params_of(args.checkpoint, experiment, args.checkpoint_step)
        experiment, idle = without_idle_draft(args.checkpoint, experiment, args.checkpoint_step)
        results = provenance("launch.evaluate") | {"recipe": config.name}
        results |= {"checkpoint": args.checkpoint, "checkpoint_step": args.checkpoint_step}
        write_results(args.json, results | evaluate_sets(experiment, params, sets, args, console))
        for line in idle:
            console.print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
