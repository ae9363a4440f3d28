"""The experiment on drafts, from warm-up to plots, at tiny sizes."""

import json
from pathlib import Path

import pytest

from benchmarks import draft_findings
from benchmarks.draft_runs import MODES
from configs import narrow
from configs.override import override


@pytest.mark.slow
def test_every_part_is_measured_and_put_in_tables_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"model.architecture.num_layers": 2, "model.feature_layers": (0, 1), "warmup.steps": 2, "eval.prompts": 8}
    monkeypatch.setattr(narrow, "config", override(narrow.config, small | {"eval.every": 0}))
    written = tmp_path / "runs.json"
    options = {"--steps": "2", "--answers": "128", "--distil": "4", "--draft-lengths": "2", "--repeats": "2"}
    argv = [part for option in options.items() for part in option]
    assert draft_findings.main([*argv, "--json", str(written), "--plots", str(tmp_path / "plots")]) == 0
    found = json.loads(written.read_text())
    assert {row["start"] for row in found["drafted"]} == {"in-domain", "generic", "random"}
    everywhere = {(start, mode) for start in ("in-domain", "generic", "random") for mode in ("frozen", "online")}
    assert {(run["start"], run["mode"]) for run in found["runs"]} == everywhere | {("in-domain", x) for x in MODES}
    assert all(len(run["alpha"]) == 2 for run in found["runs"])
    assert "the same in all runs, every step" in capsys.readouterr().out
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
