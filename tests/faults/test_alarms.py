"""Faults in what a run says: causes that can raise an alarm, the next command of this run, whole tables."""

import importlib
import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from configs.override import override
from launch.cli.console import wide_console
from launch.cli.diagnose_command import diagnose_command
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run
from launch.cli.recipe_options import DIAGNOSE, SAME_AS_RUN
from launch.cli.recipes import load_recipe
from launch.run.console import STAGES, StepPrinter
from launch.run.draft_monitor import acceptance_alarm
from launch.run.metric_log import STANDARD_METRICS
from launch.run.records import as_recorded, check_same, differences


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("tiny", {}),
        ("gsm8k", {"model.path": "a/model@0a1b", "draft.path": "drafts/a b"}),
        ("gsm8k", {"model.path": "m", "model.feature_layers": (1, 2, 3), "data.chat_template_kwargs": {"think": [1]}}),
        ("tiny", {"rollout.stop_tokens": (1, 2), "rollout.draft_length": 2, "rollout.law.top_k": 5}),
        ("tiny", {"seed": 3, "data.system_prompt": 'Don\'t "quote"', "mesh.data": 2, "draft.lookup.kind": "ngram"}),
    ],
)
def test_row_61_the_command_has_the_options_of_the_run(recipe: str, options: dict[str, Any]) -> None:
    """It is read back as networks and problems of the run, which launch.diagnose requires."""
    config = override(replace(load_recipe(recipe), allow_truncated_law=True), options)
    recorded = json.loads(json.dumps(asdict(config)))
    words = shlex.split(diagnose_command(recorded, Path("runs/[1] x")))
    assert words[:6] == ["python", "-m", "launch.diagnose", recipe, "--checkpoint", "runs/[1] x"]
    again = parse_run([recipe, *words[6:], "--allow-truncated-law"], "", "", (*DIAGNOSE, "allow_truncated_law"))
    assert not list(differences(again, as_recorded(config)))
    assert len(words) <= 6 + 5 * len(options)
    assert ("--draft.path" in words) == ("draft.path" in options)


def test_row_61_the_command_of_a_recipe_of_ones_own_names_its_files() -> None:
    config = override(load_recipe("tiny"), {"name": "mine", "draft.path": "here"})
    said = diagnose_command(json.loads(json.dumps(asdict(config))), None)
    assert said == "python -m launch.diagnose CONFIG --draft.path here"
    assert diagnose_command({}, Path("run")) == "python -m launch.diagnose CONFIG --checkpoint run"


def test_row_61_the_alarm_ends_with_the_command_that_tells_its_causes_apart() -> None:
    said = acceptance_alarm(7, 0.1, 0.8, "python -m launch.diagnose tiny --checkpoint runs/tiny")
    assert said.startswith("ALARM at step 7: ") and "{" not in said
    assert said.endswith("Next: python -m launch.diagnose tiny --checkpoint runs/tiny tells them apart")


def test_row_59_the_model_of_the_run_may_be_at_another_path() -> None:
    config = override(load_recipe("gsm8k"), {"model.path": "org/model"})
    recorded = as_recorded(config)
    check_same(override(config, {"model.path": "/mnt/model"}), recorded, SAME_AS_RUN)
    for option, value in {"model.feature_layers": (1,), "draft.path": "x", "data.train": "x", "seed": 9}.items():
        with pytest.raises(ConfigError, match=f"^{option} = .*: the run has "):
            check_same(override(config, {option: value}), recorded, SAME_AS_RUN)


def test_row_59_no_column_is_cut_in_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    step = dict.fromkeys(STANDARD_METRICS) | {f"time/{stage}": 12345.678 for stage in STAGES}
    step |= {"perf/generation_tokens_per_s": 123456.0, "perf/speedup_vs_autoregressive": 12.34}
    with wide_console.capture() as captured:
        StepPrinter(1, tmp_path)(1, step)
    header, row = captured.get().splitlines()[1:3]
    assert header.split() == [*STAGES, "tokens/s", "speed-up"]
    assert row.split() == ["12345.678"] * len(STAGES) + ["123456", "12.34"]


@pytest.mark.parametrize("program", ["diagnose", "evaluate", "distill", "compare"])
def test_row_59_programs_with_tables_print_to_a_wide_console(program: str) -> None:
    assert importlib.import_module(f"launch.{program}").console is wide_console
