"""README's examples run, and every option that a document names exists."""

import re
import shlex
from pathlib import Path

import pytest

import launch.plan.__main__
from launch.cli.options import parse_run
from tests.documents import ROOT, blocks, execute, section

README = ROOT / "README.md"


def run(title: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the only Python example of a section. Return its output."""
    (example,) = blocks(section(README, title), "python")
    execute(example, README, {})
    return capsys.readouterr().out


def test_the_training_example_runs(capsys: pytest.CaptureFixture[str]):
    assert 1 <= float(run("Try it", capsys)) <= 4


def test_the_proof_example_runs(capsys: pytest.CaptureFixture[str]):
    enumerated, sampled = run("Prove your own", capsys).splitlines()
    assert re.fullmatch(r"off by \d\.\de-1\d in 2268 rounds enumerated .*", enumerated)
    assert re.search(r"0 impossible of 100000 draws: p = .* at level 1e-06, .* fails with chance (0\.99|1)", sampled)


def options_of(table: str) -> list[list[str]]:
    """Return the options in each row of a table. Words after an option's value are left out."""
    return [shlex.split(code) for code in re.findall(r"`(--[^`]+)`", table)]


def test_every_algorithm_is_options_that_go_together():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    table = re.search(r"^\| \| options \|\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    assert table
    told = options_of(table[1])
    assert len(told) >= len(table[1].splitlines()) - 1
    importance = next(options for options in told if options[0] == "--loss.importance")
    told += [["--loss.importance", kind] for kind in ("sequence", "icepop")]
    plain = parse_run(["gsm8k"], "", "")
    for options in told:
        if options is not importance:  # token is the default
            assert parse_run(["gsm8k", *options], "", "") != plain, options


@pytest.mark.parametrize("path", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_every_option_of_a_recipe_that_is_named_exists(path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_run(["tiny", "--help", "all"], "", "")
    with pytest.raises(SystemExit):
        launch.plan.__main__.main(["--help"])
    known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    named = set(re.findall(r"--(?!section)[a-z-]+(?:\.[a-z-]+)+\b(?!\.[\w*])", path.read_text()))
    assert named - known == set()
