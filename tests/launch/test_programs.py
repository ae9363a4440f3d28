"""The programs as a user runs them, with tiny networks and problems."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import launch.generate
import launch.train
from launch.costs.cost_table import read_cells
from launch.run.metric_log import STANDARD_METRICS
from specjax import ProbeStep, Prompts, TrainState
from specjax.train.train_step import StepResult
from tests.compiled import compilations, compiled_late
from tests.launch.checkpoints import write_problems
from tests.launch.processes import children, gone
from tests.launch.programs import FEW, Options, argv, assert_same_run, fake_wandb, flags, metrics, saves, start

Killed = tuple[Path, int, list[int]]
HERE = Path(__file__).parent
# Metrics that only probes measure.
STAGES = {f"time/{stage}" for stage in ("prepare", "generation", "reward", "logprob", "train")}
STAGES |= {"perf/generation_tokens_per_s", "perf/speedup_vs_autoregressive"}


def missing(line: dict[str, float | None]) -> set[str]:
    return {name for name, value in line.items() if value is None}


def wait_for(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not done() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def killed(files: Path, shrunk: Options) -> Killed:
    """Return a run killed by SIGKILL after a save, its newest save, and the processes that it had started."""
    pytest.importorskip("math_verify")
    run = files / "killed"
    process = start("gsm8k", shrunk | {"--out": str(run), "--steps": "1000", "--checkpoint.every": "1"})
    try:
        wait_for(lambda: bool(saves(run)), process)
        started = children(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return run, saves(run)[-1], started


@pytest.fixture(scope="module")
def stopped(killed: Killed, shrunk: Options) -> str:
    """Resume the killed run, tell it to stop two steps later, and return its output. It saves only at the stop."""
    run, save, _ = killed
    out = {"--out": str(run), "--steps": "1000", "--checkpoint.every": "1000"}
    process = start("gsm8k", shrunk | out, "--resume")
    try:
        wait_for(lambda: (run / "metrics.jsonl").read_text().count("\n") == save + 2, process)
        process.terminate()
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors
    return said


@pytest.fixture(scope="module")
def steps(killed: Killed, stopped: str) -> int:
    """Return the step of the newest checkpoint, which was written at the stop."""
    return saves(killed[0])[-1]


@pytest.fixture(scope="module")
def finished(files: Path, shrunk: Options, steps: int) -> Path:
    """Return the same run without interruption, by this process."""
    run, said = files / "finished", io.StringIO()
    options = {"--out": str(run), "--steps": str(steps), "--profile-step": str(steps)}
    with contextlib.redirect_stdout(said):
        assert launch.train.main(argv("gsm8k", shrunk | options)) == 0
    assert f"run directory: {run}\n" in said.getvalue() and f"report: {run / 'report.html'}\n" in said.getvalue()
    return run


def test_a_run_writes_all_its_files(finished: Path, files: Path, steps: int):
    lines = metrics(finished)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    names = ("step", *STANDARD_METRICS, *(f"rollout/acceptance_rate_pos_{i}" for i in (1, 2)))
    for line in lines:
        assert tuple(line) == names
        assert missing(line) == STAGES | {
            "eval/accuracy",
            "eval/truncated",
            "kl/reference",
            "time/draft_training",
            "memory/peak_gib",
        }
        assert line["reward/failed"] == 0
    # There were correct and wrong answers, so the policy learnt.
    assert any(0 < (line["reward/mean"] or 0) < 1 for line in lines)
    assert any(line["grad_norm/policy"] for line in lines)
    config = json.loads((finished / "config.json").read_text())
    assert (config["name"], config["steps"], config["model"]["path"]) == ("gsm8k", steps, str(files / "policy"))
    assert config["reward"]["scorer"] == "math"
    assert saves(finished) == [steps]
    assert list(finished.glob("events.out.tfevents.*"))
    assert list(finished.glob("profile/**/*.xplane.pb"))
    assert "Acceptance by position" in (finished / "report.html").read_text()
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples][:: len(samples) - 1] == [1, steps]
    assert all(len(sample["lengths"]) == 16 and len(sample["completions"]) == 4 for sample in samples)


def test_a_killed_resumed_and_stopped_run_equals_an_unbroken_one(
    killed: Killed, stopped: str, finished: Path, steps: int
):
    run, save, started = killed
    assert f"resumed after step {save}\n" in stopped
    last = stopped[stopped.index(f"\nstopped after step {steps}; --resume continues it\n") :]
    assert "\ntime of the run: " in last and "\nreport: " in last
    assert steps >= save + 2
    assert len(metrics(run)) == steps
    assert_same_run(run, finished, steps)
    # No process is left.
    assert started and gone(started)


def test_samples_that_cannot_be_scored_cost_nothing_else(
    files: Path, shrunk: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(HERE)
    write_problems(tmp_path / "train.jsonl", ["value 1", "raise an error", "hang", "value nan", "value 0.25"])
    options = flags(
        f"--data.train {tmp_path}/train.jsonl --out {tmp_path}/run --reward.scorer sample_scorers:by_answer",
        "--reward.also format --reward.format .* --reward.weights 1 2 --reward.workers 2 --reward.time-limit-s 1",
        "--data.prompts 5 --rollout.group-size 2 --steps 2 --checkpoint.every 0",
    )
    assert launch.train.main(argv("gsm8k", shrunk | options)) == 0
    assert capsys.readouterr().out.count("6 not scored") == 2
    # Every step samples all five problems twice.
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2
    expected = {"failed": 6, "mean": 2.625, "std": 0.375, "accuracy": 0.5, "format": 1}
    expected |= {"sample_scorers.by_answer": 0.625}
    for line in lines:
        assert {name: line[f"reward/{name}"] for name in expected} == expected
        assert math.isfinite(line["loss/draft"] or math.nan)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children(os.getpid())]
    assert not any("sample_scorers:by_answer" in command for command in commands)


def test_generate_answers_from_a_finished_run(
    finished: Path, shrunk: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    own = {"--checkpoint": str(finished), "--samples": "2", "--data.train": "not-needed.jsonl"}
    assert launch.generate.main([*argv("gsm8k", shrunk | own), "--prompt", "1 and 2 ?"]) == 0
    *answers, summary = capsys.readouterr().out.removesuffix("\n").split("\n\n")
    assert [answer[:4] for answer in answers] == ["[1] ", "[2] "]
    assert set(" ".join(answer[4:] for answer in answers).split()) <= {"and", "?", "1", "2", "3"}
    assert "tokens/s" in summary


@pytest.mark.slow
def test_costs_are_measured_at_start_and_probes(shrunk: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("math_verify")
    options = shrunk | flags(f"--out {tmp_path}/run --steps 1 --probe-every 1 --rollout.draft-lengths 0 2") | DISTILLING
    assert launch.train.main(argv("gsm8k", options)) == 0
    assert "predicted speed by draft length 0: 1.00, 2: " in capsys.readouterr().out
    kept = tmp_path / "run" / "cost_table.json"
    cells, model = read_cells(kept), json.loads(kept.read_text())["model"]
    # A quarter of the phase's slots is timed too: otherwise the model's constants are not determined.
    wanted = {(slots, k, step) for slots in (16, 4) for k in (0, 2) for step in (0, 1)}
    assert {(cell.slots, cell.draft_length, cell.step) for cell in cells} == wanted
    assert min(model.values()) >= 0


TINY = FEW | flags(
    "--draft.unroll 1 --rollout.group-size 2 --rollout.draft-length 1 --steps 4 --checkpoint.every 3",
    "--eval.every 3 --eval.prompts 8 --probe-every 4 --speedup.steps 1",
)
DISTILLING = flags("--distill.steps 2 --distill.answers 16 --distill.batch-size 8")


@pytest.mark.parametrize("more", [{}, pytest.param(DISTILLING, marks=pytest.mark.slow)], ids=["plain", "distilling"])
def test_tiny_from_warm_up_to_the_closing_comparison(
    more: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    staged = []

    class Counted(ProbeStep):
        def rehearse(self, state: TrainState, prompts: Prompts) -> StepResult:
            staged.append("rehearsal")
            return super().rehearse(state, prompts)

        def __call__(self, state: TrainState, prompts: Prompts) -> StepResult:
            staged.append("probe")
            return super().__call__(state, prompts)

    monkeypatch.setattr("launch.run.start.ProbeStep", Counted)
    to_wandb = fake_wandb(monkeypatch)
    options = TINY | more | {"--out": str(tmp_path / "run"), "--log.wandb-project": "sums"}
    with compilations() as heard:
        assert launch.train.main(argv("tiny", options)) == 0
    # All were started before they were called, and for the arguments that they were called with.
    assert not compiled_late(heard) & {
        "train_step",
        "generate",
        "_select",
        "logprob",
        "_train",
        *(["run"] if more else []),
    }
    said = capsys.readouterr().out
    assert re.search(r"  generation: [\d.]+x the speed of draft length 0 in one probe\n", said)
    for part in ("warm-up: 2 of 2 steps", "compiled", "accuracy", "autoregressive", "by Amdahl", "time of the run: "):
        assert part in said
    assert ("distillation: 2 of 2 steps" in said) == bool(more)
    lines = metrics(tmp_path / "run")
    names = ("step", *STANDARD_METRICS, "rollout/acceptance_rate_pos_1")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {name for name, value in first.items() if value is not None} == {"step", "eval/accuracy", "eval/truncated"}
    assert f"held-out accuracy before the first step: {first['eval/accuracy']:.1%}" in said
    for number, line in enumerate(lines, start=1):
        unmeasured = {"kl/reference", "time/draft_training", "memory/peak_gib"} | (STAGES if number != 4 else set())
        unmeasured |= {"eval/accuracy", "eval/truncated"} if number != 3 else set()
        assert tuple(line) == names and missing(line) == unmeasured
        assert line["rollout/draft_length"] == 1
    assert saves(tmp_path / "run") == [3, 4]
    assert staged == ["rehearsal", "probe"]
    assert [call[0] for call in to_wandb[1:-1]] == [0, 1, 2, 3, 4] and to_wandb[-1] == "finish"


@pytest.mark.slow
def test_warm_up_and_distillation_survive_a_kill_in_the_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A run that is killed in its first steps keeps its warm-up and its distilled draft."""
    run = tmp_path / "run"
    options = TINY | DISTILLING | {"--out": str(run), "--steps": "1"}
    assert launch.train.main(argv("tiny", options)) == 0
    assert saves(run) == [0, 1]
    shutil.copytree(run, tmp_path / "unbroken")
    shutil.rmtree(run / "checkpoints" / "1")
    (run / "metrics.jsonl").write_text("")
    capsys.readouterr()
    assert launch.train.main([*argv("tiny", options), "--resume"]) == 0
    said = capsys.readouterr().out
    assert "resumed after step 0\n" in said and "warm-up:" not in said and "distillation:" not in said
    assert_same_run(run, tmp_path / "unbroken", 1)


@pytest.mark.slow
def test_tiny_learns_and_speculation_pays(tmp_path: Path):
    """The default job, unchanged: it learns, its draft is accepted, and its comparison shows a speed-up."""
    command = [sys.executable, "-m", "launch.train", "tiny", "--out", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    before, after = map(float, re.search(r"accuracy: (\S+)% before RL, (\S+)% after", result.stdout).groups())  # pyright: ignore[reportOptionalMemberAccess]
    assert after - before >= 10
    assert sum(step["rollout/acceptance_length"] for step in metrics(tmp_path / "run")[-5:]) / 5 >= 3.5
    events = [json.loads(line) for line in (tmp_path / "run" / "diary.jsonl").read_text().splitlines()]
    result = events[-1]["result"]
    # Their size depends on the machine's caches and arithmetic (benchmarks/results/tiny_cpu.txt).
    assert result["generation_speedup"] > 1.1 and result["step_speedup"] > 0.9
