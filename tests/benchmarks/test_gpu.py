"""A GPU session: whatever happens in one part, the next part runs, and results are written at once."""

import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bench.models import random_prompts
from benchmarks.bench.presets import PRESETS, LongTail
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import model, run, smoke
from benchmarks.gpu.lora import LoraSteps, StepTime, StepTimer, lora_networks, table
from benchmarks.gpu.parts import Part, parts
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import PyTree
from tests.benchmarks.presets import SMALL
from tests.launch.checkpoints import write_checkpoint, write_problems

# Programs that replace parts, by name. Each ends in a different way.
PROGRAMS = {
    "good": ("print('measured: 1')", "ok"),
    "failing": ("print('so far'); raise ValueError('too bad')", "exit code 1"),
    "aborting": ("import os; print('so far', flush=True); os.abort()", "SIGABRT"),
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
        return gpu.main(), (tmp_path / "out" / "gpu.txt").read_text()

    return run_parts


def test_the_next_part_runs_however_a_part_ends(session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "GRACE", 0.5)
    monkeypatch.setattr(run, "LEAST", 0)
    # The endless part gets a tenth of a minute: what is left is less than the parts need.
    assert session(Part("good", 1, ("good",)))[0] == 0
    shares = {"failing": 0.3, "aborting": 0.3, "endless": 0.1, "good": 0.9}
    chosen = [Part(name, minutes, (name,)) for name, minutes in shares.items()]
    began = time.monotonic()
    code, log = session(*chosen, Part("absent", 1, ("good",), missing="no model"), options="--minutes 1")
    assert code == 1 and time.monotonic() - began < 40
    outcomes = log.partition("==== outcomes\n")[2]
    for name, (_, ended) in PROGRAMS.items():
        assert any(line.split()[0] == name and line.endswith(ended) for line in outcomes.splitlines() if line)
    assert "skipped: no model" in outcomes and "ValueError: too bad" in outcomes
    assert log.startswith("device    a GPU\n") and "measured: 1" in log
    assert log.partition("==== outcomes")[0].count("\nso far\n") == 3


def test_the_time_left_is_divided_among_the_parts_that_can_run_but_the_first_ones_keep_their_limits(tmp_path: Path):
    """All parts but the model fit into 23 minutes, and the two that time decoding into one call of nine."""
    minutes = {part.name: part.minutes for part in parts(Path()) if not part.missing}
    assert sum(minutes.values()) <= 23 and minutes["rounds"] + minutes["rollouts"] <= 9
    two, one = Part("two", 2, ()), Part("one", 1, ())
    assert gpu.time_limit(9, [two, Part("absent", 5, (), missing="no model"), one]) == 6
    assert gpu.time_limit(9, [one]) == 9 and gpu.time_limit(0, [two, one]) == 0
    assert gpu.time_limit(2.5, [two, one]) == 2 and gpu.time_limit(0.5, [two, one]) == 0.5
    # Too little time is left for this one.
    assert run.run(Part("late", 1, ("failing",)), 0.5, tmp_path / "log") == run.Outcome("skipped: 0.5 min are left")


@pytest.mark.parametrize("words", ["", "--model /nowhere --tiny"])
def test_what_cannot_run_is_refused(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu, "provenance", lambda words: ("cpu", "device    a CPU\n"))
    monkeypatch.setattr("sys.argv", ["gpu", *words.split()])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert ("/nowhere" if words else "needs a GPU") in capsys.readouterr().err


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


def test_steps_with_adapters_are_timed():
    """Acceptance is forced, lengths are the same at every draft length, and only a step with drafts trains the head."""
    mesh = make_mesh(MeshConfig())
    networks = lora_networks(SMALL, 2, mesh)
    before = jax.device_get(networks.trained)
    steps = LoraSteps(networks, random_prompts(networks, 2, 4), 2, LongTail(median=4, factor=4), (0, 2), microbatches=1)
    timer = StepTimer(steps)
    plain = timer.measure(0, 0.0)
    assert plain.acceptance_length == 1
    jax.tree.map(np.testing.assert_array_equal, timer.state.params.draft, before.draft)
    assert timer.measure(2, 1.0).acceptance_length > 1.5 and timer.measure(2, 0.0).acceptance_length == 1
    after = timer.state.params
    jax.tree.map(np.testing.assert_array_equal, after.base, before.base)
    for trained, tree in ((before.policy, after.policy), (before.draft, after.draft)):
        changed = [not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (trained, tree)), strict=True)]
        assert any(changed)
    rows = table({(0, None): [plain], (2, 0.5): [StepTime(plain.generation / 2, plain.train / 2, 2.0)]})
    assert [row["speed-up"] for row in rows] == [1, pytest.approx(2)]


def test_a_model_in_pieces_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert model.from_pieces(tmp_path) == tmp_path
    for name, content in (("aa", b"first "), ("ab", b"second")):
        (tmp_path / f"x.gguf.{name}").write_bytes(content)

    def dequantise(gguf: Path, directory: Path) -> None:
        (directory / "weights").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(model, "dequantise", dequantise)
    started = list[list[str]]()
    monkeypatch.setattr("os.execv", lambda _, words: started.append(words))
    model.main([str(tmp_path), "smollm2_extraction", "--steps", "3"])
    assert (tmp_path / "model" / "weights").read_bytes() == b"first second"
    words = ["-m", "launch.compare", "smollm2_extraction", "--model.path", str(tmp_path / "model"), "--steps", "3"]
    assert started[0][1:] == words


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
    write_checkpoint(tmp_path / "model")
    write_problems(tmp_path / "train.jsonl", ["1", "2", "3"] * 4)
    write_problems(tmp_path / "test.jsonl", ["1", "2", "3"])
    training = (
        f"gsm8k --data.train {tmp_path}/train.jsonl --data.held-out {tmp_path}/test.jsonl --data.prompts 4 --steps 1 "
        "--draft-lengths 0,2 --rollout.group-size 2 --rollout.max-new-tokens 8 --data.max-prompt-tokens 40 "
        "--microbatches 2 --model.feature-layers 0 1 --distill.steps 2 --distill.answers 16 --distill.batch-size 8 "
        "--reward.workers 1"
    )
    options = ["--tiny", "--minutes", "35", "--out", str(tmp_path / "out"), "--model", str(tmp_path / "model")]
    monkeypatch.setattr("sys.argv", ["gpu", *options, "--training", training])
    assert gpu.main() == 0, (tmp_path / "out" / "gpu.txt").read_text()[-4000:]
    for name in gpu.NAMES:
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())
