"""The benchmark of whole steps beside TRL's: its turns, and what TRL's side is asked for."""

import ast
import json
import sys
from pathlib import Path

import pytest

from benchmarks import beside_trl
from benchmarks.start import Start

FAKE = """
import json, pathlib, sys
options = json.loads(sys.argv[1])
pathlib.Path(options["out"], "asked.json").write_text(sys.argv[1])
print(json.dumps({"seconds": [9.0] + [4.0] * (options["steps"] - 1), "lengths": [40.0], "peak_gib": 2.0}))
"""


def test_ratios_are_of_medians_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The first step of TRL's is left out, as ours is."""
    monkeypatch.setattr(beside_trl, "ours", lambda *args: Start(1.0, [2.0, 2.0, 8.0], 3.0))
    monkeypatch.setattr(beside_trl, "trl", lambda *args: {"seconds": [90.0, 4.0, 4.0], "lengths": [7], "peak_gib": 1})
    monkeypatch.setattr(beside_trl, "versions", lambda python: "trl 1")
    monkeypatch.setattr(sys, "argv", ["beside_trl", "--trl-python", "python", "--turns", "2"])
    beside_trl.main()
    said = capsys.readouterr().out
    assert "turn 2  specjax  2.0 2.0 8.0 s a step; peak 3.0 GiB" in said
    assert "turn 1  TRL over specjax 2.00; TRL's completions have 7 tokens" in said
    assert "TRL's median step over ours: 2" in said


def test_trl_gets_the_problems_and_options_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "trl_steps.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(beside_trl, "TRL_STEPS", fake)
    found = beside_trl.trl(Path(sys.executable), tmp_path / "model", 3, str(tmp_path))
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert found["seconds"] == [9.0, 4.0, 4.0]
    assert len(asked["prompts"]) == 3 * asked["groups"] and asked["group_size"] == 8 and asked["max_new_tokens"] == 48
    # The script itself reads exactly these options.
    tree = ast.parse(Path(beside_trl.__file__).with_name("trl_steps.py").read_text())
    read = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        if isinstance(node.value, ast.Name) and node.value.id == "options"
    }
    assert read == asked.keys()
