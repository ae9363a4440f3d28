"""What the guides show runs: their Python as it stands, their commands on networks of almost no size."""

import re
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, execute, write_files

DOCS = ROOT / "docs"
GUIDES = ("drafters.md", "rollout.md")
# What takes seconds; the quick blocks of a guide need none of the others.
LONG = re.compile(r"\b(assert_lossless|make_generate|make_train_step)\(")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, from which modules are imported as `python -m` would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(guide: str, place: Path, *, quick: bool) -> None:
    """The Python blocks in their order, each with the names of those before it."""
    text, names = (DOCS / guide).read_text(), {}
    write_files(text, place)
    for code in blocks(text, "python"):
        if not (quick and LONG.search(code)):
            execute(code, DOCS / guide, names)


@pytest.mark.parametrize("guide", GUIDES)
def test_its_python_runs(guide: str, place: Path):
    run(guide, place, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_all_of_its_python_runs(guide: str, place: Path):
    run(guide, place, quick=False)
