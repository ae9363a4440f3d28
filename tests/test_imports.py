"""Imports go only from higher to lower packages, and from higher to lower rooms within one. Programs are short.

No other package may import `benchmarks`, the highest one.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("specjax", "models", "configs", "launch", "benchmarks")
# Lowest row first. A room may import itself and the rooms of lower rows, but no other room of its row. Programs and a
# package's `__init__` are not listed: they may import all rooms.
ROOMS = {
    "specjax": (
        ("short_repr",),
        ("chunks", "divergences", "options", "types"),
        ("environments", "shared_prompts"),
        ("adapters", "kernels", "keys", "parallel"),
        ("cache", "param_labels", "program", "sampling"),
        ("log_probs", "quantization", "verify", "vocabulary"),
        ("drafters",),
        ("rollout",),
        ("carry_over", "cost", "rewards"),
        ("train",),
        ("asynchronous", "checkpoint_integrity", "writing"),
        ("checkpoint", "testing"),
    ),
    "models": (
        ("files", "json_fields", "rope"),
        ("config",),
        ("params",),
        ("layers", "lora"),
        ("moe",),
        ("decoder",),
        ("drafts",),
        ("published", "sheets"),
        ("checkpoints",),
        ("hf",),
    ),
    "configs": (
        ("schema",),
        ("override",),
        ("algorithms", "own_data", "qwen3_math", "smollm2_extraction"),
        ("qwen3_30b_a3b",),
    ),
    "launch": (
        ("errors", "timing"),
        ("jobs",),
        ("console",),
        ("phases",),
        ("cli",),
        ("data",),
        ("rewards",),
        ("environments",),
        ("setup",),
        ("acceptance", "costs", "exports", "predict"),
        ("comparison", "distillation", "evaluation", "plan"),
        ("diagnosis", "run"),
        ("report",),
        # A program that is also called from Python.
        ("train",),
    ),
    "benchmarks": (
        ("networks", "plotting", "real_report", "slow_tool", "smollm2", "start"),
        ("bench", "simulation"),
        ("algorithms", "cost_model", "draft_runs"),
        ("draft_plots",),
        ("gpu", "simulator_validation"),
    ),
}


def rank(module: str) -> tuple[int, int, str]:
    """Return (row of the package, row of the room, room)."""
    package, room = (module.split(".") + [""])[:2]
    rows = ROOMS[package]
    found = [row for row, rooms in enumerate(rows) if room in rooms]
    assert found or not (ROOT / package / room).is_dir() or not room, f"{package}/{room} is a room without a row"
    above_all = not found or module.endswith("__main__")
    return PACKAGES.index(package), len(rows) if above_all else found[0], room


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Return the project's modules that a file imports, in functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import room` names the room.
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_run_downward(path: Path):
    own = rank(module_of(path))
    for name in imports(path):
        other = rank(name)
        assert other[:2] < own[:2] or other == own, f"{module_of(path)} imports {name}"


MOST_LINES = 80
# It also holds the run, from its checks to its results and report.
MOST_LINES_OF_TRAIN = 170
# Of `benchmarks` only the programs that have rooms. Its others are one file each.
PROGRAMS = [path for path in (ROOT / "launch").rglob("*.py") if "run_program(main)" in path.read_text()]
PROGRAMS += [ROOT / "benchmarks/bench/__main__.py", ROOT / "benchmarks/simulate.py"]


@pytest.mark.parametrize("path", PROGRAMS, ids=module_of)
def test_programs_parse_call_and_print(path: Path):
    """Other code belongs in a room."""
    most = MOST_LINES_OF_TRAIN if module_of(path) == "launch.train" else MOST_LINES
    assert len(path.read_text().splitlines()) <= most
