"""The guides' examples run: Python unchanged, commands with tiny networks."""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import launch.cli.paths
from launch.cli.recipes import load_recipe
from models.files import write_json
from tests.documents import ROOT, blocks, commands, execute, printed_commands, write_files
from tests.launch.checkpoints import write_checkpoint, write_problems
from tests.launch.programs import SHRUNK, Options, argv

DOCS = ROOT / "docs"
GUIDES = ("cost_model.md", "drafters.md", "huggingface.md", "rewards.md", "rollout.md", "stop_rule.md", "turns.md")
# Their commands also run, on networks of almost no size.
WITH_COMMANDS = ("huggingface.md", "rewards.md")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PAGES += sorted(ROOT.glob("benchmarks/**/*.md"))
PAGES = [page for page in PAGES if printed_commands(page.read_text())]
RESULTS = [path for ending in ("txt", "json") for path in sorted((ROOT / "benchmarks/results").rglob(f"*.{ending}"))]
RESULTS = [path for path in RESULTS if "python -m" in path.read_text()]
TAKE_NO_OPTIONS = ("benchmarks.design_case", "benchmarks.simulator_validation")
# Blocks that take seconds. The quick blocks of a guide do not need them.
LONG = re.compile(r"\b(assert_lossless|make_generate|make_train_step)\(")
WITH_LONG = ("drafters.md", "rollout.md", "stop_rule.md", "turns.md")

# Options that make a program's work small. The last value of an option given twice counts.
DISTILL = {"--distill.answers": "32", "--distill.chunks": "2", "--distill.batch-size": "16", "--distill.steps": "4"}
SMALL: dict[str, Options] = {
    "launch.compare": {"--steps": "2", "--draft-lengths": "0,2", "--microbatches": "1"},
    "launch.distill": DISTILL | {"--distill.microbatches": "2", "--temperatures": "0"},
    "launch.evaluate": {"--samples": "2"},
    "launch.train": {"--steps": "2", "--checkpoint.every": "1"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary working directory that Python imports from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_inputs(guide: str, place: Path) -> None:
    """Provide what a guide expects: its files, a checkpoint, problems, the recipe of another guide."""
    if guide in WITH_COMMANDS:
        pytest.importorskip("math_verify")
        # An existing local path takes precedence over a name on the hub.
        write_checkpoint(place / "Qwen/Qwen3-0.6B")
        (place / "openai/gsm8k:main").mkdir(parents=True)
        write_problems(place / "openai/gsm8k:main/train", ["1", "2", "3"] * 4)
        write_problems(place / "openai/gsm8k:main/test", ["1", "2", "3"])
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        problems = {"prompt": [f"{number} and 1 ?" for number in range(300)], "answer": ["1", "2"] * 150}
        parquet.write_table(pyarrow.table(problems), place / "my_problems.parquet")
    for text in ((DOCS / "huggingface.md").read_text(), (DOCS / guide).read_text()):
        write_files(text, place)


def run(guide: str, place: Path, capsys: pytest.CaptureFixture[str], *, quick: bool) -> None:
    """Run the Python blocks in order, with the names of earlier ones, and compare their output with the guide's."""
    write_inputs(guide, place)
    names: dict[str, Any] = {}
    for code in blocks((DOCS / guide).read_text(), "python"):
        if not (quick and LONG.search(code)):
            execute(code, DOCS / guide, names)
            said = capsys.readouterr().out
            for expected in re.findall(r"print\(.*\)  # (\[.*?\])", code):
                assert expected in said


@pytest.mark.parametrize("guide", GUIDES)
def test_its_python_runs(guide: str, place: Path, capsys: pytest.CaptureFixture[str]):
    run(guide, place, capsys, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("guide", WITH_LONG)
def test_all_of_its_python_runs(guide: str, place: Path, capsys: pytest.CaptureFixture[str]):
    run(guide, place, capsys, quick=False)


class Parsed(BaseException):
    """Raised when a program has parsed its command line."""


def end_after(parse: Callable) -> Callable:
    def parsed(*args: object, **options: object) -> None:
        parse(*args, **options)
        raise Parsed

    return parsed


# What stands for the words in capitals of a command. Other words are files, which a parser does not open.
STAND_INS = dict(CONFIG="tiny", RECIPE="tiny", GPU="h100", I="0") | {"HOST:PORT": "host:1"}


def parses(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify that the program exists and that its parser accepts the words. Nothing else of the program runs."""
    program = importlib.import_module(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)
    words = [STAND_INS.get(word, word) for word in words]
    if module in TAKE_NO_OPTIONS:
        assert not words
        return
    if module.startswith("launch.") and words and words[0].startswith(("RUN", "DIR", "runs/")):
        Path(words[0]).mkdir(parents=True, exist_ok=True)
        write_json(Path(words[0]) / "config.json", asdict(load_recipe("tiny")))
    for path in (Path(word).parent for word in words if word.endswith(".json")):
        path.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch:
        for name in ("parse", "parse_run", "parse_run_and"):
            if hasattr(program, name):
                patch.setattr(program, name, end_after(getattr(program, name)))
        name = "parse_known_args" if "parse_known_args" in Path(str(program.__file__)).read_text() else "parse_args"
        patch.setattr(argparse.ArgumentParser, name, end_after(getattr(argparse.ArgumentParser, name)))
        patch.setattr(launch.cli.paths, "saved_steps", lambda directory: [1])
        patch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed):
            program.main(*[words][: len(inspect.signature(program.main).parameters)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_commands_are_understood(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch):
    write_files((DOCS / "huggingface.md").read_text(), place)
    if page.parent == DOCS:
        write_inputs(page.name, place)
    for module, words in printed_commands(page.read_text()):
        if "VALUE" not in words:  # else the form of a command
            parses(module, words, monkeypatch)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_row_101_commands_of_results_are_understood_or_dated(path: Path, place: Path, monkeypatch: pytest.MonkeyPatch):
    text = path.read_text()
    if re.search(r'^(commit    |  "commit": ")[0-9a-f]{8}, of which', text, re.MULTILINE):
        return
    if path.suffix == ".json":
        text = text.replace('"', "\n")
    (place / "benchmarks").symlink_to(ROOT / "benchmarks")
    for module, words in printed_commands(text):
        parses(module, words, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("guide", WITH_COMMANDS)
def test_its_commands_run(guide: str, place: Path):
    write_inputs(guide, place)
    for module, arguments in commands((DOCS / guide).read_text()):
        options = SMALL.get(module, {})
        if not Path(arguments[0], "config.json").is_file():  # else a run, which has the options that it was made with
            options = SHRUNK | options
        if "--resume" in arguments:
            options |= {"--steps": "3"}
        recipe, *shrunk = argv(arguments[0], options)
        assert importlib.import_module(module).main([recipe, *arguments[1:], *shrunk]) == 0, f"{module} {arguments}"


def test_every_file_and_chart_of_a_report_that_is_named_exists():
    text = (DOCS / "report.md").read_text()
    sources = [*(ROOT / "launch").rglob("*.py"), *(ROOT / "launch").rglob("*.json")]
    page = "".join(path.read_text() for path in sources)
    assert all(f'"{name}"' in page for name in re.findall(r"^\| `(\w+\.\w+)`", text, re.MULTILINE))
    charts = text[text.index("| chart") : text.index("**Completions**")]
    for row in re.findall(r"^\| ([A-Z].*?) \|", charts, re.MULTILINE):
        assert all(f'"{name}"' in page for name in row.split(", ")), row
