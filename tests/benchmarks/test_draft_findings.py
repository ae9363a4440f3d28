"""The experiment on drafts, from warm-up to its plots, on very little of everything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import draft_findings
from benchmarks.draft_plots import save_plots
from benchmarks.draft_runs import MODES, Drafted, Position, Run
from configs import narrow
from configs.schema import EvalConfig


def test_what_was_measured_is_tabled_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    starts = ("in-domain", "generic", "random")
    found = [Drafted(start, k, 1.5, 1.2, (1.25, 1.0, 1.5)) for start in starts for k in (1, 3)]
    arms = [(start, mode) for start in starts for mode in ("frozen", "online")]
    runs = [Run(start, mode, [1.5, 2.0], [0.25, 0.75], ["a", "b"]) for start, mode in arms]
    rates = {"1 pass": [Position(8, 4), Position(4, 1)], "3 passes": [Position(8, 6), Position(6, 3)]}
    draft_findings.show(found, runs, rates)
    said = capsys.readouterr().out
    for part in ("1.25 [1.00, 1.50]", "1.75 +- 0.35", "the same in all runs, every step", "0.500 +- 0.354"):
        assert part in said
    draft_findings.show(found, [*runs, replace(runs[0], tokens=["a", "c"])], rates)
    assert "parted first in step 2" in capsys.readouterr().out
    save_plots(tmp_path / "plots", found, runs, rates)
    drawn = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert drawn == ["adaptation.png", "draft_length.png", "passes.png"]


@pytest.mark.slow
def test_every_part_is_measured_tabled_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = replace(narrow.config.model.architecture, num_layers=2)
    small = replace(
        narrow.config,
        model=replace(narrow.config.model, architecture=shape, feature_layers=(0, 1)),
        warmup=replace(narrow.config.warmup, steps=2),
        eval=EvalConfig(prompts=8),
    )
    monkeypatch.setattr(narrow, "config", small)
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
