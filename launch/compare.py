"""Time steps with and without speculation, by stage: `python -m launch.compare CONFIG|RUN [--draft-lengths 0,3,5]`.

Prints the table of arXiv 2604.26779 for your own run. Each variant takes the same steps from the same state, on the
same prompts with the same seeds. With --asynchronous.lag, a second table has steps whose rollouts run ahead.
"""

from contextlib import nullcontext
from dataclasses import asdict, replace

from launch.cli.options import parse_run_and
from launch.cli.paths import write_results
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipe_options import COMPARE
from launch.comparison.asynchronous import compare_overlap, synchronous
from launch.comparison.options import CompareArgs
from launch.comparison.stage_times import VariantReport, time_variants
from launch.comparison.variants import make_variants, round_costs
from launch.console import wide_console as console
from launch.errors import ConfigError
from launch.jobs.hosts import join_hosts
from launch.phases.long_phases import long_phases_beside
from launch.phases.signals import StopSignals
from launch.rewards.reward_fn import make_pool, scoring_of
from launch.run.draft_monitor import explain_choice
from launch.run.networks import trained_networks
from launch.run.pin_references import with_commits, with_step
from launch.setup.drafts.saved_head import most_drafted
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.rollout_trace import trace_rollout
from launch.timing import format_provenance, provenance
from specjax.program import dropping_compilations


@dropping_compilations()
def main(argv: list[str]) -> int:
    """Time the variants in turns, from a run's checkpoint or the recipe's networks."""
    use_compile_cache()
    text = "Time the stages of a training step with and without speculation."
    config, args = parse_run_and(CompareArgs, argv, "python -m launch.compare", text, COMPARE, steps=20, profile_step=0)
    config = join_hosts(config)
    if not config.draft.proposes:
        raise ConfigError("draft.kind = none: there is nothing to compare with autoregressive decoding")
    args, config, files = with_step(args), with_commits(config, args.checkpoint), {"json": args.json}
    with StopSignals(console.print) as signals, long_phases_beside(files, signals, config, args):
        config = replace(config, rollout=args.rollout(config.rollout, most_drafted(config.draft)))
        compare(build_experiment(config, takes_steps=True), args)
    return 0


def compare(experiment: Experiment, args: CompareArgs) -> None:
    """Time the variants and print them. The JSON file has the results so far after every turn."""
    asynchronous, experiment = experiment, synchronous(experiment)
    config, costs = experiment.config, round_costs(experiment) if args.automatic else None
    if config.rollout.function is not None:
        trace_rollout(experiment, config.rollout, config.data.prompts, experiment.mesh)
    params = trained_networks(experiment, args.checkpoint, args.checkpoint_step, console)
    results: dict[str, object] = {**provenance("launch.compare"), "recipe": config.name}
    results |= {"checkpoint": args.checkpoint, "checkpoint_step": args.checkpoint_step}
    console.print(format_provenance("launch.compare"))
    with make_pool(config) or nullcontext() as pool:
        reward_fn = scoring_of(config.reward, pool)(experiment.problems.train, experiment.tokenizer)
        variants, drafting = make_variants(experiment, reward_fn, params, costs and costs(params))

        def keep(measured: dict[str, object]) -> None:
            results.update(measured)
            write_results(args.json, results)

        def keep_steps(reports: dict[str, VariantReport]) -> None:
            keep({"verifier": config.rollout.verifier, "arms": {x: asdict(y) for x, y in reports.items()}})

        reports = time_variants(variants, config, config.steps, console, keep_steps)
        if drafting is not None:
            console.print(f"automatic:\n{explain_choice(experiment.phases, config.rollout.lengths, drafting)}")
        compare_overlap(asynchronous, variants, reports, console, keep)


if __name__ == "__main__":
    raise SystemExit(run_program(main))
