"""A GPU session: whatever happens in one part, the next part runs, and results are written at once."""

import itertools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from benchmarks.bench.models import random_prompts
from benchmarks.bench.presets import PRESETS, LongTail
from benchmarks.bench.sections.decoding import BLOCK, EAGLE3
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import run, smoke
from benchmarks.gpu.parts import Part, parts
from benchmarks.gpu.step_programs import StepPrograms, policy_params, step_networks, submit_all
from benchmarks.gpu.steps import Arm, StepTime, StepTimer, rate_of, table
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import Params, PyTree
from tests.benchmarks.presets import SMALL
from tests.documents import ROOT

GUIDE = ROOT / "docs" / "gpu.md"

# Programs that replace parts, by name. Each ends in a different way.
PROGRAMS = {
    "good": ("print('measured: 1')", "ok"),
    "failing": ("print('so far'); raise ValueError('too bad')", "exit code 1"),
    "aborting": (
        "import os, sys; from pathlib import Path; from benchmarks.bench.report import BenchSection, Results\n"
        "def turns():\n"
        "    print('so far', flush=True)\n"
        "    for turn in range(1, 15):\n"
        "        yield BenchSection('a title', [{'turn': turn, 'ms': (4.5, 4.25, 4.75), 'turns, s': [0.1] * turn}])\n"
        "    os.abort()\n"
        "Results('aborting', 'none', Path(sys.argv[1])).follow('one', turns())",
        "SIGABRT",
    ),
    "endless": (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600']); print('so far', flush=True); time.sleep(600)",
        "before its limit of 0.1 min",
    ),
}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs PROGRAMS as parts, and returns the exit code and the log."""
    for name, (source, _) in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "provenance", lambda words: ("gpu", "device    a GPU\n"))

    def run_parts(*chosen: Part, options: str = "--minutes 1") -> tuple[int, str]:
        monkeypatch.setattr(gpu, "parts", lambda *_, **__: list(chosen))
        monkeypatch.setattr(gpu, "NAMES", [part.name for part in chosen])
        monkeypatch.setattr("sys.argv", ["gpu", *options.split(), "--out", str(tmp_path / "out")])
        return gpu.main(), max(tmp_path.glob("out*/gpu.txt"), key=lambda path: path.stat().st_mtime_ns).read_text()

    return run_parts


def test_the_next_part_runs_however_a_part_ends(session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "GRACE", 0.5)
    monkeypatch.setattr(run, "LEAST", 0)
    assert session(Part("good", 1, ("good", "none.json")))[0] == 0
    (first,) = tmp_path.glob("out*/gpu.txt")
    said = first.read_text()
    shares = {"endless": 0.1, "failing": 0.3, "aborting": 0.5, "good": 0.3}
    chosen = [Part(name, minutes, (name, str(tmp_path / f"{name}.json"))) for name, minutes in shares.items()]
    began = time.monotonic()
    code, log = session(*chosen, options="--minutes 1.2")
    assert code == 1 and time.monotonic() - began < 72
    outcomes = log.partition("==== outcomes\n")[2]
    for name, (_, ended) in PROGRAMS.items():
        assert any(line.split()[0] == name and line.endswith(ended) for line in outcomes.splitlines() if line)
    assert "ValueError: too bad" in outcomes
    # The aborted part left fourteen turns, and its table is printed from them.
    (row,) = json.loads((tmp_path / "aborting.json").read_text())["sections"]["one"]["rows"]
    assert len(row["turns, s"]) == 14 and "4.5 [4.25, 4.75]" in log
    assert log.startswith("device    a GPU\n") and "measured: 1" in log
    assert log.partition("==== outcomes")[0].count("\nso far\n") == 3
    assert first.read_text() == said, "a later call overwrites nothing"


def test_two_calls_hold_the_parts_that_docs_name(tmp_path: Path):
    """Nine minutes hold the first parts, three and a half the two after them or the last; the first ones come first."""
    every = {part.name: part for part in parts(tmp_path)}
    assert list(every)[:2] == ["steps", "lora"] and sum(every[name].minutes for name in list(every)[:3]) <= 9
    calls = re.findall(r"^.*benchmarks\.gpu (?:--minutes \S+ )?(?:--parts ([a-z ]+) )?--out", GUIDE.read_text(), re.M)
    later = [call.split() for call in calls if call]
    assert len(calls) == 3 and sorted(itertools.chain(*later)) == sorted(list(every)[3:])
    assert all(sum(every[name].minutes for name in call) <= 3.5 for call in later)
    two, one = Part("two", 2, ()), Part("one", 1, ())
    assert gpu.deadlines([two, one], 9) == [6, 9] and gpu.deadlines([one], 9) == [9]
    assert gpu.deadlines([two, one], 2.5) == [2, 2.5] and gpu.deadlines([two, one], 0.5) == [0.5, 0.5]
    # Too little time is left for this one.
    late = run.run(Part("late", 1, ("failing", "none.json")), 0.5, tmp_path / "log")
    assert late == run.Outcome("skipped: 0.5 min are left")


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu, "provenance", lambda words: ("cpu", "device    a CPU\n"))
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2 and "needs a GPU" in capsys.readouterr().err


def test_a_failed_required_check_fails_the_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fails() -> str:
        raise AssertionError("not the same tokens")

    planted = {("one", "highest", True): fails, ("two", "default", False): fails, ("three", "highest", True): str}
    monkeypatch.setattr(smoke, "checks", lambda *_: planted)
    monkeypatch.setattr("sys.argv", ["smoke", "--json", str(tmp_path / "x.json")])
    assert smoke.main() == 1
    section = json.loads((tmp_path / "x.json").read_text())["sections"]["smoke"]
    assert [row["outcome"] for row in section["rows"]] == ["FAILS", "differs", "passes"]
    assert "not the same tokens" in section["notes"][0]
    del planted["one", "highest", True]
    assert smoke.main() == 0


def programs_of(rank: int, drafts: dict[str, tuple[int, ...]]) -> tuple[dict[str, StepPrograms], dict[str, Params]]:
    """Return the programs of steps of almost no size, and parameters for them."""
    mesh, keys = make_mesh(MeshConfig()), jax.random.split(jax.random.key(0))
    shapes, policy = (policy_params(SMALL, rank, mesh, key) for key in (None, keys[0]))
    programs, params, tail = dict[str, StepPrograms](), dict[str, Params](), LongTail(median=4, factor=4)
    for draft, lengths in drafts.items():
        networks = step_networks(SMALL, draft, shapes, mesh, None)
        programs[draft] = StepPrograms(networks, random_prompts(networks, 2, 4), 2, tail, lengths, microbatches=1)
        params[draft] = step_networks(SMALL, draft, policy, mesh, keys[1]).trained
    return programs, params


def timer_of(rank: int, drafts: dict[str, tuple[int, ...]]) -> tuple[StepTimer, dict[str, Params]]:
    """Return a timer of steps of almost no size, and a copy of the parameters that it starts from."""
    programs, params = programs_of(rank, drafts)
    before = jax.device_get(params)
    with ThreadPoolExecutor() as pool:
        waiting = submit_all(programs, pool)
        # Plain steps, and any draft length: two programs for each kind of draft.
        assert len(waiting) == 2 * len(drafts)
    compiled = {name: future.result() for name, future in waiting.items()}
    states = {draft: each.state(params[draft]) for draft, each in programs.items()}
    return StepTimer(programs, compiled, states), before


def changed(before: PyTree, after: PyTree) -> bool:
    return any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))


def test_steps_with_adapters_are_timed():
    """Acceptance is forced, lengths are the same at every draft length, and only a step with drafts trains the head."""
    timer, before = timer_of(2, {EAGLE3: (0, 2)})
    compilations = list[str]()
    monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compilations.append(name))
    plain = timer.measure(Arm(EAGLE3, 0, 0.0))
    assert plain.acceptance_length == 1
    assert not changed(timer.states[EAGLE3].params.draft, before[EAGLE3].draft)
    compilations.clear()
    assert timer.measure(Arm(EAGLE3, 2, 1.0)).acceptance_length > 1.5
    assert timer.measure(Arm(EAGLE3, 2, 0.0)).acceptance_length == 1
    assert not [name for name in compilations if "backend_compile" in name], "another draft length compiles nothing"
    after = timer.states[EAGLE3].params
    assert not changed(after.base, before[EAGLE3].base)
    assert changed(after.policy, before[EAGLE3].policy) and changed(after.draft, before[EAGLE3].draft)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_steps_with_either_draft_train_one_policy(rank: int):
    timer, before = timer_of(rank, {EAGLE3: (0, 2), BLOCK: (7,)})
    timer.measure(Arm(EAGLE3, 2, 0.5))
    between = jax.device_get(timer.states[EAGLE3].params)
    assert timer.measure(Arm(BLOCK, 7, 1.0)).acceptance_length > 1.5
    after = timer.states[BLOCK].params
    assert changed(before[BLOCK].draft, after.draft) and changed(between.policy, after.policy)
    # Moments too: two steps have been taken with them.
    counts = [int(x) for x in jax.tree.leaves(timer.states[BLOCK].optimizer.policy) if x.ndim == 0]
    assert counts and set(counts) == {2}
    timer.measure(Arm(EAGLE3, 0, 0.0))
    assert not changed(between.draft, timer.states[EAGLE3].params.draft)


def test_speed_ups_are_over_the_plain_steps_of_the_same_turns():
    plain, drafted = StepTime(4.0, 2.0, 1.0), StepTime(2.0, 3.0, 2.0)
    slow = StepTime(90.0, 90.0, 1.0)
    rows = table({Arm(EAGLE3, 0, 0.0): [slow, plain, plain], Arm(EAGLE3, 2, 0.5): [slow, drafted]})
    assert [row["draft"] for row in rows] == ["none", EAGLE3]
    assert rows[1]["generation x"] == (2, 2, 2) and rows[1]["step x"] == pytest.approx((1.2,) * 3)
    assert rows[1]["held x"] == pytest.approx((1.5,) * 3) and rows[1]["turns, train s"] == [90.0, 3.0]
    # Of one turn there is a table too.
    assert table({Arm(EAGLE3, 0, 0.0): [slow]})[0]["step s"] == 180


def test_the_rate_of_an_acceptance_length():
    for length, k in ((2.28, 3), (3.45, 7), (1.0, 1), (4.0, 3)):
        rate = rate_of(length, k)
        assert sum(rate**i for i in range(k + 1)) == pytest.approx(length) and 0 <= rate <= 1


@pytest.mark.slow
def test_gradients_of_another_policy_are_found(monkeypatch: pytest.MonkeyPatch):
    """The check compares with the CPU. Here both runs are on the CPU, and one of them has other weights."""
    networks, put, calls = smoke.random_networks(PRESETS["tiny"]), jax.device_put, count()

    def put_changed(tree: PyTree, device: Any) -> PyTree:
        scale = 1.001 if next(calls) else 1.0
        return jax.tree.map(lambda x: scale * x if x.dtype == jnp.float32 else x, put(tree, device))

    monkeypatch.setattr(jax, "device_put", put_changed)
    with pytest.raises(AssertionError, match="must be at most"):
        smoke.gradients(networks)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_part_runs_at_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first two, with whole steps, compile four programs that take longer than a fifth of the longest."""
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    options = ["--tiny", "--minutes", "35", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["gpu", *options])
    assert gpu.main() == 0, (tmp_path / "out" / "gpu.txt").read_text()[-4000:]
    _, *logs = re.split(r"^==== (?=\w+: )", (tmp_path / "out" / "gpu.txt").read_text(), flags=re.M)
    compiled = {
        log.partition(":")[0]: sorted(map(float, re.findall(r"Finished XLA compilation of \S+ in (\S+) sec", log)))
        for log in logs
    }
    for name in gpu.NAMES:
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())
    for name in ("steps", "lora"):
        assert len([seconds for seconds in compiled[name] if 5 * seconds > compiled[name][-1]]) <= 4
