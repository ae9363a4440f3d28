"""The command `specjax PROGRAM ..`: starts a program of this package, as `python -m launch.PROGRAM ..` does.

It is installed with the packages. In a checkout, `python -m launch PROGRAM ..` is the same.
"""

import difflib
import importlib
import os
import sys

PROGRAMS = {
    "train": "train a policy and its draft",
    "supervise": "train on one of many hosts, and again when a host dies",
    "distill": "train a draft on the policy's own answers, before RL",
    "compare": "time whole steps with and without drafting",
    "plan": "compile a step for GPUs that are not there: memory, collectives, seconds",
    "evaluate": "measure accuracy, pass@k and majority@k",
    "generate": "answer a prompt",
    "diagnose": "find out why drafts are accepted less",
    "export": "write what a run has trained, for Hugging Face, vLLM and SGLang",
    "convert": "convert drafts between public dialects and our layout",
    "report": "write the report of a run again",
}
COMMAND = "python -m launch" if __name__ == "__main__" else "specjax"


def main() -> int:
    """Start the program that the command line names. Return its exit code: 2 if there is none of that name."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = (f"  {program:<11}{does}" for program, does in PROGRAMS.items())
        print(f"usage: {COMMAND} PROGRAM ..", "", *lines, "", f"options: {COMMAND} PROGRAM --help", sep="\n")
        return 0
    if name not in PROGRAMS:
        meant = "".join(f"did you mean {close}?; " for close in difflib.get_close_matches(name, PROGRAMS, n=1))
        print(f"error: PROGRAM = {name}: {meant}must be one of {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    # Usage lines begin with it.
    sys.argv = [f"{COMMAND} {name}", *arguments]
    # Options may name modules of the working directory. A folder there that is called models does not hide ours.
    sys.path.append(os.getcwd())
    # Programs import jax, which takes seconds.
    from launch.cli.program import run_program

    module = importlib.import_module(f"launch.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"launch.{name}.__main__")
    return run_program(module.main)


if __name__ == "__main__":
    raise SystemExit(main())
