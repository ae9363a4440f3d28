"""Initialise a draft in-domain, offline: `python -m launch.distill CONFIG --out DIR [--section.field VALUE ...]`.

The policy answers the training prompts. The draft learns from these answers, is saved, and is measured on the held-out
prompts. The output directory holds:

    DIR/draft/        the draft; read it with --draft.path
    DIR/policy/       for an MTP head, instead of DIR/draft: the policy with the head; read it with --model.path
    DIR/DIALECT/      with --dialect: a copy of an EAGLE-3 head or block draft in this public layout
    DIR/distill.json  cost, acceptance, and the number of steps after which the draft has paid for itself
"""

from dataclasses import replace
from pathlib import Path

from configs.schema import LookupConfig
from launch.cli.options import parse_run_and
from launch.cli.paths import check_policy_source, new_output_directory
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipe_options import DISTILL
from launch.console import wide_console as console
from launch.distillation.offline import DistillArgs, distill_offline
from launch.jobs.hosts import join_hosts
from launch.phases.lock import exclusive, held_by_primary
from launch.phases.long_phases import UNFINISHED, LongPhases, exclusive_files, options_text
from launch.phases.signals import StopSignals
from launch.run.networks import restore_params, restore_policy
from launch.run.pin_references import with_commits, with_step
from launch.setup.experiment import Experiment, build_experiment
from specjax.program import dropping_compilations
from specjax.train.selection import SelectionConfig
from specjax.train.updates import UpdateConfig
from specjax.types import Params


def main(argv: list[str]) -> int:
    """Distil, save and measure a draft, and print the results."""
    use_compile_cache()
    config, args = parse_run_and(
        DistillArgs,
        argv,
        "python -m launch.distill",
        "Initialise a draft from the policy's own answers, offline.",
        DISTILL,
    )
    config = join_hosts(config)
    out = new_output_directory(config, goes_on=True)
    check_policy_source(config, args.checkpoint)
    args, config = with_step(args), with_commits(config, args.checkpoint)
    locks = held_by_primary(exclusive("out", out)), exclusive_files({"save_responses": args.save_responses})
    with StopSignals(console.print) as signals, locks[0], locks[1], dropping_compilations():
        long_phases = LongPhases(out / UNFINISHED, signals, options_text(config, args))
        # Without the lookup: its hits must not count as the draft's acceptance. No step is divided as one of RL is.
        config = replace(config, draft=replace(config.draft, lookup=LookupConfig()))
        config = replace(config, microbatches=1, updates=UpdateConfig(), selection=SelectionConfig())
        with long_phases:
            experiment = build_experiment(config)
            distill_offline(experiment, starting_params(experiment, args), args, out, console)
        long_phases.remove()
    return 0


def starting_params(experiment: Experiment, args: DistillArgs) -> Params:
    """Return the recipe's networks, or those of `args.checkpoint`: the policy alone, or with `start` both networks."""
    params = experiment.networks.params
    if args.checkpoint is None:
        return params
    if args.start == "checkpoint":
        return restore_params(Path(args.checkpoint), experiment, args.checkpoint_step)
    return replace(params, policy=restore_policy(Path(args.checkpoint), experiment, args.checkpoint_step))


if __name__ == "__main__":
    raise SystemExit(run_program(main))
