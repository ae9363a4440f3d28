"""Fixtures for tests of the programs."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import launch.train
from launch.cli.program import run_program
from launch.data.hub import fetch
from launch.phases import progress
from launch.run.start import Steps, make_steps
from launch.setup.experiment import Experiment
from specjax.rewards import RewardFn
from tests.launch.checkpoints import write_checkpoint, write_problems
from tests.launch.local_hub import LocalHub, serving
from tests.launch.programs import SHRUNK, Options, Refusal


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `policy`, a checkpoint with a tokenizer, and training and held-out problems."""
    directory = tmp_path_factory.mktemp("files")
    write_checkpoint(directory / "policy")
    write_problems(directory / "train.jsonl", ["1", "2", "3"] * 4)
    write_problems(directory / "test.jsonl", ["1", "2", "3"])
    return directory


@pytest.fixture(scope="module")
def shrunk(files: Path) -> Options:
    data = {"--data.train": str(files / "train.jsonl"), "--data.held-out": str(files / "test.jsonl")}
    return SHRUNK | {"--model.path": str(files / "policy")} | data


@pytest.fixture(scope="module")
def steps_once() -> Iterator[None]:
    """Let runs with the same options and reward share their steps: each would trace and lower them for 10 s."""
    made: dict[str, Steps] = {}

    def make(experiment: Experiment, reward_fn: RewardFn) -> Steps:
        options = replace(experiment.config, out=None, resume=False, cost_table=None)
        key = f"{options} {reward_fn}"
        # An asynchronous step keeps what it has under way: a run that goes on must not find it.
        if key not in made or options.asynchronous.lag is not None:
            made[key] = make_steps(experiment, reward_fn)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.train, "make_steps", make)
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Return a local hub. Its cache and the working directory are empty."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in ("hub", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        fetch.cache_clear()
        yield hub
        fetch.cache_clear()


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refusal:
    """Return a function that runs a program, verifies that it refuses with exit code 2, and returns its lines."""

    def refuse(main: Callable[[list[str]], int], arguments: list[str], refusals: int = 1) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        # On a slow machine, a program says that it still loads.
        monkeypatch.setattr(progress, "LOG_EVERY_S", 600.0)
        before = sorted(tmp_path.rglob("*"))
        assert run_program(main) == 2
        out, errors = capsys.readouterr()
        assert all(": has no effect with " in line for line in out.splitlines()) and errors.endswith("\n")
        lines = errors.splitlines()
        assert len(lines) == refusals and all(line.startswith("error: ") for line in lines)
        assert sorted(tmp_path.rglob("*")) == before
        return "\n".join(line.removeprefix("error: ") for line in lines)

    return refuse
