"""Options of `launch.trainer.train`, without training."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch.trainer
from configs.override import override
from configs.schema import RunConfig
from configs.tiny import config as tiny
from launch.cli.errors import ConfigError
from launch.setup.experiment import Experiment
from launch.trainer import TrainedRun, train
from tests.refusals import refuses


def score(completion: str, answer: str) -> float:
    return float(completion == answer)


class Scorer:
    def __call__(self, completion: str, answer: str) -> float:
        return 1.0


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the configs of runs, which do not start."""
    started = list[RunConfig]()

    def run(config: RunConfig, reward_of: object) -> Any:
        started.append(config)
        return SimpleNamespace(signal=None, directory=Path("x"), experiment=None, state=None)

    monkeypatch.setattr(launch.trainer, "run", run)
    return started


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"rollout.group-size": 4}, "rollout.group_size", 4),
        ({"rollout.draft_length": 2}, "rollout.draft_lengths", ()),
        ({"rollout.draft-length": 2, "rollout.draft-lengths": [0, 2]}, "rollout.draft_lengths", (0, 2)),
        ({"draft.kind": "none"}, "rollout.draft_lengths", ()),
        ({"data.prompts": 2}, "microbatches", 16),
        ({"data.prompts": 2, "microbatches": 64}, "microbatches", 64),
        ({"rollout.phases": [[4, 2048], [1, 4096]]}, "rollout.phases", ((4, 2048), (1, 4096))),
        ({"data.chat_template_kwargs": {"x": [1]}}, "data.chat_template_kwargs", {"x": [1]}),
    ],
)
def test_options_are_those_of_the_command_line(
    configs: list[RunConfig], options: dict[str, Any], field: str, value: object
) -> None:
    train("m", "d.jsonl", score, options=options)
    (config,) = configs
    assert functools.reduce(getattr, field.split("."), config) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout.nope": 1}, "options: rollout.nope: ...--help all"),
        ({"nope.group_size": 1}, "options: nope.group_size: ...--help all"),
        ({"rollout": {"group_size": 1}}, "options: rollout: ...--help all"),
        ({"rollout.group_size": "x"}, "rollout.group_size = x: "),
        ({"rollout.group_size": 1}, "rollout.group_size = 1: ...at least 2...advantage.baseline = group"),
        ({"reward.also": ["format"], "reward.weights": [1, 2]}, "options: reward.also, reward.weights: ...function"),
    ],
)
def test_invalid_options_are_one_line(configs: list[RunConfig], options: dict[str, Any], message: str) -> None:
    with refuses(message, ConfigError):
        train("m", "d.jsonl", score, options=options)
    assert not configs


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (score, "python:score"),
        (functools.partial(score), "python:partial"),
        (Scorer(), "python:Scorer"),
        ("math", "math"),
    ],
)
def test_a_reward_may_be_any_callable(configs: list[RunConfig], reward: Any, name: str) -> None:
    train("m", "d.jsonl", reward)
    assert configs[0].reward.scorer == name


def test_a_run_without_a_draft_is_not_compared() -> None:
    config = override(tiny, {"rollout.draft_length": 0, "rollout.draft_lengths": ()})
    nothing: Any = None
    experiment = Experiment(config, nothing, nothing, nothing, nothing, nothing)
    with refuses("speedup.steps = 5: ...without a draft", ConfigError):
        TrainedRun(Path("x"), experiment, nothing, None).compare()
