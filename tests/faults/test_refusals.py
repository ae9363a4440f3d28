"""Options that were accepted and do nothing, or ended in a traceback."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

import launch.run.checks as checks
from configs.schema import AsynchronousConfig, DraftConfig, ModelConfig
from configs.tiny import config as tiny
from launch.errors import ConfigError
from launch.predict.refusals import check_rollout
from launch.setup.checks import check_experts
from launch.setup.experiment import Experiment, build_experiment
from models.files import read_json
from specjax.parallel.mesh import MeshConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Rollout
from tests.refusals import refuses

MODEL = ModelConfig(architecture=replace(tiny.model.architecture, num_layers=1), dtype="float32")
CONFIG = replace(tiny, model=MODEL, draft=DraftConfig(kind="none"), rollout=replace(tiny.rollout, draft_length=0))
# Functions of other modules, called with what they do not take or returning something else. One exits.
FOREIGN = ["os:system", "builtins:print", "sys:exit"]


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return build_experiment(CONFIG)


def test_row_43_devices_for_experts_that_are_not_there(experiment: Experiment) -> None:
    ahead = AsynchronousConfig(lag=1, rollout_mesh=MeshConfig(expert=2))
    for config, name in (
        (replace(CONFIG, mesh=MeshConfig(expert=2)), "mesh"),
        (replace(CONFIG, asynchronous=ahead), "asynchronous.rollout_mesh"),
    ):
        with refuses(f"{name}.expert = 2: must be 1", ConfigError):
            check_experts(config, experiment.networks)


@pytest.mark.parametrize("share", [1e-12, 1e-300, 1e-9])
def test_row_43_a_share_that_waits_for_no_sequence(experiment: Experiment, share: float) -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, carry_over=share))
    with refuses(f"rollout.carry_over = {share}: finishes 0 of...must be 1 ..", ConfigError):
        checks._check_training_rollout(replace(experiment, config=config))


@pytest.mark.parametrize("name", FOREIGN)
def test_row_43_functions_that_are_none_of_that_kind(experiment: Experiment, name: str) -> None:
    sections: dict[str, Any] = {
        "draft.kind": {"draft": DraftConfig(kind=name)},
        "model.family": {"model": replace(MODEL, family=name)},
        "data.function": {"data": replace(CONFIG.data, function=name, arithmetic=None)},
    }
    for option, section in sections.items():
        with refuses(f"{option} = {name}: ", ConfigError):
            build_experiment(replace(CONFIG, **section))
    module, _, function = name.partition(":")
    foreign = getattr(__import__(module), function)
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, function=name), loss=replace(CONFIG.loss, function=name))
    given = replace(experiment, config=config, rollout_fn=foreign, loss_fn=foreign)
    with refuses(f"rollout.function = {name}: ", ConfigError):
        checks._check_training_rollout(given)
    with refuses(f"loss.function = {name}: ", ConfigError):
        checks._check_loss_function(given)


def test_row_43_an_error_names_the_line_of_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raising_draft.py").write_text('def build(context):\n    raise KeyError("x\\ny")\n')
    with refuses("draft.kind = raising_draft:build: KeyError: ...(line 2 of ...raising_draft.py)", ConfigError):
        build_experiment(replace(CONFIG, draft=DraftConfig(kind="raising_draft:build")))
    (tmp_path / "exiting.py").write_text("import sys\ndef rollout(*inputs):\n    sys.exit(3)\n")
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, function="exiting:rollout"))
    with refuses("rollout.function = exiting:rollout: SystemExit: 3 (line 3 of ...return a Rollout", ConfigError):
        checks._check_training_rollout(build_experiment(config))


def test_row_92_a_rollout_function_that_calls_the_host(experiment: Experiment) -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, function="tools:rollout"))

    def with_tool(tool: Callable[[jax.Array], jax.Array]) -> Experiment:
        def rollout_fn(policy: Any, drafter: Any, params: Any, prompts: Any, seed_step: Any, config: Any) -> Rollout:
            rollout = speculative_rollout(policy, drafter, params, prompts, seed_step, config)
            tokens, _ = jax.lax.scan(lambda tokens, _: (tool(tokens), None), rollout.tokens, None, length=2)
            return replace(rollout, tokens=tokens)

        return replace(experiment, config=config, rollout_fn=rollout_fn)

    calls = with_tool(lambda tokens: jax.pure_callback(np.asarray, tokens, tokens))
    stores = with_tool(lambda tokens: io_callback(np.asarray, tokens, tokens))
    refused = "rollout.function = tools:rollout: calls the host by "
    for given, name in ((calls, "pure_callback"), (stores, "io_callback")):
        with refuses(f"{refused}{name}; ...: tools between turns", ConfigError):
            checks._check_training_rollout(given)
    with refuses(refused, ConfigError):
        check_rollout(calls, config.rollout, (2, 4), {})
    checks._check_training_rollout(with_tool(lambda tokens: jax.debug.print("{}", tokens) or tokens))


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": {"a": 1, "c": 2, "a": [3]}}', '{"b": [{"a": 0, "a": 1}]}'])
def test_row_43_keys_that_stand_twice(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with refuses(f"{tmp_path / 'config.json'}: ...'a' stands twice"):
        read_json(tmp_path / "config.json")
