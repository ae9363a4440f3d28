"""A step with and without speculation, stage by stage: `python -m launch.compare CONFIG [--draft-lengths 0,3,5,7]`.

The table of arXiv 2604.26779 for a run of one's own: each variant takes the same steps, on the same prompts with the
same seeds, from the same state.
"""

from contextlib import nullcontext
from dataclasses import asdict, replace

from rich.console import Console

from launch.build.experiment import build_experiment
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import make_directory, write_results
from launch.cli.pyplot import load_pyplot
from launch.cli.reads import COMPARE
from launch.comparison.options import CompareArgs
from launch.comparison.reward_curves import compare_training
from launch.comparison.stage_times import print_first_differences, print_stage_times, time_variants
from launch.comparison.variants import make_variants, round_costs
from launch.rewards.reward_fn import make_pool, make_reward
from launch.run.console import explain_choice
from launch.run.trained_networks import trained_networks
from launch.timing import format_provenance, provenance

# Of the table, which a narrower terminal wraps.
console = Console(highlight=False, soft_wrap=True, markup=False, width=170)


def main(argv: list[str]) -> int:
    """Time the variants in turns, from the networks that a run begins or ended with, and train two if asked for."""
    use_compile_cache()
    description = "The stages of a step with and without speculation."
    config, own = parse_run_and(
        CompareArgs, argv, "python -m launch.compare", description, COMPARE, steps=20, profile_step=0
    )
    if not config.draft.proposes:
        raise ConfigError("draft.kind = none: there is nothing to compare with autoregressive decoding")
    if own.plots is not None:
        load_pyplot()
        make_directory("plots", own.plots)
    experiment = build_experiment(replace(config, rollout=replace(config.rollout, draft_lengths=own.lengths)))
    costs = round_costs(experiment)
    params = trained_networks(experiment, own.checkpoint, own.checkpoint_step, console)
    found = provenance("launch.compare") | {"recipe": config.name, "verifier": config.rollout.verifier}
    found |= {"checkpoint": own.checkpoint, "checkpoint_step": own.checkpoint_step}
    pool = make_pool(config.reward)
    with pool or nullcontext():
        console.print(format_provenance("launch.compare"))
        reward_fn = make_reward(pool, experiment.problems.train, experiment.tokenizer, experiment.mesh)
        variants, drafting = make_variants(experiment, reward_fn, params, costs(params))
        reports = time_variants(variants, own.lengths, config.steps)
        print_stage_times(reports, console)
        console.print(f"automatic:\n{explain_choice(experiment.phases, own.lengths, drafting)}")
        print_first_differences(reports, console)
        found |= {"arms": {name: asdict(report) for name, report in reports.items()}}
        if own.train_steps:
            found |= {"training": compare_training(experiment, variants, own.train_steps, own.plots, console)}
    write_results(own.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
