"""Initialise a draft in-domain, offline: `python -m launch.distill CONFIG --out DIR [--section.field VALUE ...]`.

The policy answers the training prompts, a draft learns from that, is measured on the held-out prompts, and is saved:

    DIR/draft/        the draft, which --draft.path of the other programs reads
    DIR/policy/       instead of that the policy with an MTP head stitched in, which --model.path reads
    DIR/DIALECT/      with --dialect, an EAGLE-3 head once more as SpecForge or speculators lay it out
    DIR/distill.json  what it cost, what of it is accepted, and after how many steps it has paid for itself
"""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from configs.schema.networks import LookupConfig
from launch.build.experiment import Experiment, build_experiment
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source, new_output_directory
from launch.cli.reads import DISTILL
from launch.distillation.offline import distill_offline
from launch.distillation.options import DistillArgs
from launch.run.directory import restore_params, restore_policy
from specjax.types import Params

console = Console(highlight=False, soft_wrap=True, markup=False)


def main(argv: list[str]) -> int:
    """Distil, save and measure a draft, and print how that went."""
    use_compile_cache()
    config, own = parse_run_and(
        DistillArgs,
        argv,
        "python -m launch.distill",
        "Initialise a draft from the policy's own answers, offline.",
        DISTILL,
    )
    out = new_output_directory(config)
    check_policy_source(config, own.checkpoint)
    # What a lookup beside the draft finds is no merit of the draft.
    experiment = build_experiment(replace(config, draft=replace(config.draft, lookup=LookupConfig())))
    distill_offline(experiment, starting_params(experiment, own), own, out, console)
    return 0


def starting_params(experiment: Experiment, own: DistillArgs) -> Params:
    """Return the recipe's networks, with the policy or all of it from the run that `own` names."""
    params = experiment.networks.params
    if own.checkpoint is None:
        return params
    if own.start == "checkpoint":
        return restore_params(Path(own.checkpoint), experiment, own.checkpoint_step)
    return replace(params, policy=restore_policy(Path(own.checkpoint), experiment, own.checkpoint_step))


if __name__ == "__main__":
    raise SystemExit(run_program(main))
