"""Find out why drafts are accepted less than before: `python -m launch.diagnose RUN`.

It uses the run's own networks and held-out prompts, and compares
- the caches of policy and draft with a fresh prefill,
- measured with predicted acceptance, by position in the draft and by place in the completion,
- the way in which the draft is read (feature layers, rope, vocabulary map) with other ways.
Exit code 3 means that something is off.
"""

from pathlib import Path

from launch.cli.options import parse_run_and
from launch.cli.paths import CONFIG_FILE, check_policy_source, write_results
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipe_options import DIAGNOSE, SAME_AS_RUN, reads
from launch.console import wide_console as console
from launch.diagnosis.diagnose import diagnose, diagnostic_run
from launch.diagnosis.options import DiagnoseArgs
from launch.diagnosis.summary import CHANGEABLE, print_diagnosis, print_setting
from launch.jobs.hosts import join_hosts
from launch.run.networks import params_of, saved_step
from launch.run.pin_references import with_commits
from launch.run.records import as_recorded, check_same, differences, read_recorded
from launch.setup.experiment import build_experiment
from launch.timing import provenance

FOUND = 3


def main(argv: list[str]) -> int:
    """Check the draft, print the findings, and write them to `--json`. Return 3 if something is off, else 0."""
    use_compile_cache()
    config, args = parse_run_and(
        DiagnoseArgs,
        argv,
        "python -m launch.diagnose",
        "Find out why drafts are accepted less than before.",
        DIAGNOSE,
        allow_truncated_law=True,
    )
    config = join_hosts(config)
    check_policy_source(config, args.checkpoint)
    config = with_commits(config, args.checkpoint)
    diagnosed, recorded, step = diagnostic_run(config), as_recorded(config), None
    if args.checkpoint is not None:
        recorded = read_recorded(Path(args.checkpoint) / CONFIG_FILE, "checkpoint")
        check_same(config, recorded, SAME_AS_RUN)
        step = saved_step(Path(args.checkpoint), args.checkpoint_step)
    experiment = build_experiment(diagnosed)
    params = params_of(args.checkpoint, experiment, args.checkpoint_step)
    differing = differences(experiment.config if args.checkpoint else diagnosed, recorded)
    changed = [each for each in differing if reads(CHANGEABLE, each[0])]
    print_setting(experiment, args.checkpoint, step, args.prompts, changed, console)
    diagnosis = diagnose(experiment, params, args.prompts)
    print_diagnosis(diagnosis, console)
    found = provenance("launch.diagnose") | {"recipe": config.name, "checkpoint": args.checkpoint}
    found |= {"checkpoint_step": step, "changed": changed}
    write_results(args.json, found | diagnosis.to_json())
    return FOUND if diagnosis.faults else 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
