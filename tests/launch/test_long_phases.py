"""States that an earlier process left: they are locked, checked for damage, and continued."""

import io
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from configs.schema import RunConfig
from configs.schema.rewards import RewardConfig
from launch.cli.options import parse_run
from launch.cli.paths import new_output_directory
from launch.console import ProgressConsole
from launch.costs.turns import timed_turns
from launch.data.problems import Problem
from launch.errors import ConfigError, Stopped
from launch.jobs import silence
from launch.phases import progress, run_clock
from launch.phases.long_phases import OPTIONS, UNFINISHED, LongPhases, long_phases_beside
from launch.phases.progress import Progress
from launch.phases.run_clock import PARTS, describe_seconds, run_part, run_seconds, timed_run
from launch.rewards.reward_fn import unscorable_answers
from launch.setup.experiment import build_experiment
from specjax.checkpoint_integrity import MANIFEST
from tests.launch.programs import LEAST, argv
from tests.refusals import refuses


def test_row_106_a_first_step_that_takes_long_says_so_and_still_counts_as_silent():
    said, spoke, before = list[str](), threading.Event(), silence._latest

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            said.append(text)
            spoke.set()
            return len(text)

    with progress.showing_elapsed("first step", 0.01, ProgressConsole(file=Screen())):
        assert spoke.wait(60)
    assert "".join(said).startswith("first step: 0 s so far ..") and silence._latest == before


class SignalAfter:
    """A signal that arrives during unit `count` of a process's work."""

    def __init__(self, count: int) -> None:
        self._left = count

    @property
    def received(self) -> signal.Signals | None:
        self._left -= 1
        return signal.SIGTERM if self._left <= 0 else None


def stopping_after(count: int, directory: Path | None = None) -> LongPhases:
    signals: Any = SignalAfter(count)
    return LongPhases(directory, signals)


def write_phases(directory: Path) -> None:
    """Leave three finished phases."""
    work = LongPhases(directory, options="same")
    for name in ("first", "second", "third"):
        with work.phase(name, 1, "units") as phase:
            phase.finish({"part": {"x": np.arange(1000)}})


def largest(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(phase: Path) -> None:
    path = largest(phase)
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(phase: Path) -> None:
    path = largest(phase)
    path.write_bytes(b"\0" * path.stat().st_size)


def garble_manifest(phase: Path) -> None:
    (phase / "1" / MANIFEST).write_text("[")


def add_empty(phase: Path) -> None:
    (phase / "7").mkdir()


def become_file(phase: Path) -> None:
    phase.rename(phase.with_name("elsewhere"))
    phase.write_text("garbage")


@pytest.mark.parametrize("damage", [truncate, overwrite, garble_manifest, add_empty, become_file])
def test_damaged_phases_start_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]):
    directory = tmp_path / UNFINISHED
    write_phases(directory)
    damage(directory / "second")
    capsys.readouterr()
    work = LongPhases(directory, options="same")
    phases = [work.phase(name, 1, "units") for name in ("first", "second", "third")]
    assert [phase.done for phase in phases] == [1, 0, 0]
    (line,) = capsys.readouterr().out.splitlines()
    assert "second" in line and "damaged" in line and "start again" in line
    # Nothing is lost, and no files remain after the end of the program.
    assert (directory / "second.damaged").exists() and (directory / "third.damaged").is_dir()
    for phase in phases[1:]:
        with phase:
            phase.finish({"part": {"x": np.arange(2)}})
    assert [LongPhases(directory).phase(name, 1, "units").done for name in ("first", "second", "third")] == [1, 1, 1]
    work.remove()
    assert not directory.exists()


def test_other_damage_is_refused_in_one_line(tmp_path: Path):
    directory = tmp_path / UNFINISHED
    write_phases(directory)
    phase = LongPhases(directory, options="same").phase("first", 1, "units")
    with refuses(f"{directory}/first/1: ", ConfigError):
        phase.restore("a part of another version")
    (directory / OPTIONS).write_bytes(b"\xff")
    with refuses(f"{directory}: ", ConfigError):
        LongPhases(directory, options="same")
    (tmp_path / "file").touch()
    with refuses(f"{tmp_path / 'file'}: ", ConfigError):
        LongPhases(tmp_path / "file")


def test_one_process_writes_to_a_file_of_results(tmp_path: Path):
    signals: Any = SimpleNamespace(received=None)
    results, saved = str(tmp_path / "results.json"), str(tmp_path / "saved.jsonl")
    with long_phases_beside({"json": None, "save": saved}, signals), long_phases_beside({"json": results}, signals):
        for mine in ({"json": results, "save": None}, {"json": f"{results}2", "save": saved}, {"json": saved}):
            option = "json" if mine["json"] in (results, saved) else "save"
            with refuses(f"{option} = {mine[option]}: process ", ConfigError), long_phases_beside(mine, signals):
                pass
    assert not list(tmp_path.iterdir())


def test_timed_turns_reverse_their_order_and_stop_after_the_turn_under_way(tmp_path: Path):
    calls, kept = list[tuple[str, int]](), list[list[dict[str, float]]]()

    def run(name: str) -> Callable[[int], float]:
        return lambda turn: calls.append((name, turn)) or float(len(calls))

    phase = stopping_after(2, tmp_path).phase("rollouts", 4, "turns", kept=False)
    with pytest.raises(Stopped, match="rollouts: stopped after 2 of 4 turns; it starts again"):
        timed_turns(phase, {"a": run("a"), "b": run("b")}, keep=lambda turns: kept.append(list(turns)))
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    first, second = {"a": 1.0, "b": 2.0}, {"b": 3.0, "a": 4.0}
    assert kept == [[first], [first, second]]
    assert not list(tmp_path.iterdir())


def test_loading_and_the_check_of_answers_stop(tmp_path: Path):
    config = parse_run(argv("tiny", LEAST), "", "")
    for count in (1, 2, 3):
        stopped = pytest.raises(Stopped, match=f"loading: stopped after {count} of 3 parts")
        with stopped, stopping_after(count, tmp_path / UNFINISHED):
            build_experiment(config)
    # Phases without a state leave no files.
    assert not list(tmp_path.iterdir())
    scored: list[int] = []

    def score(completions: list[str], problems: list[dict[str, Any]]) -> np.ndarray:
        scored.append(len(problems))
        return np.array([[float(problem["answer"] != "1")] for problem in problems])

    pool: Any = SimpleNamespace(config=RewardConfig("exact", workers=2), scorers=["exact"], score=score)
    problems = [Problem(prompt="", answer=str(number)) for number in range(40)]
    assert unscorable_answers(pool, problems) == (["1"], []) and scored == [16, 16, 8]
    stopped = pytest.raises(Stopped, match="check of 40 answers: stopped after 2 of 3 parts")
    with stopped, stopping_after(2):
        unscorable_answers(pool, problems)


def test_row_88_the_parts_of_a_run_add_up_to_its_time(monkeypatch: pytest.MonkeyPatch):
    now, compiling = [0.0], [0.0]
    monkeypatch.setattr(run_clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_clock.CompileClock, "lap", lambda _: compiling.pop() if compiling else 0.0)

    def work(seconds: float, compiled: float = 0.0) -> None:
        now[0] += seconds
        compiling[:] = [compiled]

    assert run_seconds() is None
    with timed_run():
        work(1.3)
        for name, seconds, compiled in (("loading", 2.0, 0.0), ("features", 8.0, 5.0), ("distillation", 30.0, 20.0)):
            with Progress(name, 1, "units", quiet=True) as phase:
                work(seconds, compiled)
                phase.advance()
        with run_part("steps"):
            work(60.0, 40.0)
            with Progress("evaluation", 1, "batches", quiet=True), run_part("saving"):
                work(7.0)
            work(1.0)
        with pytest.raises(Stopped), stopping_after(1).phase("costs of rounds", 2, "turns", kept=False) as phase:
            work(0.5)
            phase.finish()
        work(0.1)
        seconds = run_seconds()
    assert seconds == {
        **{"compiling": 65.0, "steps": 21.0, "distilling": 13.0, "saving": 7.0, "loading": 2.0},
        **{"measuring rounds": 0.5, "other": 1.4, "total": 109.9},
    }
    assert sum(value for part, value in seconds.items() if part != "total") == pytest.approx(seconds["total"])
    assert describe_seconds(seconds).startswith(
        "time of the run: 109.9 s = compiling 65.0, steps 21.0, distilling 13.0,"
    )


def test_a_quiet_phase_prints_only_if_it_is_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    with Progress("loading", 1, "parts", quiet=True) as phase:
        phase.advance()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.01)
    with Progress("loading", 1, "parts", console=Console(), quiet=True) as phase:
        phase._late.join()
        # Even before its first unit has ended.
        assert capsys.readouterr().out == "loading: 0 of 1 parts ..\n"
        phase.advance()
    assert capsys.readouterr().out.splitlines()[-1] == "loading: 1 of 1 parts"


def test_only_a_resuming_program_may_use_a_directory_in_use(tmp_path: Path):
    """Tested with a distillation that was stopped during measurements, and a run that was stopped in its warm-up."""
    names = "distilled", "trained"
    distilled, trained = (RunConfig(name="sums", steps=1, out=str(tmp_path / name)) for name in names)
    write_phases(tmp_path / "distilled" / UNFINISHED)
    (tmp_path / "distilled" / "draft").mkdir()
    LongPhases(tmp_path / "trained" / UNFINISHED).phase("warm-up", 1, "steps")
    (tmp_path / "trained" / "config.json").touch()
    assert new_output_directory(distilled, goes_on=True) == tmp_path / "distilled"
    for config, goes_on in ((distilled, False), (trained, True)):
        with refuses(f"out = {config.out}: ", ConfigError):
            new_output_directory(config, goes_on=goes_on)


def test_every_named_part_of_a_run_has_a_phase():
    """Parts are found by how the names of phases begin."""
    code = "".join(path.read_text() for path in Path(run_clock.__file__).parents[1].rglob("*.py"))
    names = re.findall(r'(?:phase|Progress)\(\s*f?"([^"]+)', code)
    assert [part for part in PARTS if not any(name.startswith(part) for name in names)] == []
