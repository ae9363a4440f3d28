"""Faults around the hub: signals and silence while files are fetched, and what its answers are taken for."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch.data import hub as hub_module
from launch.data.hub import checkpoint_directory, hub_name
from launch.data.prompts import Conversation, Message
from launch.data.tokenizer_files import copy_tokenizer
from launch.data.tokenizers import HuggingFaceTokenizer
from launch.errors import ConfigError
from tests.launch.conftest import hub as hub  # noqa: PLC0414
from tests.launch.local_hub import LocalHub
from tests.launch.tokenizer_files import WORDS, write_word_tokenizer
from tests.refusals import refuses

MODEL = "org/model"
FETCH = """
from launch.console import console
from launch.phases.signals import StopSignals, owning_process
from launch.data.hub import checkpoint_directory
with owning_process(), StopSignals(console.print):
    checkpoint_directory("model.path", "org/model")
"""


def push(hub: LocalHub, directory: Path) -> tuple[threading.Event, threading.Event]:
    """Add a checkpoint. Return an event set when a file is asked for, and one to set before any is sent."""
    directory.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors"):
        (directory / name).write_bytes(b"{}" * 1_000_000)
    hub.push("model", MODEL, directory)
    answer, asked, send = hub.answer, threading.Event(), threading.Event()

    def later(path: str) -> tuple[int, dict[str, str], bytes]:
        if "/resolve/" in path:
            asked.set()
            send.wait(60)
        return answer(path)

    hub.answer = later
    return asked, send


def test_row_53_a_signal_ends_a_fetch_at_once(hub: LocalHub, tmp_path: Path) -> None:
    asked, send = push(hub, tmp_path / "model")
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "other"), "HF_HUB_OFFLINE": "0"}
    variables |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-uc", FETCH], env=os.environ | variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert said == f"SIGINT: stopped fetching {MODEL}; the files that are complete stay in the hub's cache\n"
    send.set()


def test_row_53_a_line_is_printed_while_files_are_fetched(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub_module, "LOG_EVERY_S", 0.2)
    _, send = push(hub, tmp_path / "model")
    threading.Timer(1, send.set).start()
    checkpoint_directory("model.path", MODEL)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and all(line.startswith(f"fetching {MODEL}") and line.endswith(" s") for line in lines)
    assert " of " in lines[-1] and " MB, " in lines[-1]


@pytest.mark.parametrize(
    ("status", "said"), [(429, "429, too many requests"), (500, "500"), (503, "503"), (504, "504")]
)
@pytest.mark.parametrize("at", ["/api/", "/resolve/"])
def test_row_59_an_answer_of_the_hub_is_no_lost_network(
    status: int, said: str, at: str, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(hub, tmp_path / "model")[1].set()
    answer = hub.answer
    monkeypatch.setattr(hub, "answer", lambda path: (status, {}, b"") if at in path else answer(path))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the tries of the library
    with refuses(f"model.path = {MODEL}: ...the hub answers {said}", ConfigError):
        checkpoint_directory("model.path", MODEL)


@pytest.mark.parametrize("revision", ["main", "feature/new-head", "a/b/c", "refs/pr/1", "v1.0"])
def test_row_59_a_revision_may_have_slashes(revision: str) -> None:
    for path, kind, split in (
        (f"org/name@{revision}", "model", None),
        (f"org/name@{revision}:sub/test", "dataset", "test"),
    ):
        name = hub_name(path, kind)
        assert name is not None and (name.repo, name.revision, name.split, str(name)) == (
            "org/name",
            revision,
            split,
            path,
        )
    assert hub_name(f"org/name@{revision}/", "model") is None and hub_name("org/name@/x", "model") is None


def test_row_59_a_branch_with_slashes_is_fetched(hub: LocalHub, tmp_path: Path) -> None:
    push(hub, tmp_path / "model")[1].set()
    find = hub.find
    hub.find = lambda kind, name, revision: find(kind, name, "main" if revision == "feature/head" else revision)
    assert (checkpoint_directory("model.path", f"{MODEL}@feature/head") / "config.json").is_file()


def test_row_102_all_that_a_tokenizer_needs_travels(hub: LocalHub, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = tmp_path / "source"
    source.mkdir()
    write_word_tokenizer(source)
    (source / "chat_template.jinja").write_text("hello")
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("world {{ tools[0].function.name }}")
    kept = {"spiece.model", "tokenizer.model.v3", "qwen.tiktoken", "vocab.txt", "merges.txt", "tekken.json"}
    kept |= {"chat_template.json", "added_tokens.json", "special_tokens_map.json", "preprocessor_config.json"}
    others = {"tokenizer.py", "additional_chat_templates/run.py", "assets/vocab.txt", "1_Pooling/config.json"}
    for name in {"config.json", *kept, *others}:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}" if name.endswith("json") else "")
    hub.push("model", "org/model", source)
    fetched, copy = checkpoint_directory("model.path", "org/model"), tmp_path / "copy"
    copy.mkdir()
    copy_tokenizer(fetched, copy)
    for directory in (fetched, copy):
        found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        assert found >= kept | {"additional_chat_templates/tool_use.jinja"} and not found & others
    tools = [{"type": "function", "function": {"name": "box"}}]
    for prompt, text in ((("hello",), "hello"), (("hello", tools), "world box")):
        message = Message("user", prompt[0])
        for directory in (source, fetched, copy):
            ids = HuggingFaceTokenizer(directory).chat(Conversation([message], *prompt[1:]))
            assert " ".join(WORDS[each] for each in ids) == text
