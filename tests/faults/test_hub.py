"""Faults around the hub: signals and silence while files are fetched, and what its answers are taken for."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch.data import hub as hub_module
from launch.data.hub import checkpoint_directory
from tests.launch.conftest import hub as hub  # noqa: PLC0414
from tests.launch.local_hub import LocalHub

MODEL = "org/model"
FETCH = """
from launch.cli.console import console
from launch.cli.signals import StopSignals
from launch.data.hub import checkpoint_directory
with StopSignals(console.print):
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
