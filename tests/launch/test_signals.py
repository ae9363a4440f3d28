"""Runs that are stopped by a signal or killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from launch.cli.options import parse_run
from launch.phases.signals import SIGNALS, StopSignals
from launch.setup.experiment import build_experiment
from models.checkpoints.draft import load_draft_checkpoint
from specjax.checkpoint_integrity import check_manifest
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.launch.programs import LEAST, Options, argv, assert_same_run, finish, leave_run, metrics, saves, start


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_only_recorded(number: signal.Signals):
    said, handlers = [], [signal.getsignal(number) for number in SIGNALS]
    with StopSignals(said.append) as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.001)
    assert signals.received == number
    (line,) = said
    assert number.name in line
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


BUSY = """
import hashlib
from launch.phases.signals import StopSignals, owning_process
with owning_process(), StopSignals(lambda said: print(said, flush=True)):
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # in which Python handles no signal
"""


def test_the_second_signal_ends_even_what_python_cannot_interrupt():
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("SIGINT: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_a_second_signal_ends_a_program_whose_reader_is_gone():
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.stdout.close()
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_row_107_two_interrupts_at_once_raise_in_a_callers_process():
    said = list[str]()
    with pytest.raises(KeyboardInterrupt), StopSignals(said.append) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(20)
    assert signals.received == signal.SIGINT and said[0].endswith("a second one raises KeyboardInterrupt")


def test_row_107_an_interrupt_beside_the_own_signal_raises_once(monkeypatch: pytest.MonkeyPatch):
    kill, before_own, raised = signal.pthread_kill, threading.Event(), threading.Event()

    def wait_and_kill(thread: int, number: int) -> None:
        before_own.set()
        raised.wait(20)
        kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", wait_and_kill)
    with StopSignals(print):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            before_own.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
        raised.set()


def test_row_107_an_interrupted_fetch_raises_in_a_callers_process():
    with pytest.raises(KeyboardInterrupt), StopSignals(print, ending="stopped"):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(20)


def test_row_85_a_thread_runs_without_handlers():
    entered = list[object]()

    def run() -> None:
        with StopSignals(print) as signals:
            entered.append(signals.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [None]


def train(run: Path, options: Options, *flags: str) -> "subprocess.Popen[str]":
    return start("tiny", LEAST | {"--out": str(run)} | options, "--speedup.steps", "0", *flags)


def wait_for_phase(process: "subprocess.Popen[str]", *phases: str) -> None:
    """Wait until the program prints that it is in one of these phases, or has ended."""
    while (line := process.stdout.readline()) and not line.startswith(phases):
        pass


def end(process: "subprocess.Popen[str]", asked: bool) -> str:
    """Send SIGTERM if `asked`, otherwise kill the process with its children. Return what it printed."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate() if asked else os.killpg(process.pid, signal.SIGKILL)
    return "".join(process.communicate(timeout=120))


# Answers on the host, so that some kills come between the turns of a rollout. A lookup in other rows would propose by
# how far they are, which depends on the delays of answers.
IN_TURNS = {
    **{"--draft.lookup.kind": "ngram"},
    **{"--environment.function": "tests.launch.sample_environments:Seeded", "--environment.answer-tokens": "4"},
    **{"--rollout.turns": "3", "--environment.call-limit-s": "600"},
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_kills_lose_nothing_that_was_saved(tmp_path: Path):
    """It is killed before its first save, at the start, during steps and saves. Sometimes it is only asked to stop."""
    run, whole, chance = tmp_path / "run", tmp_path / "whole", random.Random(0)
    newest, starting_s = 0, 5.0
    for turn in range(24):
        begun = time.monotonic()
        again = ["--resume"] if (run / "config.json").exists() else []
        process = train(run, IN_TURNS | {"--steps": "100000", "--checkpoint.every": "1"}, *again)
        asked = turn % 6 == 5
        try:
            if turn < 2:
                # The first step may have left a line in the log, or an incomplete save.
                while not (run / ("checkpoints" if turn else "config.json")).exists() and process.poll() is None:
                    time.sleep(0.001)
            elif newest and turn % 6 in (2, 4):
                time.sleep(chance.uniform(0, 1.5 * starting_s))
            else:
                while (saves(run) or [0])[-1] <= newest and process.poll() is None:
                    time.sleep(0.001)
                starting_s = time.monotonic() - begun
                time.sleep(chance.uniform(0, 1))
            assert process.poll() is None, process.communicate()
        finally:
            said = end(process, asked)
        found = saves(run)
        assert turn < 2 or (found and found[-1] >= newest)
        newest = (found or [0])[-1]
        if newest:
            check_manifest(run / "checkpoints" / str(newest))
        if asked:
            assert process.returncode == 128 + signal.SIGTERM
            assert f"stopped after step {newest}; --resume" in said
            assert [line["step"] for line in metrics(run)] == list(range(1, newest + 1))
        else:
            assert process.returncode == -signal.SIGKILL
    steps = IN_TURNS | {"--steps": str(newest + 2)}
    assert f"resumed after step {newest}\n" in finish(train(run, steps, "--resume"))
    assert not list((run / "checkpoints").glob("*damaged*"))
    finish(train(whole, steps))
    lines = metrics(whole)
    assert max(line["rollout/turns"] or 0 for line in lines) > 1 and not any(line["rollout/failed"] for line in lines)
    # Rows that wait for answers decode in other rounds.
    assert_same_run(run, whole, newest + 2, timed=("rollout/rounds",))


BEFORE_RL = LEAST | {
    **{"--warmup.steps": "3000", "--warmup.batch-size": "4", "--rollout.max-new-tokens": "24", "--steps": "2"},
    **{"--distill.steps": "3000", "--distill.answers": "512", "--distill.chunks": "2", "--distill.batch-size": "8"},
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_row_14_kills_in_warm_up_and_distillation_change_no_bit(tmp_path: Path):
    """Every second process is only asked to stop, so that the next one starts later."""
    run, whole, chance = tmp_path / "run", tmp_path / "whole", random.Random(0)
    finish(train(whole, BEFORE_RL))
    stopped, phases = 0, ("warm-up", "answers", "distillation")
    for turn, first in enumerate([0, 0, 1, 2, 2, 2] * 2):
        process = train(run, BEFORE_RL, *(["--resume"] if (run / "config.json").exists() else []))
        wait_for_phase(process, *phases[first:])
        time.sleep(chance.uniform(0, 2))
        if saves(run) or process.poll() is not None:
            end(process, asked=False)
            break
        stopped += "stopped after" in end(process, asked=turn % 2 == 1)
    assert turn >= 4 and stopped >= 2
    finish(train(run, BEFORE_RL, "--resume"))
    assert_same_run(run, whole, 2)


DISTILLED = LEAST | {
    **{"--distill.steps": "1000", "--distill.answers": "256", "--distill.chunks": "2", "--distill.batch-size": "8"},
    **{"--rollout.max-new-tokens": "24"},
}
DISTIL = DISTILLED | {"--temperatures": "0"}
COMPARE = DISTILLED | {"--draft-lengths": "2", "--steps": "20"}
# Costs with which drafting always pays, so that the choice does not depend on the machine.
CELLS = [{"slots": 8, "window": 30, "draft_length": k, "seconds": 1.0 - k / 4} for k in (0, 2)]
TIMED = ("_s", "_low", "_high", "seconds", "steps", "summed", "speedup", "amdahl", "bound", "command")


def untimed(found: Any) -> Any:
    """Return results without times. Lists of seconds are replaced by their lengths."""
    if isinstance(found, dict):
        kept = {name: value for name, value in found.items() if not name.endswith(TIMED)}
        return {name: len(value) if name in ("turns", "by_length") else untimed(value) for name, value in kept.items()}
    return [untimed(each) for each in found] if isinstance(found, list) else found


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("program", ["launch.distill", "launch.compare"])
def test_row_14_kills_change_no_result_of_other_programs(program: str, tmp_path: Path):
    """Each phase gets one SIGKILL and one SIGTERM at random moments. Only the last phase ends between them."""
    distils, chance = program == "launch.distill", random.Random(0)
    (tmp_path / "costs.json").write_text(json.dumps({"cells": CELLS}))
    leave_run(tmp_path / "run", build_experiment(parse_run(argv("tiny", DISTILLED), "", "")))

    def begin(name: str) -> "subprocess.Popen[str]":
        options = DISTIL | {"--checkpoint": str(tmp_path / "run"), "--out": str(tmp_path / name)}
        if not distils:
            files = {"--json": str(tmp_path / name), "--cost-table": str(tmp_path / "costs.json")}
            options = COMPARE | files
        return start("tiny", options, program=program)

    finish(begin("whole"))
    phases = ["answers", "distillation", "timed steps"]
    work = tmp_path / "parts.unfinished"
    if distils:
        phases, work = [*phases[:2], "acceptance"], tmp_path / "parts/unfinished"
    stopped = killed = 0
    for turn, phase in enumerate(phase for phase in phases for _ in range(2)):
        process = begin("parts")
        wait_for_phase(process, *phases[phases.index(phase) :])
        time.sleep(chance.uniform(0, 1))
        asked, running = turn % 2 == 1, process.poll() is None
        said = end(process, asked)
        assert process.returncode in (0, 128 + signal.SIGTERM) or not (asked and running), said
        stopped += "the same command goes on from there" in said
        killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert stopped >= 2 and killed >= 2
    if process.returncode:
        finish(begin("parts"))
    assert not work.exists()
    whole, parts = (tmp_path / name / "distill.json" if distils else tmp_path / name for name in ("whole", "parts"))
    assert untimed(json.loads(parts.read_text())) == untimed(json.loads(whole.read_text()))
    if distils:
        mesh = make_mesh(MeshConfig())
        drafts = [load_draft_checkpoint(tmp_path / name / "draft", mesh).params for name in ("whole", "parts")]
        jax.tree.map(np.testing.assert_array_equal, *drafts)
