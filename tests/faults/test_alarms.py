"""Faults in what a run says: causes that can raise an alarm, the next command of this run, whole tables."""

import importlib
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from configs.override import override
from launch.cli.options import parse_run
from launch.cli.recipe_options import SAME_AS_RUN
from launch.cli.recipes import load_recipe, recipes
from launch.console import wide_console
from launch.errors import ConfigError
from launch.run.console import STAGES, StepPrinter
from launch.run.draft_monitor import acceptance_alarm, diagnose_command
from launch.run.metric_log import STANDARD_METRICS
from launch.run.records import as_recorded, check_same
from models.files import write_json
from tests.refusals import refuses

OPTIONS = {
    "model.path": "a/model@0a1b",
    "model.feature_layers": (1, 2, 3),
    "data.chat_template_kwargs": {"think": [1]},
    "data.system_prompt": 'Don\'t "quote"',
    "rollout.stop_tokens": (1, 2),
    "rollout.law.temperature": 0.7,
    "mesh.data": 2,
}


@pytest.mark.parametrize(("name", "hint"), [("own-data", "did you mean own_data?"), ("another", "must be one of ")])
def test_a_recipe_that_is_missing_names_the_closest(name: str, hint: str) -> None:
    with refuses(f"CONFIG = {name}: ...{hint}...own_data, ", ConfigError):
        load_recipe(name)


@pytest.mark.parametrize(("recipe", "options"), [*((name, {}) for name in recipes()), ("gsm8k", OPTIONS)])
def test_row_61_the_directory_of_a_run_gives_its_options(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = override(load_recipe(recipe), options)
    write_json(tmp_path / "config.json", asdict(replace(config, out=str(tmp_path), resume=True)))
    assert load_recipe(str(tmp_path)) == config
    resumed = parse_run([str(tmp_path), "--resume"], "", "")
    assert (resumed.out, resumed.resume, resumed.data) == (str(tmp_path), True, config.data)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "config.json is not a run's; must be one of ...tiny"),
        (
            {"name": "a", "steps": 1, "rollout": {"law": {"new": 1}}},
            "rollout.law.new: is not an option of this version; give a recipe",
        ),
        ({"name": "a", "steps": 0, "rollout": {}}, "steps"),
    ],
)
def test_row_61_another_config_is_refused(recorded: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", recorded)
    with refuses(f"CONFIG = {tmp_path}: ...{message}", ConfigError):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize(
    "options", [["--draft.kind", "mtp"], ["--data.tokenizer", "checkpoint"], ["--model.path", "x"]]
)
def test_row_61_a_run_has_the_networks_of_the_run(options: list[str], tmp_path: Path) -> None:
    """Its stop tokens, and what of its draft is trained, follow from them."""
    write_json(tmp_path / "config.json", asdict(load_recipe("tiny")))
    with refuses(f"{options[0][2:]} = {options[1]}: must be ...; give a recipe as CONFIG", ConfigError):
        parse_run([str(tmp_path), *options], "", "")


def test_row_61_the_command_names_the_run() -> None:
    assert shlex.split(diagnose_command(Path("runs/[1] x"))) == ["python", "-m", "launch.diagnose", "runs/[1] x"]
    assert diagnose_command(Path("./tiny")).endswith(" ./tiny")


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
