import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import LogConfig
from configs.tiny import config as tiny
from launch.errors import ConfigError
from launch.run.metric_log import MetricLog, check_wandb, wandb_log
from tests.launch.programs import fake_wandb
from tests.refusals import refuses

CONFIG = replace(tiny, log=LogConfig(wandb_project="sums"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return fake_wandb(monkeypatch)


def test_steps_are_logged_to_the_project(tmp_path: Path, fake: list[Any]):
    with wandb_log(CONFIG, tmp_path) as also, MetricLog(tmp_path, also=also) as metric_log:
        metric_log.log(1, {"reward/mean": 0.5, "entropy": float("nan")})
    started, logged, ended = fake
    assert (started["project"], started["name"], started["dir"]) == ("sums", tmp_path.name, str(tmp_path))
    assert started["config"]["rollout"]["draft_length"] == 4
    assert (logged, ended) == ((1, {"reward/mean": 0.5}), "finish")


def test_a_run_that_fails_is_ended_and_resumed_under_its_id(tmp_path: Path, fake: list[Any]):
    with pytest.raises(KeyboardInterrupt), wandb_log(CONFIG, tmp_path):
        raise KeyboardInterrupt
    assert fake[-1] == "finish"
    for config in (replace(CONFIG, resume=True), CONFIG):
        with wandb_log(config, tmp_path):
            pass
    first, resumed, new = (options["id"] for options in fake if isinstance(options, dict))
    assert first == resumed != new


def test_no_project_and_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb(None)
    with wandb_log(tiny, tmp_path) as also:
        assert also is None
    with refuses("log.wandb_project = sums:...wandb", ConfigError):
        check_wandb("sums")
