"""Find out why drafts are accepted less than before: `python -m launch.diagnose CONFIG --checkpoint RUN`.

On the run's own networks and held-out prompts, it compares the caches of policy and draft with a fresh prefill, the
measured acceptance with the predicted one, by position in the draft and by place in the completion, and how the draft
is read (feature layers, rope, vocabulary map) with other ways to read it. Exit code 3 means that something is off.
"""

from pathlib import Path

from launch.build.experiment import build_experiment
from launch.cli.console import console
from launch.cli.hosts import join_hosts
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source, write_results
from launch.cli.reads import DIAGNOSE, SAME_AS_RUN, reads
from launch.diagnosis.diagnose import diagnose, diagnostic_run
from launch.diagnosis.options import DiagnoseArgs
from launch.diagnosis.summary import CHANGEABLE, print_diagnosis, print_setting
from launch.run.directory import CONFIG_FILE
from launch.run.pinned import with_commits
from launch.run.recorded import as_recorded, check_same, differences, read_recorded
from launch.run.restore import params_of, saved_step
from launch.timing import provenance

FOUND = 3


def main(argv: list[str]) -> int:
    """Check the draft, print what is off, and write the results where asked. Returns 3 if something is off."""
    use_compile_cache()
    config, own = parse_run_and(
        DiagnoseArgs,
        argv,
        "python -m launch.diagnose",
        "Find out why drafts are accepted less than before.",
        DIAGNOSE,
        allow_truncated_law=True,
    )
    config = join_hosts(config)
    check_policy_source(config, own.checkpoint)
    config = with_commits(config, own.checkpoint)
    diagnosed, recorded, step = diagnostic_run(config), as_recorded(config), None
    if own.checkpoint is not None:
        recorded = read_recorded(Path(own.checkpoint) / CONFIG_FILE, "checkpoint")
        check_same(config, recorded, SAME_AS_RUN)
        step = saved_step(Path(own.checkpoint), own.checkpoint_step)
    experiment = build_experiment(diagnosed)
    params = params_of(own.checkpoint, experiment, own.checkpoint_step)
    differing = differences(experiment.config if own.checkpoint else diagnosed, recorded)
    changed = [each for each in differing if reads(CHANGEABLE, each[0])]
    print_setting(experiment, own.checkpoint, step, own.prompts, changed, console)
    diagnosis = diagnose(experiment, params, own.prompts)
    print_diagnosis(diagnosis, console)
    found = provenance("launch.diagnose") | {"recipe": config.name, "checkpoint": own.checkpoint}
    found |= {"checkpoint_step": step, "changed": changed}
    write_results(own.json, found | diagnosis.to_json())
    return FOUND if diagnosis.faults else 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
