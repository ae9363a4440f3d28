"""The supervisor restarts a program that ended because another process of its job died, and no other program."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch import supervise
from launch.cli.paths import CONFIG_FILE
from launch.errors import ConfigError
from launch.jobs.supervision import Supervisor
from tests.refusals import refuses

# A program that ends with JAX's log of another process's death. STARTS counts the starts.
SCRIPT = """
import os, pathlib, sys
starts = pathlib.Path(sys.argv[1]) / "starts"
with starts.open("a") as file:
    print(*sys.argv[2:], file=file)
print("hosts: none yet", "hosts: 0 = anna, 1 = berta", sep=chr(10), file=sys.stderr)
print("kept", file=sys.stderr, flush=True)
if len(starts.read_text().splitlines()) <= {deaths}:
    {death}
"""
LOGGED = (
    "F0000 00:00:00.000000    1 client.h:77] Terminating process because the JAX distributed service detected fatal "
    "errors. UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed"
)
LOGGED_OF_0 = (
    "F0000 00:00:00.000000    1 client.h:80] Terminating process because the JAX distributed service detected fatal "
    "errors. absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task .."
)
LOSS_OF_0 = f"print({LOGGED_OF_0!r}, file=sys.stderr, flush=True); os.abort()"
LOSS = f"print({LOGGED!r}, 'trace', sep=chr(10), file=sys.stderr, flush=True); os.abort()"
RAISED = "print('error: lost a process of the job: ..', file=sys.stderr, flush=True); sys.exit(134)"
KILL = "os.kill(os.getpid(), 9)"


def run(directory: Path, death: str, deaths: int, restarts: int = 2) -> tuple[int, list[str], list[str]]:
    """Return the exit code, the arguments of each start, and the supervisor's output."""
    command, said = [sys.executable, "-c", SCRIPT.format(death=death, deaths=deaths), str(directory)], list[str]()
    code = Supervisor(command, directory / "config.json", restarts, 0.0, said.append).supervise()
    return code, (directory / "starts").read_text().splitlines(), said


@pytest.mark.parametrize(
    ("death", "line"),
    [
        (LOSS, "process 1 on berta died, and JAX ended this one"),
        (LOSS_OF_0, "process 0 on anna died, and JAX ended this one"),
        (RAISED, "another process died"),
        (KILL, "SIGKILL ended the program on this host"),
    ],
)
def test_a_death_is_reported_and_resumed(
    death: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    code, starts, said = run(tmp_path, death, deaths=1)
    assert code == 0 and starts == ["--resume", "--resume"]
    assert len(said) == 1 and said[0].startswith(line) and "2 left" in said[0]
    assert capfd.readouterr().err == "hosts: none yet\nhosts: 0 = anna, 1 = berta\nkept\n" * 2


def test_it_gives_up_after_the_allowed_restarts(tmp_path: Path) -> None:
    """A run that has written nothing starts from scratch."""
    code, starts, said = run(tmp_path, LOSS, deaths=9)
    assert code == 128 + signal.SIGABRT and starts == [""] * 3
    again = [f"starting again in 0 s, {left} left" for left in (2, 1)]
    assert [line.rpartition("; ")[2] for line in said] == [*again, "ending"]


@pytest.mark.parametrize("code", [1, 2, 130, 143])
def test_a_program_that_ends_by_itself_is_not_started_again(code: int, tmp_path: Path) -> None:
    assert run(tmp_path, f"sys.exit({code})", deaths=1) == (code, [""], [])


def test_an_abort_of_the_program_itself_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault = "print('F1126 check failed: a == b', file=sys.stderr, flush=True); os.abort()"
    _, _, said = run(tmp_path, fault, deaths=1)
    assert said[0].startswith("SIGABRT ended the program on this host") and "check failed" in capfd.readouterr().err


def test_a_signal_is_passed_on_and_ends_the_restarts(tmp_path: Path) -> None:
    wait = "import time; (starts.parent / 'waits').touch(); time.sleep(60)"

    def stop() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    assert run(tmp_path, wait, deaths=1) == (128 + signal.SIGTERM, [""], [])


def test_a_signal_between_two_starts_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def signalled(*args: Any, **options: Any) -> "subprocess.Popen[str]":
        if (tmp_path / "starts").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", signalled)
    die_once_then_sleep = f"import time; {KILL} if starts.read_text() == '\\n' else time.sleep(60)"
    assert run(tmp_path, die_once_then_sleep, deaths=9)[0] == 128 + signal.SIGTERM


def test_its_command_line_names_a_program_and_the_directory_of_its_run() -> None:
    for words, program in (["--restarts", "1"], "None"), (["launch.distill", "tiny"], "launch.distill"):
        with refuses(f"PROGRAM = {program}: must be launch.train: python -m launch.supervise ...", ConfigError):
            supervise.main(words)
    with refuses("out: must be set", ConfigError):
        supervise.main(["launch.train", "tiny"])
    with refuses("hosts.heartbeat = soon: must be a whole number of seconds", ConfigError):
        supervise.main(["launch.train", "tiny", "--out", "run", "--hosts.heartbeat=soon"])


def test_a_run_that_is_resumed_need_not_be_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CONFIG_FILE).write_text("{}")
    started = list[Any]()
    monkeypatch.setattr(supervise.Supervisor, "supervise", lambda self: started.append(self._begun.parent) or 0)
    assert supervise.main(["launch.train", str(tmp_path), "--resume"]) == 0 and started == [tmp_path]
    with refuses("out: must be set", ConfigError):
        supervise.main(["launch.train", str(tmp_path)])
