"""A run whose newest save is damaged continues from the one before, with identical results."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.override import override
from configs.schema import RunConfig
from launch.errors import ConfigError
from launch.phases.long_phases import NOT_KEPT, LongPhases
from launch.phases.signals import StopSignals
from launch.run.directory import open_run
from launch.run.networks import restore_params
from launch.setup.experiment import build_experiment
from launch.train import train
from specjax.cost import Cell
from specjax.rewards import HostReward
from specjax.types import Prompts, Reward, Rollout
from tests.launch.programs import ONE_LAYER, SMALLEST, assert_same_run, metrics, saved_state, saves
from tests.refusals import assert_refused, refuses

pytestmark = pytest.mark.usefixtures("steps_once")
# A state with all parts: a reference policy that is updated, moments of Muon and Adam, several updates per rollout, a
# draft trained with replay and not in every step, a history lookup, and draft lengths chosen from costs. Epochs end
# during the run.
ROLLOUT = {"rollout.group_size": 2, "rollout.max_new_tokens": 8}
EVERYTHING = ROLLOUT | {
    **{"name": "everything", "steps": 6, "probe_every": 0, "mesh.data": 2, "reference_every": 2},
    **{"draft.kind": "model", "draft.architecture": ONE_LAYER, "draft.lookup.kind": "history", "draft.lookup.kept": 2},
    # Sums of four terms are too long.
    **{"data.max_prompt_tokens": 6, "data.arithmetic.problems": 15, "data.arithmetic.min_terms": 2},
    **{"reward.scorer": "exact_traced", "rollout.draft_lengths": (0, 2), "loss.kl_coefficient": 0.1},
    **{"updates.minibatches": 2, "updates.recompute_old": True},
    **{"policy_optimizer.kind": "muon", "policy_optimizer.learning_rate": 0.1, "policy_optimizer.schedule": "cosine"},
    **{"policy_optimizer.decay_steps": 20, "draft_optimizer.learning_rate": 0.1},
    **{"draft_training.replay": 2, "draft_training.every": 2, "checkpoint.every": 3, "checkpoint.best": "reward/mean"},
}
CONFIG = override(SMALLEST, EVERYTHING)
# Drafting costs almost nothing until step 5, and then becomes expensive.
CELLS = [Cell(2, 14, k, 1 + k / 200) for k in (0, 2)] + [Cell(2, 14, 2, 2, 5)] * 9


def odd(rollout: Rollout, prompts: Prompts) -> Reward:
    """Reward: the number of odd tokens; three or more are correct."""
    count = jnp.sum(rollout.tokens % 2, axis=1, dtype=jnp.float32)
    return Reward(count, (count > 2).astype(jnp.float32))


def run(config: RunConfig) -> None:
    with open_run(config) as directory:
        train(build_experiment(config, takes_steps=True), odd, odd, directory, StopSignals(print), LongPhases())


def write_cells(directory: Path, cells: Sequence[Cell]) -> str:
    table = directory / "table.json"
    table.write_text(json.dumps({"cells": [cell._asdict() for cell in cells]}))
    return str(table)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    run(replace(CONFIG, out=str(directory / "run"), cost_table=write_cells(directory, CELLS)))
    return directory / "run"


def copy(whole: Path, to: Path) -> RunConfig:
    """Copy a run and its cost table. Return the configuration that resumes the copy."""
    shutil.copytree(whole, to)
    stored = to / "config.json"
    stored.write_text(stored.read_text().replace(str(whole.parent), str(to.parent)))
    return replace(CONFIG, out=str(to), cost_table=shutil.copy(whole.parent / "table.json", to.parent), resume=True)


def damage(run: Path, step: int) -> Path:
    """Cut the longest file of a save in half."""
    files = (run / "checkpoints" / str(step) / "state").rglob("*")
    longest = max(files, key=lambda path: path.stat().st_size)
    longest.write_bytes(longest.read_bytes()[: longest.stat().st_size // 2])
    return longest


def test_a_run_continues_from_the_save_before_damage(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, copied = copy(whole, tmp_path / "run"), tmp_path / "run"
    path = damage(copied, 6)
    # The table's cells are in the checkpoint.
    (tmp_path / "table.json").unlink()
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    run(config)
    said = capsys.readouterr().out.splitlines()
    damaged = copied / "checkpoints" / "6"
    (line,) = [line for line in said if "damaged" in line]
    assert_refused(line, f"{damaged}...{path.relative_to(damaged)}...6.damaged")
    assert "resumed after step 3" in said

    lines = metrics(copied)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert_same_run(copied, whole, 6)

    diary = [json.loads(line) for line in (copied / "diary.jsonl").read_text().splitlines()]
    dropped = [line["warning"] for line in diary if "dropped" in line.get("warning", "")]
    texts = [f"{which} prompts are empty or over 6 tokens: dropped" for which in ("training", "held-out")]
    assert [re.sub(r"^[1-9]\d* ", "", said) for said in dropped] == texts
    assert [line["step"] for line in diary if "start" in line] == [0, 3]

    # All of these parts were used.
    assert [line["rollout/draft_length"] for line in lines] == [0, 2, 2, 2, 0, 0]
    assert all(line["kl/reference"] for line in lines)
    # Drafting begins in step 2, which trains the draft at once.
    assert [line["grad_norm/draft"] is not None for line in lines] == [True, True, False, True, False, True]
    state = jax.tree.leaves_with_path(saved_state(copied, 6))
    for name in ("memory", "tokens", "reference", "predicted"):
        leaves = [x for path, x in state if name in jax.tree_util.keystr(path)]
        assert leaves and all(np.asarray(x).any() for x in leaves), name


def test_row_100_rounds_are_not_timed_before_drafts_may_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Acceptance is looked at after step 3. Runs that are killed after that, or replayed, take the same choices."""
    measured: list[int] = []

    def measure(params: object, step: int) -> list[Cell]:
        measured.append(step)
        return [Cell(2, 14, k, 1 + k / 200, step) for k in (0, 2)]

    monkeypatch.setattr("launch.costs.cost_table.cell_timer", lambda _: SimpleNamespace(measure=measure))
    monkeypatch.setattr("launch.costs.cost_table.unused_draft_is_due", lambda _, step: step == 3)
    whole = tmp_path / "whole"
    run(replace(CONFIG, out=str(whole)))
    assert measured == [4]
    assert [line["rollout/draft_length"] for line in metrics(whole)] == [0, 0, 0, 2, 2, 2]
    for name, steps in (("after", [4]), ("during", [4, 4])):
        parts = tmp_path / name
        shutil.copytree(whole, parts)
        shutil.rmtree(parts / "checkpoints" / "6")
        if name == "during":
            (parts / "cost_table.json").unlink()
        run(replace(CONFIG, out=str(parts), resume=True))
        assert measured == steps
        assert_same_run(parts, whole, 6)
    replayed = replace(CONFIG, out=str(tmp_path / "replayed"), cost_table=str(whole / "cost_table.json"))
    run(replayed)
    assert measured == [4, 4]
    assert_same_run(tmp_path / "replayed", whole, 6)


def ahead(directory: Path) -> RunConfig:
    """Return the configuration of an asynchronous run in a directory, with a cost table in the directory above."""
    # One data shard has all sequences.
    table = write_cells(directory.parent, [cell._replace(slots=4) for cell in CELLS])
    return override(CONFIG, {"mesh.data": 1, "asynchronous.lag": 2, "cost_table": table, "out": str(directory)})


KILLED = """
import os, signal, sys, time
from pathlib import Path
from specjax.asynchronous.step import AsynchronousStep
from tests.launch.test_resume import ahead, run
directory, take, steps = Path(sys.argv[1]), AsynchronousStep.__call__, []
def step(self, state, prompts):
    steps.append(take(self, state, prompts))
    if len(steps) == 5:
        while not (directory / "checkpoints" / "3").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return steps[-1]
AsynchronousStep.__call__ = step
run(ahead(directory))
"""


@pytest.mark.slow
def test_an_asynchronous_run_that_was_killed_in_a_step_goes_on_exactly(tmp_path: Path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "parts")]
    killed = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saves(tmp_path / "parts") == [3] and [line["step"] for line in metrics(tmp_path / "parts")][-1] >= 3
    run(replace(ahead(tmp_path / "parts"), resume=True))
    run(ahead(tmp_path / "whole"))
    assert_same_run(tmp_path / "parts", tmp_path / "whole", 6)
    assert [line["asynchronous/lag"] for line in metrics(tmp_path / "parts")] == [0, 1, 2, 2, 2, 2]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(saved_state(tmp_path / "whole", 6))]
    assert sum("versions" in path for path in paths) == 4


@pytest.mark.parametrize("lag", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_exactly_with_the_sequences_that_it_carried_over(tmp_path: Path, lag: int | None):
    """The reward is the host's, so that a step is two programs. Prompts that wait for another step are in the save."""
    changes = {"rollout.draft_lengths": (), "rollout.carry_over": 0.5, "rollout.max_age": 1, "data.prompts": 4}
    changes |= {"asynchronous.lag": lag, "mesh.data": 2 if lag is None else 1, "draft_training.replay": 0}
    config = override(CONFIG, changes | {"draft.lookup.kind": "none", "out": str(tmp_path / "whole")})
    seen = list[tuple[int, ...]]()

    def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen.append(tuple(ids.tolist()))
        count = (tokens % 2).sum(axis=1).astype(np.float32)
        return count, (count > 2).astype(np.float32)

    reward = HostReward(score)

    def go_on(config: RunConfig) -> list[tuple[int, ...]]:
        """Return the ids of the prompts that were scored."""
        seen.clear()
        with open_run(config) as opened:
            experiment = build_experiment(config, takes_steps=True)
            train(experiment, reward, odd, opened, StopSignals(print), LongPhases())
        return [*seen]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    scored = go_on(config)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "6")
    again = go_on(replace(config, out=str(parts), resume=True))
    assert_same_run(parts, whole, 6)
    assert again[:3] == scored[3:6]
    lines = metrics(whole)
    assert sum(line["groups/unfinished"] for line in lines) and max(line["rollout/age_max"] or 0 for line in lines) == 1
    with refuses("mesh.data = ...: the run to resume has", ConfigError):
        go_on(override(config, {"resume": True, "mesh.data": 1 if lag is None else 2}))


@pytest.mark.slow
def test_a_run_killed_before_a_save_begins_anew(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, copied = copy(whole, tmp_path / "run"), tmp_path / "run"
    for step in saves(copied):
        shutil.rmtree(copied / "checkpoints" / str(step))
    (copied / "checkpoints" / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (copied / "diary.jsonl").unlink()  # it lists the complete checkpoints
    run(config)
    assert "No checkpoint found; starting from scratch" in capsys.readouterr().out.splitlines()
    assert_same_run(copied, whole, 6)


def test_other_problems_are_refused_on_resume(whole: Path, tmp_path: Path):
    """Their number is the same, and the draft's vocabulary holds their tokens."""
    experiment = build_experiment(copy(whole, tmp_path / "run"))
    first, second, *rest = experiment.problems.train
    for field in ("prompt", "answer"):
        problems = [replace(first, **{field: getattr(second, field) + "1"}), second, *rest]
        other = replace(experiment, problems=experiment.problems._replace(train=problems))
        with refuses("resume:...problems", ConfigError), open_run(experiment.config) as directory:
            train(other, odd, odd, directory, StopSignals(print), NOT_KEPT)


def test_without_an_intact_save_a_run_cannot_resume(whole: Path, tmp_path: Path):
    config, copied = copy(whole, tmp_path / "run"), tmp_path / "run"
    for step in saves(copied):
        damage(copied, step)
    before = sorted(copied.rglob("*"))
    with refuses("resume: .../6...damaged...none of 2", ConfigError):
        run(config)
    assert sorted(copied.rglob("*")) == before


def test_other_networks_are_refused_and_not_treated_as_damage(whole: Path, tmp_path: Path):
    """A run that does not fit the newest checkpoint is refused. The checkpoint before it is not tried."""
    config, copied = copy(whole, tmp_path / "run"), tmp_path / "run"
    stored = json.loads((copied / "config.json").read_text())
    stored["model"]["architecture"]["intermediate_size"] = 16
    (copied / "config.json").write_text(json.dumps(stored))
    wider = override(config, {"model.architecture.intermediate_size": 16})
    with refuses("resume: .../6: ...float32[8, 8]...float32[", ConfigError):
        run(wider)
    assert saves(copied) == [3, 6]


def test_programs_name_a_save(whole: Path):
    experiment = build_experiment(CONFIG)
    by_step = {step: restore_params(whole, experiment, step) for step in (3, 6)}
    means = {step: metrics(whole)[step - 1]["reward/mean"] or 0.0 for step in by_step}
    best = max(means, key=lambda step: (means[step], step))
    for which, step in (("newest", 6), ("best", best)):
        jax.tree.map(np.testing.assert_array_equal, restore_params(whole, experiment, which), by_step[step])  # pyright: ignore[reportArgumentType]
    with refuses("checkpoint: ...4...3, 6", ConfigError):
        restore_params(whole, experiment, 4)


@pytest.mark.slow
def test_a_run_continues_on_another_mesh(tmp_path: Path):
    """A run moved from one device to two and back, with another number of microbatches, keeps its tokens.

    Its metrics are equal up to rounding.
    """
    changes = {"rollout.draft_lengths": (), "rollout.verifier": "coupled", "steps": 4, "checkpoint.every": 2}
    changes |= {"draft_training.replay": 0, "draft_training.every": 1, "draft_training.max_every": 1}
    fixed, lines = override(CONFIG, changes), {}
    for before, after in ((1, 1), (1, 2), (2, 1)):
        start = override(fixed, {"out": str(tmp_path / f"{before}-{after}"), "mesh.data": before, "steps": 2})
        run(start)
        moved = override(start, {"mesh.data": after, "microbatches": 3 - after})
        run(replace(moved, steps=4, resume=True))
        lines[before, after] = metrics(tmp_path / f"{before}-{after}")
    expected = lines.pop((1, 1))
    assert expected[2]["reward/mean"] != expected[3]["reward/mean"]
    for found in lines.values():
        for line, other in zip(found, expected, strict=True):
            for name in ("reward/mean", "reward/accuracy", "rollout/tokens", "rollout/length_max"):
                assert line[name] == other[name], f"{name} of step {line['step']}"
            for name in ("loss/policy", "loss/draft", "kl/reference", "grad_norm/policy", "entropy"):
                assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), f"{name} of step {line['step']}"
