import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import launch.train
from configs.override import override
from configs.schema import CheckpointConfig, EvalConfig, RunConfig
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from launch.rewards.code import code_of_function, code_of_modules
from launch.run.directory import CHECKPOINTS, can_resume, open_run, record_config
from launch.run.records import as_recorded, differences
from specjax.checkpoint import Checkpointer
from specjax.parallel.mesh import MeshConfig
from specjax.types import Params, TrainState
from tests.refusals import assert_refused, refuses

CONFIG = RunConfig(name="sums", steps=10)


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(directory: Path) -> None:
    with Checkpointer(directory / CHECKPOINTS, keep=1) as saves:
        saves.save(3, TrainState(jnp.int32(3), Params({"x": jnp.zeros(2)}, {}), Params({}, {}), None), {}, {})


def start(config: RunConfig) -> Path:
    """Open the directory of a run as the program does, and close it."""
    with open_run(config) as directory:
        record_config(directory, config)
        return directory


def resumes(config: RunConfig) -> bool:
    with open_run(config) as directory:
        return can_resume(config, directory)


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        start(config)
    return str(error.value)


def test_a_new_run_never_replaces_an_old_one():
    assert [str(start(CONFIG)) for _ in range(3)] == ["runs/sums", "runs/sums-2", "runs/sums-3"]
    assert str(start(replace(CONFIG, name="other"))) == "runs/other"
    assert json.loads(Path("runs/sums-2/config.json").read_text()) == json.loads(json.dumps(asdict(CONFIG)))
    assert sorted(path.name for path in Path("runs/sums").iterdir()) == ["config.json"]


@pytest.mark.parametrize("left", ["metrics", "checkpoint"])
def test_a_directory_of_ones_own(left: str):
    config = replace(CONFIG, out="a/b")
    assert start(config) == Path("a/b")
    # Nothing can be lost yet.
    Path("a/b/metrics.jsonl").touch()
    assert start(replace(config, seed=1)) == Path("a/b")
    assert json.loads(Path("a/b/config.json").read_text())["seed"] == 1
    if left == "metrics":
        Path("a/b/metrics.jsonl").write_text("{}\n")
    else:
        save(Path("a/b"))
    assert_refused(refusal(config), "out = a/b: ")


def test_no_directory_can_be_made():
    Path("file").touch()
    for out in ("file", "file/x"):
        assert_refused(refusal(replace(CONFIG, out=out)), f"out = {out}: ")


def test_resume_takes_the_newest():
    for _ in range(11):
        start(CONFIG)
    start(replace(CONFIG, name="sums-of-others"))
    save(Path("runs/sums-9"))
    assert start(replace(CONFIG, resume=True)) == Path("runs/sums-11") and not resumes(replace(CONFIG, resume=True))
    save(Path("runs/sums-11"))
    assert start(replace(CONFIG, resume=True)) == Path("runs/sums-11") and resumes(replace(CONFIG, resume=True))
    assert start(replace(CONFIG, resume=True, out="runs/sums-9")) == Path("runs/sums-9")


def test_nothing_to_resume(working_directory: Path):
    assert_refused(refusal(replace(CONFIG, resume=True)), f"resume: ...sums...{working_directory}/runs")
    assert_refused(refusal(replace(CONFIG, resume=True, out="x")), "resume: out = x: ")
    Path("x").mkdir()
    for _ in ("nothing", "a save"):
        assert_refused(refusal(replace(CONFIG, resume=True, out="x")), "resume: ...x/config.json")
        save(Path("x"))
    unsaved = replace(CONFIG, out="y", checkpoint=CheckpointConfig(every=0))
    (start(unsaved) / "metrics.jsonl").write_text("{}\n")
    said = refusal(replace(unsaved, resume=True, checkpoint=CheckpointConfig(every=5)))
    assert_refused(said, "resume: ...y...checkpoint.every = 0")


def test_a_network_recorded_without_the_experts_option_is_the_same():
    config = load_recipe("tiny")
    recorded = as_recorded(config)
    assert recorded.pop("model.architecture.experts", "none") is None
    assert not list(differences(config, recorded))


def test_what_may_change_on_resume():
    config = replace(CONFIG, out="x")
    save(start(config))
    resumed, path = replace(config, resume=True), Path("x/config.json")
    options = dict(steps=20, probe_every=3, microbatches=2, mesh=MeshConfig(data=2), eval=EvalConfig(every=1))
    options |= dict(checkpoint=CheckpointConfig(every=1), speedup=replace(CONFIG.speedup, steps=1))
    options |= dict(model=replace(CONFIG.model, remat="full"), reward=replace(CONFIG.reward, workers=1))
    start(replace(resumed, **options))
    assert json.loads(path.read_text())["steps"] == 20

    stops, fast = replace(CONFIG.rollout, stop_tokens=(1, 2)), replace(CONFIG.policy_optimizer, learning_rate=2.0)
    for other, said in [
        (replace(resumed, seed=3), "seed = 3: ...0...x/config.json"),
        (replace(resumed, rollout=stops), "rollout.stop_tokens = [1, 2]: ...[]"),
        (replace(resumed, policy_optimizer=fast), "policy_optimizer.learning_rate = 2.0: ...1e-06"),
    ]:
        assert_refused(refusal(other), said)
    choosing = replace(config, out="y", rollout=replace(CONFIG.rollout, draft_lengths=(0, 2)))
    save(start(choosing))
    start(replace(choosing, resume=True, steps=20))
    elsewhere = replace(choosing, resume=True, mesh=MeshConfig(data=2))
    assert_refused(refusal(elsewhere), "mesh.data = 2: ...1")

    # The value of runs that were recorded before this option existed.
    stored = json.loads(path.read_text())
    del stored["loss"]["clip_low"]
    path.write_text(json.dumps(stored))
    start(resumed)
    other = replace(resumed, loss=replace(CONFIG.loss, clip_low=0.1))
    assert_refused(refusal(other), "loss.clip_low = 0.1: ...0.2")
    path.write_text(json.dumps(stored | {"old": 1}))
    assert_refused(refusal(resumed), "old = absent: ...1")


def test_row_104_a_resumed_run_says_that_its_reward_has_other_code(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(working_directory)
    module = working_directory / "my_scorer.py"

    def code(text: str) -> str | None:
        module.write_text(text)
        return code_of_modules(("my_scorer:score", "math"))

    def reward(completion: str, answer: str) -> float:
        return float(completion in {answer, "b", "c"})

    def compiled(text: str) -> str | None:
        names: dict[str, Any] = {}
        exec(text, names)
        return code_of_function(names["score"])

    first, other = code("x = 1"), code("x = 2")
    assert first != other and code("x = 1") == first and code_of_modules(("math", "python:f")) is None
    assert code_of_modules(("nowhere.scorer:score",)) is None
    package = working_directory / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "scorer.py").write_text("x = 1")
    assert code_of_modules(("my_package.scorer:score",)) == first and "my_package" not in sys.modules

    def near(tol: Any, *others: Any) -> Callable[..., float]:
        return lambda completion, answer, most=others: float(abs(float(completion) - float(answer)) <= tol)

    class Near:
        def __init__(self, tol: float) -> None:
            self.tol, self.other = tol, object()

        def __call__(self, completion: str, answer: str) -> float:
            return near(self.tol)(completion, answer)

    def rewards() -> list[Callable[..., Any]]:
        given = reward, code, near(1), near(2), near(1, 3), near(lambda: 1), near(object), Near(1), Near(2)
        return [*given, Near(3).__call__, *(partial(reward, answer=answer) for answer in ("b", {"c", "d"}))]

    codes = [*map(code_of_function, rewards())]
    assert len({*codes}) == len(codes) and codes == [*map(code_of_function, rewards())]
    codes = [
        compiled(text) for text in ("score = lambda c, a: 1", "\nscore = lambda c, a: 1", "score = lambda c, a: 2")
    ]
    assert codes[0] == codes[1] != codes[2]
    assert code_of_function(len) is None
    said: list[str] = []
    for resume, code_now in ((False, None), (True, first), (True, first), (True, other), (True, None)):
        config = replace(CONFIG, out="a", resume=resume, reward=replace(CONFIG.reward, code=code_now))
        if resume:
            save(Path("a"))
        with open_run(config) as directory:
            record_config(directory, config, said.append)
    assert [line for line in said if "reward" in line] == [
        "reward = exact: has other code than in the steps so far; the new one scores later steps"
    ]


def test_row_90_what_the_config_tells_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    def build(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(launch.train, "build_experiment", build)
    config = override(CONFIG, {"out": "x", "data.chat_template_time": "2026-01-01T00:00:00"})
    save(start(config))
    changed = {"resume": True, "steps": 20, "seed": 3, "lora.rank": 4, "draft.kind": "mtp"}
    with pytest.raises(ConfigError) as error:
        launch.train.run(override(config, changed))
    names = [line.partition(" = ")[0] for line in error.value.args]
    assert sorted(names) == ["draft.kind", "lora.rank", "seed"]
    assert [" may change" in line for line in error.value.args] == [False, False, True]
    other_schedule = override(config, {"resume": True, "draft_training.max_every": 3})
    with refuses("draft_training.max_every = 3: the run to resume has", ConfigError):
        launch.train.run(other_schedule)
    # Building networks without a draft to train makes these equal.
    start(override(config, {"out": "frozen", "draft_training.mode": "frozen"}))
    save(Path("frozen"))
    with pytest.raises(AssertionError):
        launch.train.run(replace(other_schedule, out="frozen"))
