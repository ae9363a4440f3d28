"""Checks of the prose: first words of docstrings, words to avoid, and README's length and numbers."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("specjax", "models", "configs", "launch", "examples", "benchmarks", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
OPENINGS = ("Of", "What", "Whether", "By")
# Write "after" and "again" instead.
RARE = re.compile(r"\b(behind|anew)\b", re.IGNORECASE)
MOST_RARE, MOST_README_LINES = 10, 150


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_do_not_open_with_words_to_avoid(folder: str):
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    opened = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and text.split()[0] in OPENINGS
    ]
    assert not opened, "\n".join(opened)


def test_rare_words_are_rare():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*SOURCES, *PAGES]
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if RARE.search(line)
    ]
    assert len(found) <= MOST_RARE, "\n".join(found)


def test_readme_is_short_and_has_its_numbers_in_the_table():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_README_LINES
    prose = re.sub(r"```.*?```|^\|.*?$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    # Numbers in names and versions are allowed.
    names = r"EAGLE-3(\.1)?|Python\W+3\.\d+|arXiv[ :]\d+\.\d+|Qwen[\d.]+|Llama [\d.]+x?|Apache[- ]2\.0"
    prose = re.sub(names, "", prose)
    assert re.findall(r"\S*\d\S*", prose) == []
