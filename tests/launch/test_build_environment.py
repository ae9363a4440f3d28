"""The environment of a run: what is refused at its start, and conversations as the chat template writes them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch.generate
from configs.override import override
from configs.schema import RunConfig
from launch.data.problems import Problem
from launch.environments.build import Local, environment_of
from launch.environments.token_environment import TokenEnvironment
from launch.errors import ConfigError
from launch.run.start import Start, not_repeatable, report_start
from launch.setup.problems import build_tokenizer
from specjax.environments import Environment
from specjax.parallel import processes
from specjax.types import Ending
from tests.launch import sample_environments
from tests.launch.chat_tokenizers import CALLS, CHATML, write_chat_tokenizer
from tests.launch.sample_environments import add
from tests.launch.test_joint import FAMILIES, rendered, sampled
from tests.refusals import refuses
from tests.specjax.sums import Sums

HERE = "tests.launch.sample_environments"
ADD, ECHO = f"{HERE}:add", f"{HERE}:WithoutBeginAndEnd"
PHASES = {"rollout.phases": ((4, 20),)}


def config_of(directory: Path | None, options: dict[str, Any]) -> RunConfig:
    source = {"data.tokenizer": "bytes"} if directory is None else {"model.path": str(directory)}
    given = {name if "." in name else f"environment.{name}": value for name, value in options.items()}
    return override(RunConfig(name="x", steps=1), source | given)


def build(directory: Path | None, options: dict[str, Any], local: Local | None = None) -> Any:
    """Return what the environment of these options is of problems."""
    config = config_of(directory, options)
    return environment_of(config, build_tokenizer(config), local)


def traced() -> Sums:
    return Sums(16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": f"{HERE}:not_an_environment"}, "environment.function = ...makes int, which has no step(turn); "),
        ({"function": f"{HERE}:StepsWithoutTurn"}, "environment.function = ...has no step(turn); must make"),
        ({"function": f"{HERE}:unmade"}, "environment.function = ...RuntimeError: cannot be made...; must be a class"),
        ({"function": f"{HERE}:NOT_A_FUNCTION"}, "environment.function = ...NOT_A_FUNCTION is not a function; must be"),
        ({"function": "nowhere:f"}, "environment.function = nowhere:f: ModuleNotFoundError: ...'nowhere'; must be"),
        ({"function": f"{HERE}:Ad"}, "environment.function = ...no attribute 'Ad'; must be"),
        ({"function": ECHO} | PHASES, f"rollout.phases = ((4, 20),): must be empty with environment.function = {ECHO}"),
        (
            {"function": ECHO, "asynchronous.lag": 0},
            f"asynchronous.lag = 0: must be None with environment.function = {ECHO}",
        ),
        ({"tools": (ADD,)}, f"environment.tools = {ADD}: needs a chat template...; must be empty"),
        ({"function": "python:f"}, "environment.function = python:f: was a function of a script; give --environment."),
        ({"tools": ("python:f", "python:g")}, "environment.tools = python:f: was a function of a script"),
    ],
)
def test_what_is_no_environment_of_a_run_is_one_line(options: dict[str, Any], message: str) -> None:
    with refuses(message, ConfigError):
        build(None, options)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {"tools": (ADD,)}, "environment.tools = ...needs a chat template that shows tools"),
        (CHATML, {"tools": ("nowhere:f",)}, "environment.tools = nowhere:f: ModuleNotFoundError"),
        (CHATML, {"tools": (ADD,)} | PHASES, "rollout.phases = ...must be empty with environment.tools = "),
        (CHATML, {"tools": (f"{HERE}:bare",)}, "environment.tools = bare: ...docstring"),
        (CHATML, {"tools": (ADD, ADD)}, "environment.tools = add, add: two tools are named add; names must differ"),
        (CHATML, {"tools": (ADD,), "answer_tokens": 8}, "environment.answer_tokens = 8: the chat template takes"),
        (CHATML.replace(CALLS, ""), {"tools": (ADD,)}, "environment.calls = None: the chat template shows no known"),
        (
            CHATML.replace("{{ message.content }}", "{{ message.content if loop.last else '' }}"),
            {"function": ECHO},
            "model.path = ...its chat template...; must be one that only appends",
        ),
    ],
)
def test_what_a_chat_template_cannot_continue_is_one_line(
    tmp_path: Path, template: str | None, options: dict[str, Any], message: str
) -> None:
    with refuses(message, ConfigError):
        build(write_chat_tokenizer(tmp_path, template), options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calls": "hermes"}, "environment.calls = hermes: must be None without tools"),
        ({"function": ECHO, "calls": "hermes"}, "environment.calls = hermes: must be None without tools"),
        ({"tools": (ADD,), "calls": "xml"}, "environment.calls = xml: must be one of hermes, qwen3_coder"),
        ({"function": ECHO, "tools": (ADD,)}, "environment.tools = ...must be empty with function"),
        ({"function": "add"}, "environment.function = add: must be package.module:name"),
        ({"tools": (ADD, "add")}, "environment.tools = add: must be package.module:name"),
        ({"call_limit_s": 0.0}, "environment.call_limit_s = 0.0: must be a number above 0"),
        ({"answer_tokens": 0}, "environment.answer_tokens = 0: must be an integer at least 1"),
        ({"reward.scorer": "environment"}, "reward.scorer = environment: needs environment.function"),
        ({"rollout.turn_tokens": 5}, "rollout.turn_tokens = 5: must be None without an environment"),
        ({"tools": (ADD,), "rollout.carry_over": 0.5}, "rollout.carry_over = 0.5: must be None with an environment"),
        ({"tools": (ADD,), "rollout.function": "a:b"}, "rollout.function = a:b: must be None with an environment"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(options: dict[str, Any], message: str) -> None:
    with refuses(message):
        config_of(None, options)


def test_an_environment_in_jax_has_a_lag_phases_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count", lambda: 2)
    environment = build(None, {"function": f"{__name__}:traced", "asynchronous.lag": 0} | PHASES)([])
    assert isinstance(environment, Environment) and environment == Sums(16)
    with refuses(f"environment.function = {ECHO}: answers in one process; must be an environment in JAX", ConfigError):
        build(None, {"function": ECHO})


def test_an_environment_in_text_may_have_the_names_of_one_in_jax() -> None:
    assert isinstance(sample_environments.Grid(), Environment)
    local = Local(make=sample_environments.Grid)
    assert isinstance(build(None, {"function": "python:Grid"}, local)([]), TokenEnvironment)


@pytest.mark.parametrize(("name", "deterministic"), [("Seeded", True), ("Clocked", False)])
def test_an_environment_says_whether_it_can_be_repeated(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(None, {"function": f"{HERE}:{name}"})
    build_environment: Any = environment_of(config, build_tokenizer(config))
    step_config = replace(config, rollout=replace(config.rollout, environment=build_environment([])))
    draft = SimpleNamespace(differences=lambda: None)
    run: Any = SimpleNamespace(step_config=step_config, networks=SimpleNamespace(draft=draft))
    warned = list[tuple[int, str]]()
    events = SimpleNamespace(record_summary=lambda *_: None, warn=lambda *said: warned.append(said))
    monkeypatch.setattr("launch.run.start.summarize", lambda *_: {})
    logs: Any = SimpleNamespace(events=events)
    report_start(run, logs, Start(None, 3, None), continuing=True, found=True)  # pyright: ignore[reportArgumentType]
    line = f"{HERE}:{name}: deterministic = False: steps after 3 may differ from those of an unbroken run"
    assert warned == ([] if deterministic else [(3, line)])


def test_a_lookup_in_other_rows_cannot_be_repeated_with_an_environment_on_the_host() -> None:
    history = {"function": f"{HERE}:Seeded", "draft.lookup.kind": "history"}
    reasons = list[str | None]()
    for options in (history, history | {"rollout.verifier": "coupled"}, history | {"function": f"{__name__}:traced"}):
        config = config_of(None, options)
        build_environment: Any = environment_of(config, build_tokenizer(config))
        reasons.append(
            not_repeatable(replace(config, rollout=replace(config.rollout, environment=build_environment([]))))
        )
    assert reasons[0] is not None and reasons[0].startswith("draft.lookup.kind = history: reads other rows")
    assert reasons[1:] == [None, None]


def test_a_tool_says_whether_it_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_chat_tokenizer(tmp_path, CHATML)
    assert build(directory, TOOLS)([]).deterministic
    monkeypatch.setattr(add, "deterministic", False, raising=False)
    assert not build(directory, TOOLS)([]).deterministic


def call(a: int, b: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": a, "b": b}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "0", "function": function}]}


def text(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


TOOLS = {"tools": (ADD,)}
# Each turn, and the message that answers it.
SUMS = [
    (call(1, 2), {"role": "tool", "name": "add", "content": "3"}),
    (call(3, -5), {"role": "tool", "name": "add", "content": "-2"}),
    (text("abcd"), None),
]
ECHOES = [(text(said), {"role": "user", "content": said}) for said in ("abcd", "ab.cd")]


@pytest.mark.parametrize(("template", "stop"), FAMILIES, ids=["chatml", "llama"])
@pytest.mark.parametrize(
    ("options", "local", "turns"),
    [
        (TOOLS, None, SUMS),
        ({"tools": ("python:add",)}, Local(tools=[add]), SUMS),
        ({"function": ECHO}, None, ECHOES),
        ({"function": "python:Echo"}, Local(make=sample_environments.WithoutBeginAndEnd), ECHOES),
    ],
    ids=["tools", "tools in threads", "environment", "environment in threads"],
)
def test_a_conversation_has_the_ids_of_the_templates_own_rendering(
    tmp_path: Path, template: str, stop: str, options: dict[str, Any], local: Local | None, turns: list[Any]
) -> None:
    """The ids that a model would sample are played by hand."""
    config = config_of(write_chat_tokenizer(tmp_path, template, stop), options)
    tokenizer: Any = build_tokenizer(config)
    environment_for: Callable[..., Any] | None = environment_of(config, tokenizer, local)
    assert environment_for is not None
    environment = environment_for([Problem(prompt="abcd?", answer="")])
    context, messages = tokenizer.chat("abcd?"), [{"role": "user", "content": "abcd?"}]
    assert context == rendered(tokenizer, messages, tokenizer.tools)
    episode = environment.begin(0, 7)
    for turn, answer in turns:
        ids = sampled(tokenizer, messages, turn, tokenizer.tools)
        found = episode.step(ids).result()
        assert found.ending == (Ending.STOP if answer is None else Ending.GOING) and found.reward == 0
        context, messages = context + ids + list(found.tokens), [*messages, turn, *([answer] if answer else [])]
        assert answer is None or context == rendered(tokenizer, messages, tokenizer.tools)
    assert episode.end().result() == 0.0
    environment.episodes.close()


def test_a_prompt_is_shown_with_its_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "--model.path", str(write_chat_tokenizer(tmp_path, CHATML))
    asked = "own_data", *model, "--prompt", "abcd", "--samples", "0", "--environment.tools", ADD
    assert launch.generate.main([*asked]) == 0
    assert '"name": "add", "description": "Add two numbers."' in capsys.readouterr().out
