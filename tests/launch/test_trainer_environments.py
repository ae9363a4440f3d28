"""Tools and environments as `launch.trainer.train` takes them, without training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch.trainer
from configs.schema import RunConfig
from launch.environments.build import Local
from launch.errors import ConfigError
from launch.trainer import train
from tests.launch.sample_environments import WithoutBeginAndEnd, add, bare
from tests.refusals import refuses

HERE = "tests.launch.sample_environments"
Started = tuple[RunConfig, Local | None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Return the configs and local environments of runs, which do not start."""
    runs = list[Started]()

    def run(config: RunConfig, reward_of: object, local: Local | None) -> Any:
        runs.append((config, local))
        return SimpleNamespace(signal=None, directory=Path("x"), experiment=None, state=None)

    monkeypatch.setattr(launch.trainer, "run", run)
    return runs


def make() -> WithoutBeginAndEnd:
    return WithoutBeginAndEnd()


class Callable_:
    def __call__(self) -> WithoutBeginAndEnd:
        return WithoutBeginAndEnd()


CALLABLE = Callable_()
SCORED = {"reward": "math"}


@pytest.mark.parametrize(
    ("given", "tools", "function", "local", "reward"),
    [
        ({"tools": [add, bare]}, ("python:add", "python:bare"), None, Local(tools=[add, bare]), "math"),
        ({"tools": (f"{HERE}:add",)}, (f"{HERE}:add",), None, None, "math"),
        ({"environment": WithoutBeginAndEnd}, (), "python:WithoutBeginAndEnd", Local(make=WithoutBeginAndEnd), None),
        ({"environment": make}, (), "python:make", Local(make=make), "math"),
        ({"environment": CALLABLE}, (), "python:Callable_", Local(make=CALLABLE), None),
        ({"environment": f"{HERE}:add"}, (), f"{HERE}:add", None, None),
    ],
)
def test_functions_are_local_and_names_are_options(
    started: list[Started],
    given: dict[str, Any],
    tools: tuple[str, ...],
    function: str | None,
    local: Local | None,
    reward: str | None,
) -> None:
    options = {"rollout.turns": 3, "environment.call_limit_s": 2, "rollout.turn_tokens": 64}
    train("m", "d.jsonl", reward, options=options, **given)
    ((config, found),) = started
    assert (config.environment.tools, config.environment.function, found) == (tools, function, local)
    assert (config.rollout.turns, config.rollout.turn_tokens, config.environment.call_limit_s) == (3, 64, 2)
    assert config.reward.scorer == (reward or "environment")


def test_without_an_environment_there_is_none(started: list[Started]) -> None:
    train("m", "d.jsonl", "math")
    assert started[0][1] is None and not started[0][0].environment.names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "reward = None: must be a function or the name of a scorer without environment and teacher"),
        ({"tools": [add], "environment": make}, "tools = ...: must be empty with an environment"),
        ({"tools": [add, f"{HERE}:add"]}, "tools = ...: must all be functions, or all be names"),
        (
            {"tools": [add]},
            "reward = None: must be a function or the name of a scorer without environment and teacher",
        ),
        ({"tools": ["add"]} | SCORED, "environment.tools = add: must be package.module:name"),
        ({"tools": add}, "tools = <function add...: must be a list of functions, or of names"),
        ({"tools": f"{HERE}:add"}, "tools = ...: must be a list of functions, or of names"),
        ({"environment": WithoutBeginAndEnd()}, "environment = ...: must be a class or function that makes one"),
        ({"environment": "make"}, "environment.function = make: must be package.module:name"),
        (
            {"tools": [add], "options": {"rollout.carry_over": 0.5}} | SCORED,
            "rollout.carry_over = 0.5: must be None with an",
        ),
        ({"environment": make, "options": {"environment.calls": "hermes"}}, "environment.calls = hermes: must be None"),
    ],
)
def test_what_contradicts_itself_is_one_line(started: list[Started], given: dict[str, Any], message: str) -> None:
    with refuses(message, ConfigError):
        train("m", "d.jsonl", **given)
    assert not started
