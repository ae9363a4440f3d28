"""Faults of chat templates: their time, the messages that they get, and templates that never end."""

import json
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from configs.override import override
from configs.schema import RunConfig
from launch.data import chat_template
from launch.data.problems import Problem, read_problems
from launch.data.prompts import prompt_fields
from launch.errors import ConfigError
from launch.run import pin_references
from launch.run.directory import open_run, record_config
from launch.run.pin_references import with_commits
from launch.setup.problems import build_tokenizer
from tests.faults.test_tokens import tokenizer_of
from tests.launch.tokenizer_files import WORDS, change, write_word_tokenizer
from tests.refusals import assert_refused, refuses


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


DATED = "{{ messages[0].content }} {{ 'it' if strftime_now('%Y-%m-%d %H:%M:%S') == '2026-01-02 03:04:05' else '?' }}"


def test_row_32_a_run_keeps_the_time_that_its_template_shows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(directory / "tokenizer_config.json", chat_template=DATED)
    config, run = override(RunConfig(name="x", steps=1), {"model.path": str(directory)}), directory / "run"
    now = Mock(wraps=datetime, **{"now.return_value": datetime(2026, 1, 2, 3, 4, 5)})  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(pin_references, "datetime", now)
    started = with_commits(config, starts=True)
    assert started.data.chat_template_time == "2026-01-02T03:04:05"
    with open_run(replace(started, out=str(run))) as path:
        record_config(path, replace(started, out=str(run)), report=str)
    now.now.return_value = datetime(2027, 1, 1)
    # Programs that read the run, and a start that goes on with it.
    for later in (with_commits(config, run), with_commits(config, run, starts=True)):
        assert later.data == started.data
        assert build_tokenizer(later).chat("hello") == [5, 8]
    assert build_tokenizer(with_commits(config)).chat("hello") == [5, 9]
    given = override(config, {"data.chat_template_time": "2025-01-01"})
    assert with_commits(given, run) == given
    recorded = json.loads((run / "config.json").read_text())
    del recorded["data"]["chat_template_time"]  # as in a run of an earlier version
    (run / "config.json").write_text(json.dumps(recorded))
    assert with_commits(config, run).data.chat_template_time is None
    assert with_commits(config, run, starts=True).data.chat_template_time == "2027-01-01T00:00:00"


def test_row_32_two_tokenizers_of_one_template_have_times_of_their_own(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=DATED)
    old, new = (
        tokenizer_of(directory, data__chat_template_time=time) for time in ("2026-01-02T03:04:05", "2027-01-01")
    )
    assert [old.chat("hello"), new.chat("hello"), old.chat("hello")] == [[5, 8], [5, 9], [5, 8]]
    for time in ("yesterday", ""):
        with refuses(f"data.chat_template_time = {time}: ...2026-11-28T09:30:00"):
            tokenizer_of(directory, data__chat_template_time=time)


CALLING = (
    "{% for m in messages %}<user> {{ m.content or '' }} "
    "{% for call in m.tool_calls or [] %}box {{ call.function.name }} "
    "{{ '?' if call.function.arguments.x == 1.5 }} {% endfor %}{% endfor %}<bot>"
)
CALL = {"type": "function", "function": {"name": "it", "arguments": {"x": 1.5}}}
ASKED = {"role": "user", "content": "hello"}


def read(directory: Path, *messages: object) -> Problem:
    path = directory / "problems.jsonl"
    path.write_text(json.dumps({"q": messages, "a": "1"}))
    return read_problems(path, "q", "a")[0]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "<user> box it ?"),
        ({"role": "assistant", "tool_calls": [CALL], "name": None, "refusal": []}, "<user> box it ?"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, "<user> box it ? box it ?"),
        ({"role": "assistant", "content": [{"type": "text", "text": "wor"}, "ld"]}, "<user> world"),
        ({"role": "tool", "content": [{"type": "text", "text": "world", "image": None}]}, "<user> world"),
    ],
)
def test_row_40_messages_reach_the_template_as_they_are(
    directory: Path, message: dict[str, object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(directory / "tokenizer_config.json", chat_template=CALLING)
    problem = read(directory, ASKED, message, ASKED)
    tokenizer = tokenizer_of(directory, data__instruction="{prompt} world")
    assert " ".join(WORDS[i] for i in tokenizer.chat(problem.prompt)) == f"<user> hello {text} <user> hello world <bot>"
    (directory / "again.jsonl").write_text(json.dumps({"q": prompt_fields(problem.prompt), "a": "1"}))
    assert read_problems(directory / "again.jsonl", "q", "a") == [problem]
    assert problem.question != read(directory, ASKED, {"role": "assistant", "content": "?"}, ASKED).question
    assert not caplog.records


def test_row_40_a_result_of_a_tool_may_come_last(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=CALLING)
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    problem = read(directory, ASKED, call, {"role": "tool", "content": "world", "tool_call_id": "1"})
    tokenizer = tokenizer_of(directory, data__instruction="{prompt} box")
    assert " ".join(WORDS[i] for i in tokenizer.chat(problem.prompt)) == (
        "<user> hello box <user> box it ? <user> world <bot>"
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "assistant", "content": None, "tool_calls": []}, "field 'content'"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"b": 1}}]}, "'cache_control'"),
        ({"role": "user", "content": [{"type": "text"}]}, "'text'"),
        ({"role": "user", "content": [1]}, "'text'"),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "field 'content'"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"x": float("nan")}]}, "'tool_calls'"),
        ({"role": "assistant", "content": "x", "name": "a\ud83d"}, "'name'"),
    ],
)
def test_row_40_what_a_template_cannot_get_is_refused_by_name(
    directory: Path, message: dict[str, object], named: str
) -> None:
    with refuses(f"/...problems.jsonl:1: ...{named}", ConfigError):
        read(directory, message, ASKED, message)


def test_row_40_fields_that_the_template_does_not_read_are_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(directory)
    for _ in range(2):
        tokenizer.chat(read(directory, ASKED | {"weight": 0, "think": 1}).prompt)
    (record,) = caplog.records
    assert_refused(record.getMessage(), f"model.path = {directory}: ...think, weight")
    with refuses(f"model.path = {directory}: ...tool_calls", ConfigError):
        tokenizer.chat(read(directory, ASKED, {"role": "assistant", "tool_calls": [CALL]}, ASKED).prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_row_47_a_template_that_never_ends_is_one_line(
    directory: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.2)
    tokenizer = tokenizer_of(directory)
    before = signal.getsignal(signal.SIGVTALRM)
    tokenizer.chat("hello")
    change(directory / "tokenizer_config.json", chat_template=template)
    with refuses(f"model.path = {directory}: ...0.2 s", ConfigError):
        tokenizer_of(directory).chat("hello")
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
