"""Find out why drafts are accepted less than before: `python -m launch.diagnose CONFIG --checkpoint RUN`.

On the run's own networks and held-out prompts, it compares the caches of policy and draft with a fresh prefill, the
measured acceptance with the predicted one, by position in the draft and by place in the completion, and how the draft
is read (feature layers, rope, vocabulary map) with other ways to read it. Exit code 1 means that something is off.
"""

from launch.build.experiment import build_experiment
from launch.cli.console import console
from launch.cli.options import parse_run_and, run_program, use_compile_cache
from launch.cli.paths import check_policy_source, write_results
from launch.cli.reads import DIAGNOSE
from launch.diagnosis.diagnose import diagnose, diagnostic_run
from launch.diagnosis.findings import print_diagnosis
from launch.diagnosis.options import DiagnoseArgs
from launch.run.restore import params_of
from launch.timing import provenance


def main(argv: list[str]) -> int:
    """Check the draft, print what is off, and write the results where asked. Returns 1 if something is off."""
    use_compile_cache()
    config, own = parse_run_and(
        DiagnoseArgs,
        argv,
        "python -m launch.diagnose",
        "Find out why drafts are accepted less than before.",
        DIAGNOSE,
        allow_truncated_law=True,
    )
    check_policy_source(config, own.checkpoint)
    experiment = build_experiment(diagnostic_run(config))
    params = params_of(own.checkpoint, experiment, own.checkpoint_step)
    diagnosis = diagnose(experiment, params, own.prompts)
    print_diagnosis(diagnosis, console)
    found = provenance("launch.diagnose") | {"recipe": config.name}
    found |= {"checkpoint": own.checkpoint, "checkpoint_step": own.checkpoint_step}
    write_results(own.json, found | diagnosis.to_json())
    return 1 if diagnosis.faults else 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
