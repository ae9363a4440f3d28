"""Start a run again when a host of its job dies: `python -m launch.supervise [--restarts N] launch.train CONFIG ..`.

Start it on every host in place of the program. It prints one line that names the dead host, and starts the program
again with `--resume`. Bad input, a signal, and a run that ends by itself are not started again.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.schema import HostsConfig
from launch.cli.options import parse
from launch.cli.paths import CONFIG_FILE
from launch.cli.program import run_program
from launch.cli.recipes import is_run
from launch.errors import ConfigError
from launch.jobs.supervision import Supervisor
from specjax.options import NonNegative, Options

MARGIN_S = 5.0


@dataclass(frozen=True)
class SuperviseArgs(Options):
    """Start a run again when a host of its job dies.

    Attributes:
        restarts: Number of restarts.
    """

    restarts: NonNegative = 3


def main(argv: list[str]) -> int:
    """Supervise the program and return its exit code."""
    first = next((i for i, word in enumerate(argv) if word == "train" or word.startswith("launch.")), len(argv))
    usage = "python -m launch.supervise [--restarts N] launch.train CONFIG --out DIR [--option VALUE ..]"
    args = parse(SuperviseArgs, argv[:first], "python -m launch.supervise", f"{__doc__}\n\n{usage}")
    command = argv[first:]
    if command[:1] == ["train"]:  # as in `specjax supervise train`
        command[0] = "launch.train"
    if command[:1] != ["launch.train"]:
        raise ConfigError(f"PROGRAM = {command[0] if command else None}: must be launch.train: {usage}")
    out = _option(command, "--out")
    if out is None and "--resume" in command and is_run(command[1]):
        out = command[1]
    if out is None:
        raise ConfigError("out: must be set, so that a restart finds the run")
    heartbeat = _option(command, "--hosts.heartbeat") or str(HostsConfig.heartbeat)
    if not heartbeat.isdecimal():
        raise ConfigError(f"hosts.heartbeat = {heartbeat}: must be a whole number of seconds")
    # A process that starts before the others have ended would connect to the job that is ending.
    pause_s = int(heartbeat) + MARGIN_S
    say = partial(print, file=sys.stderr, flush=True)
    return Supervisor([sys.executable, "-m", *command], Path(out, CONFIG_FILE), args.restarts, pause_s, say).supervise()


def _option(command: list[str], name: str) -> str | None:
    """Return the value of an option in a command line, or None."""
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word == name or word.startswith(f"{name}="):
            return word.partition("=")[2] or after
    return None


if __name__ == "__main__":
    raise SystemExit(run_program(main))
