"""Faults at the start of a run: refusals are shown together, each with the nearest value that works."""

from dataclasses import replace
from typing import Any

import pytest

from configs.override import override
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from launch.setup.experiment import build_experiment
from tests.refusals import assert_refused

LAG = {"asynchronous.lag": 1, "loss.importance_cap": 2.0, "distill.steps": 0}


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            LAG
            | {"asynchronous.rollout_mesh.data": 2, "mesh.data": 3, "mesh.fsdp": 2, "loss.importance_cap": None}
            | {"data.prompts": 8, "microbatches": 5, "distill.steps": 1, "distill.batch_size": 64},
            [
                "asynchronous.lag = 1: ...0...loss.importance_cap",
                "data.prompts = 8: ...mesh.data x mesh.fsdp = 6...nearest: 6 or 12",
                "microbatches = 5: ...data.prompts = 6...nearest microbatches: ",
                "distill.batch_size = 64: ...6; nearest: 60 or 66",
            ],
        ),
        (
            LAG | {"asynchronous.rollout_mesh.data": 4, "mesh.data": 3, "data.prompts": 7},
            ["asynchronous.rollout_mesh = (4, 1, 1, 1): ...nearest: 3 or 6", "data.prompts = 7: ...nearest: 6 or 9"],
        ),
        (
            LAG | {"asynchronous.rollout_mesh.data": 4, "mesh.data": 2, "data.prompts": 7},
            ["data.prompts = 7: ...mesh.fsdp = 2 and of asynchronous.rollout_mesh.data...= 4; nearest: 4 or 8"],
        ),
        (
            LAG | {"asynchronous.rollout_mesh.tensor": 4, "mesh.data": 2},
            ["asynchronous.rollout_mesh = (1, 1, 1, 4): ...multiple of 2; nearest: 2"],
        ),
        (
            {"mesh.data": 2, "data.prompts": 5, "selection.groups": 9, "microbatches": 7, "distill.steps": 0},
            [
                "data.prompts = 5: ...nearest: 4 or 6",
                "selection.groups = 9: ...data.prompts = 4; nearest: 4",
                "microbatches = 7: ...nearest microbatches: ",
            ],
        ),
        ({"mesh.data": 9, "data.prompts": 5}, ["mesh = (9, 1, 1, 1): ...9...8"]),
    ],
)
def test_row_63_all_refusals_of_a_start_are_shown(options: dict[str, Any], lines: list[str]) -> None:
    config = override(
        replace(load_recipe("tiny"), updates=replace(load_recipe("tiny").updates, minibatches=1)), options
    )
    with pytest.raises(ConfigError) as refused:
        build_experiment(config, takes_steps=True)
    assert len(refused.value.args) == len(lines), refused.value
    for line, expected in zip(refused.value.args, lines, strict=True):
        assert_refused(line, expected)


def test_row_63_the_pattern_of_the_docs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices generate, six train. The networks are not built."""

    def stop(_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("launch.setup.experiment.build_tokenizer", stop)
    options = {"asynchronous.rollout_mesh.data": 2, "mesh.data": 3, "mesh.fsdp": 2, "data.prompts": 48}
    with pytest.raises(InterruptedError):
        build_experiment(override(load_recipe("tiny"), LAG | options), takes_steps=True)
