"""launch.plan with an environment: in JAX within `generate`, on the host as the programs of a rollout in turns."""

from dataclasses import fields, replace
from typing import Any

import jax
import pytest

import launch.plan.plan
from configs.override import override
from launch.errors import ConfigError
from launch.plan import devices
from launch.plan.bound import smaller_options
from launch.plan.flops import Flops
from launch.plan.memory import TEMPORARIES
from launch.plan.options import PlanArgs, PlanConfig
from launch.plan.programs import Plan, Planned, PlannedName, program_names
from launch.plan.traffic import Collectives, Traffic
from launch.predict.memory import PROGRAMS, of_step_rollout
from launch.setup.state import abstract_state
from specjax.parallel.mesh import MeshConfig
from specjax.types import Prompts
from tests.launch.test_build_environment import ECHO, HERE
from tests.launch.test_plan import CONFIG, TWO_MESHES, experiment_of
from tests.refusals import refuses

WIDTH = 40
ON_HOST = override(CONFIG, {"environment.function": ECHO, "environment.answer_tokens": WIDTH})
IN_JAX = override(CONFIG, {"environment.function": "tests.launch.test_build_environment:traced"})
NAMES: tuple[PlannedName, ...] = ("begin", "decode", "answer", "finish", "update")


def test_an_answer_of_the_host_is_a_program_of_the_plan():
    experiment = experiment_of(override(ON_HOST, {"draft.kind": "none", "rollout.draft_length": 0}))
    plan, one_turn = Plan(experiment), experiment_of(override(experiment.config, {"environment.function": None}))
    assert program_names(experiment) == NAMES and program_names(one_turn) == PROGRAMS
    answer = plan.program("answer")
    rows = experiment.phases[0].slots
    # The policy has over 4,000 parameters. Without an answer, a row has room for a verification of one token.
    assert answer.flops.fixed > 2 * 4_000 * WIDTH * rows * 4 and not answer.flops.turn
    length = experiment.prompt_width + experiment.config.rollout.max_new_tokens
    caches, before = answer.memory["caches"], of_step_rollout(one_turn)["caches"]
    assert caches * (length + 1) == before * (length + WIDTH)
    assert answer.memory["copy for the rollout"] and answer.memory[TEMPORARIES]
    assert answer.memory.keys() == plan.program("finish").memory.keys()
    # It gets what `finish` returns.
    (_, prompts, rollout, _), _ = plan.trace("update").args_info
    assert isinstance(prompts, Prompts) and rollout.sampled.shape == rollout.tokens.shape


def test_an_environment_in_jax_is_part_of_the_rollout():
    experiment = experiment_of(IN_JAX)
    assert program_names(experiment) == PROGRAMS
    traced = Plan(experiment).trace("generate")
    assert traced.out_info.sampled is not None and traced.out_info.returns is not None


def test_rollouts_ahead_have_the_turns_of_an_environment_in_jax():
    """They are part of the state, by whose shapes a run resumes."""
    experiment = experiment_of(override(TWO_MESHES, {"environment.function": IN_JAX.environment.function}))
    (ahead,) = abstract_state(experiment).ahead
    traced = Plan(experiment).trace("generate").out_info[0]
    shapes = [{field.name: getattr(x, field.name) for field in fields(x)} for x in (ahead.rollout, traced)]
    first, second = ({name: (x.shape, x.dtype) for name, x in each.items() if x is not None} for each in shapes)
    assert first == second and first.keys() >= {"sampled", "returns", "turns"}


def test_tools_are_answered_by_the_host_and_no_tokenizer_is_read():
    experiment = experiment_of(override(CONFIG, {"environment.tools": (f"{HERE}:add",)}))
    rollout = experiment.step_config.rollout
    assert rollout.answers_on_host and rollout.room == 256
    with pytest.raises(AssertionError, match="a plan does not run programs"):
        rollout.environment.begin(0, 0)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("python:f", "environment.function = python:f: was a function of a script"),
        (f"{HERE}:not_an_environment", "environment.function = ...makes int, which has no step(turn)"),
    ],
)
def test_what_is_no_environment_is_one_line(function: str, message: str):
    with refuses(message, ConfigError):
        experiment_of(override(CONFIG, {"environment.function": function}))


def test_of_a_rollout_that_does_not_fit_only_the_largest_program_is_varied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    nothing, asked = Collectives(Traffic(), Traffic(), Traffic()), list[PlannedName]()
    monkeypatch.setattr(devices, "absent_gpus", lambda name, count, per_host: jax.devices()[:count])

    def compile_one(config: Any, plan: PlanConfig, name: PlannedName) -> Planned:
        asked.append(name)
        size = {"begin": 2**38, "answer": 2**40}.get(name, 2**30)
        return Planned({"caches": size}, nothing, Flops(3e12, 5e12), 1.0, {})

    monkeypatch.setattr(launch.plan.plan, "plan_program", compile_one)
    config = override(ON_HOST, {"mesh": MeshConfig()})
    launch.plan.plan.plan(config, PlanArgs(None, PlanConfig()))
    out = capsys.readouterr().out
    assert "".join(f"{name:>10}" for name in NAMES) in out
    for words in ("answer does not fit; ", "5.00 TFLOP a round, 3.00 an answer to all rows, 3.0 an", "one answer:"):
        assert words in out
    assert "--data.prompts 2" in out and "--rollout.phases" not in out
    assert asked[: len(NAMES)] == [*NAMES] and {*asked[len(NAMES) :]} == {"answer"}


def test_phases_are_no_remedy_with_an_environment_on_the_host():
    host, in_jax = (experiment_of(override(config, {"mesh": MeshConfig()})) for config in (ON_HOST, IN_JAX))
    first = [smaller_options(each, usable=2**40)[0].split()[0] for each in (host, in_jax)]
    assert first == ["--data.prompts", "--rollout.phases"]
    with refuses("phases = ...: must be empty with an environment on the host"):
        replace(host.step_config.rollout, phases=((2, 16),))
