"""Faults that every program refuses before it loads anything."""

import importlib
from pathlib import Path

import pytest

import launch.cli.paths
from launch.cli.paths import CHECKPOINTS
from launch.errors import ConfigError
from specjax.checkpoint import SCORE
from tests.refusals import refuses

# Programs that take a checkpoint, with the words that they need beside it.
PROGRAMS = {
    "generate": ("gsm8k", "--prompt", "1 ?"),
    "distill": ("gsm8k", "--out", "new"),
    "export": ("gsm8k", "--out", "new"),
    **dict.fromkeys(("evaluate", "compare", "diagnose"), ("gsm8k",)),
}


# Every program gets the first two, and one gets all: they share the check.
MISSING = [
    ("nowhere", "newest", "checkpoint = nowhere: no such directory"),
    ("run", "5", "checkpoint_step = 5: ...run...3, 12"),
    ("run", "best", "checkpoint_step = best: ...run...3, 12"),
    ("file", "newest", "checkpoint = file: no such directory"),
    ("empty", "best", f"checkpoint = empty: ...{CHECKPOINTS}"),
    ("unsaved", "newest", f"checkpoint = unsaved: ...{CHECKPOINTS}"),
]


@pytest.mark.parametrize(
    ("program", "directory", "step", "expected"),
    [
        *((program, *missing) for program in PROGRAMS for missing in MISSING[:2]),
        *(("generate", *missing) for missing in MISSING[2:]),
    ],
)
def test_row_31_a_missing_checkpoint_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, directory: str, step: str, expected: str
) -> None:
    for path in ("empty", f"unsaved/{CHECKPOINTS}", *(f"run/{CHECKPOINTS}/{saved}/params" for saved in (3, 12))):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"launch.{program}")
    # The function that a program calls after it has parsed its command line.
    for name in ("build_experiment", "new_output_directory", "check_policy_source"):
        monkeypatch.delattr(module, name, raising=False)
    words = [*PROGRAMS[program], "--checkpoint", directory, "--checkpoint-step", step]
    with refuses(expected, ConfigError):
        module.main(words)


def test_row_31_a_checkpoint_that_is_there_passes(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS / "3" / SCORE).mkdir(parents=True)
    for step in ("newest", "best", 3):
        launch.cli.paths.check_checkpoint(str(tmp_path), step)  # pyright: ignore[reportArgumentType]
    launch.cli.paths.check_checkpoint(None, "best")
