"""Rows 14 and 27: long phases stop at a signal, continue bit for bit in another process, and show progress."""

import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import launch.evaluate
from launch.cli.options import parse_run
from launch.distillation.cost import DistillationCost
from launch.distillation.trainer import distill
from launch.errors import ConfigError, Stopped
from launch.evaluation.options import EvaluateArgs
from launch.phases import progress
from launch.phases.long_phase import SAVE_EVERY_S
from launch.phases.long_phases import UNFINISHED, LongPhases, options_text
from launch.phases.progress import Progress
from launch.run.pin_references import with_step
from launch.run.supervised_warmup import warm_up
from launch.setup.experiment import Experiment, build_experiment
from specjax.checkpoint import Checkpointer
from specjax.types import Params, TrainState
from tests.launch.programs import LEAST, argv, flags, share_programs
from tests.launch.test_long_phases import SignalAfter, stopping_after
from tests.refusals import refuses

SMALL = LEAST | flags(
    "--rollout.max-new-tokens 24 --warmup.steps 4 --warmup.batch-size 4 --distill.steps 6 --distill.answers 32",
    "--distill.chunks 2 --distill.batch-size 8 --distill.microbatches 1",
)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return build_experiment(parse_run(argv("tiny", SMALL), "", ""))


def before_rl(experiment: Experiment, work: LongPhases) -> tuple[Params, DistillationCost]:
    """Warm up and distil, as a new run does."""
    copied = jax.tree.map(jnp.copy, experiment.networks.params)
    fresh = replace(experiment, networks=replace(experiment.networks, params=copied))
    with work:
        params = warm_up(fresh)
        distilled = distill(fresh, params)
    return replace(params, draft=distilled.draft), distilled.cost


def test_row_14_warm_up_and_distillation_continue_bit_for_bit(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_programs(monkeypatch, "launch.distillation.answers.make_generate")
    share_programs(monkeypatch, "launch.distillation.trainer.make_distill_step")
    expected, _ = before_rl(experiment, LongPhases())
    stops = 0
    while True:
        try:
            params, cost = before_rl(experiment, stopping_after(9, tmp_path))
            break
        except Stopped as stopped:
            stops += 1
            assert stopped.signal == signal.SIGTERM
            assert re.search(r": stopped after \d+ of \d+ .*(--resume|starts again)", str(stopped))
            assert stops < 50
    assert stops > 1
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers", "distillation", "warm-up"]


@pytest.mark.slow
def test_row_14_the_cost_of_a_distillation_is_that_of_all_its_processes(experiment: Experiment, tmp_path: Path) -> None:
    _, whole = before_rl(experiment, LongPhases())
    for turn in itertools.count():
        assert turn < 50
        with contextlib.suppress(Stopped):
            _, cost = before_rl(experiment, stopping_after(6, tmp_path))
            break
    # The last process did only a part of the work.
    for name in ("answers", "answer_tokens", "steps", "trained_tokens"):
        assert getattr(cost, name) == getattr(whole, name) > 0
    assert cost.generation_s > 0 and 0 < cost.compile_s < cost.generation_s + cost.training_s
    # A process that finds everything done reports exactly the same cost.
    _, again = before_rl(experiment, LongPhases(tmp_path))
    assert again == cost


def test_row_14_without_a_directory_nothing_is_kept(experiment: Experiment) -> None:
    with pytest.raises(Stopped, match="nothing is kept"):
        before_rl(experiment, stopping_after(1))


def test_row_14_states_of_other_options_are_refused(tmp_path: Path) -> None:
    with LongPhases(tmp_path / UNFINISHED, options="a").phase("x", 2, "units") as phase:
        phase.finish({"x": {"y": np.arange(3)}}, save=True)
        phase.finish({"x": {"y": np.arange(3) + 1}})
    again = LongPhases(tmp_path / UNFINISHED, options="a").phase("x", 2, "units")
    assert again.done == 2
    np.testing.assert_array_equal(again.restore("x")["y"], [1, 2, 3])
    with refuses(f"{tmp_path / UNFINISHED}: ", ConfigError):
        LongPhases(tmp_path / UNFINISHED, options="b")


def test_row_14_a_phase_without_a_state_starts_again(tmp_path: Path) -> None:
    work = stopping_after(2, tmp_path)
    with pytest.raises(Stopped, match="starts again"), work.phase("x", 5, "units", kept=False) as phase:
        for _ in range(5):
            phase.finish()
    assert LongPhases(tmp_path).phase("x", 5, "units").done == 0


def test_row_14_the_newest_checkpoint_is_compared_by_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run continues training between a stop and the next start, its newest checkpoint changes."""
    monkeypatch.setattr(EvaluateArgs, "__post_init__", lambda self: None)
    texts = []
    for step in (3, 60):
        with Checkpointer(tmp_path / "checkpoints", keep=2) as saves:
            saves.save(step, TrainState(jnp.int32(step), Params({"x": jnp.zeros(2)}, {}), Params({}, {}), None), {}, {})
        args = with_step(EvaluateArgs(checkpoint=str(tmp_path)))
        assert args.checkpoint_step == step
        texts.append(options_text(args))
    assert texts[0] != texts[1]


def test_row_14_states_are_kept_every_few_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), LongPhases(tmp_path).phase("x", 9, "units") as phase:
        phase.finish({"x": {"y": np.arange(3)}})
        phase._saved_at -= SAVE_EVERY_S + 1
        phase.finish({"x": {"y": np.arange(3)}})
        phase.finish({"x": {"y": np.arange(3)}})
        raise KeyError  # killed
    assert LongPhases(tmp_path).phase("x", 9, "units").done == 2


@pytest.fixture
def set_signals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the signals of launch.evaluate."""
    monkeypatch.setattr("launch.evaluate.check_policy_source", lambda *_: None)
    return lambda signals: monkeypatch.setattr("launch.evaluate.StopSignals", lambda say: nullcontext(signals))


def test_row_14_an_evaluation_continues(set_signals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    share_programs(monkeypatch, "launch.evaluation.sampler.make_generate")
    words = LEAST | {"--data.prompts": "4", "--samples": "2", "--save": "saved.jsonl"}

    def evaluate(results: str, signals: Any) -> None:
        set_signals(signals)
        assert launch.evaluate.main(argv("tiny", words | {"--json": results})) == 0

    evaluate("whole.json", None)
    whole = json.loads(Path("whole.json").read_text())["sets"]
    saved = Path("saved.jsonl").read_text()
    loading = 3
    with pytest.raises(Stopped, match="stopped after 2 of 4 batches; the same command"):
        evaluate("parts.json", SignalAfter(loading + 2))
    assert Path(f"parts.json.{UNFINISHED}").is_dir()
    with pytest.raises(Stopped, match="stopped after 3 of 4 batches"):
        evaluate("parts.json", SignalAfter(loading + 1))
    evaluate("parts.json", None)
    (parts,) = json.loads(Path("parts.json").read_text())["sets"]
    timed = {name for name in parts if "per_s" in name or "second" in name}
    assert {k: v for k, v in parts.items() if k not in timed} == {k: v for k, v in whole[0].items() if k not in timed}
    assert Path("saved.jsonl").read_text() == saved and not Path(f"parts.json.{UNFINISHED}").exists()


def lines_of(phase: Progress, output: io.StringIO, seconds: list[float]) -> list[str]:
    with phase:
        for _ in seconds:
            phase.advance(tokens=100, note="loss 2.0")
    return output.getvalue().splitlines()


def test_row_27_a_log_gets_a_line_before_the_first_unit_and_few_after(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0] + [1.0 * i for i in range(1000)])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    output = io.StringIO()
    phase = Progress("distillation", 100, "steps", console=Console(file=output, width=200))
    lines = lines_of(phase, output, [1.0] * 100)
    assert lines[0] == "distillation: 0 of 100 steps; compiling .."
    assert 5 < len(lines) < 40
    line = re.compile(r"distillation: \d+ of 100 steps, loss 2.0(, [\d,]+ tokens/s, .* left)?")
    assert all(map(line.fullmatch, lines[2:-1]))
    assert lines[-1].startswith("distillation: 100 of 100 steps, loss 2.0, ") and "left" not in lines[-1]


def test_row_86_no_time_is_left_before_a_program_has_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each length are a program of their own, which compiles at its first run."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    output = io.StringIO()
    phase = Progress("distillation", 10, "steps", console=Console(file=output, width=200))

    def run(*programs: tuple[str, float]) -> list[str]:
        with phase:
            now[0] += 500
            for program, seconds in programs:
                now[0] += seconds
                phase.advance(tokens=100, program=program)
        return [line.partition("steps")[2] for line in output.getvalue().splitlines() if "compiling" not in line]

    lines = run(
        ("short", 300.0), ("long", 400.0), ("longer", 600.0), ("short", 10.0), ("long", 20.0), ("longest", 900.0)
    )
    measured = [
        "",
        "",
        "",
        ", 10 tokens/s, 1 min 0 s left",
        ", 7 tokens/s, 1 min 15 s left",
        ", 7 tokens/s, 1 min 0 s left",
    ]
    assert lines == measured
    # A phase that goes on after other work, whose first unit includes what prepares it.
    assert run(("short", 10.0), ("longest", 30.0), ("longest", 30.0))[6:] == [
        "",
        ", 3 tokens/s, 1 min 0 s left",
        *[", 3 tokens/s, 30 s left"],
    ]


def test_the_last_line_of_a_slow_phase_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([20.0 * i for i in range(10)])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    output = io.StringIO()
    lines = lines_of(Progress("loading", 2, "parts", console=Console(file=output, width=200)), output, [1.0] * 2)
    assert [line.partition(",")[0] for line in lines[1:]] == ["loading: 1 of 2 parts", "loading: 2 of 2 parts"]


def test_row_27_a_terminal_gets_one_line_that_changes() -> None:
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, width=80)
    with Progress("warm-up", 2, "steps", console=terminal) as phase:
        phase.advance()
        phase.advance()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", output.getvalue())
    assert text.rstrip().endswith("warm-up: 2 of 2 steps")


COUNT = """
import sys, jax, launch.train
slow, read = [], []
# The duration of a compilation is told also where the program was read from the cache, after that is told.
jax.monitoring.register_event_listener(lambda event, **_: read.append(event) if event.endswith("/cache_hits") else None)
def compiled(event, seconds, **_):
    if "backend_compile" in event:
        if not read and seconds > 1:
            slow.append(seconds)
        read.clear()
jax.monitoring.register_event_duration_secs_listener(compiled)
assert launch.train.main(sys.argv[1:]) == 0
print("compiled for over a second:", len(slow))
"""


@pytest.mark.slow
def test_row_28_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    """This holds with host scorers too: no program has a callback, so all are in the compile cache."""
    words = LEAST | {"--steps": "3", "--probe-every": "2", "--reward.scorer": "exact", "--reward.workers": "1"}
    environment = os.environ | {"SPECJAX_CACHE": str(tmp_path / "cache")}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    counts = []
    for run in ("first", "second"):
        own = [*argv("tiny", words | {"--out": str(tmp_path / run)}), "--speedup.steps", "0"]
        command = [sys.executable, "-c", COUNT, *own]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert ended.returncode == 0, ended.stderr
        counts.append(int(ended.stdout.rsplit(": ", 1)[1]))
    assert counts[0] > 0 and counts[1] == 0
