"""The notebook of examples/ runs, and progress in a notebook is a line that changes."""

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import launch.phases.progress as progress
from launch.console import ProgressConsole
from launch.phases.progress import Progress
from tests.documents import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_every_cell_of_the_notebook_has_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    for cell in CELLS:
        assert ast.parse("".join(cell["source"]))
        assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in cell["outputs"])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path):
    script = tmp_path / "first_run.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in CELLS))
    # As a user runs it, without the flags of tests/conftest.py.
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, ended.stderr
    # It writes to a directory of its own, and lists it at its end.
    assert "held-out accuracy" in ended.stdout and "/draft: config.json" in ended.stdout


class Display:
    """Stands in for a line in the output of a cell."""

    def __init__(self, data: dict[str, str], raw: bool, display_id: bool) -> None:
        self.texts = [data["text/plain"]]

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.texts.append(data["text/plain"])


@pytest.fixture
def displays(monkeypatch: pytest.MonkeyPatch) -> list[Display]:
    """Return a list that gets what is displayed by a stand-in for IPython."""
    shown, module = list[Display](), ModuleType("IPython.display")

    def display(*arguments: Any, **options: Any) -> Display:
        shown.append(Display(*arguments, **options))
        return shown[-1]

    module.display = display  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


@pytest.mark.parametrize(("seconds", "texts"), [(0.15, 3), (1.5, 11), (20.0, 11)])
def test_a_notebook_gets_one_line_that_changes(
    seconds: float, texts: int, displays: list[Display], monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a kernel does
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    output = io.StringIO()
    console = ProgressConsole(file=output, force_jupyter=True)
    with Progress("warm-up", 10, "steps", console=console) as phase:
        for _ in range(10):
            now[0] += seconds
            phase.advance()
    (line,) = displays
    assert (len(line.texts), line.texts[0]) == (texts, "warm-up: 0 of 10 steps; compiling ..")
    assert line.texts[-1].startswith("warm-up: 10 of 10 steps")
    console.print("text")
    assert output.getvalue() == "text\n", "no block of HTML"
