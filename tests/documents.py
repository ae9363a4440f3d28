"""Readers of the examples in the documents, so that tests can run them."""

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# The first line of a block that is the content of a file: `# my_rewards.py`.
FILE = re.compile(r"# (\w+\.py)\n")
PRINTED = re.compile(r"python -m ((?:launch|benchmarks|examples)(?:\.\w+)+)((?:\\\n|[^\n`])*)")


def section(path: Path, title: str) -> str:
    """Return the text below a second-level heading."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE)
    assert text, f"{path.name} has no section {title!r}"
    return text[1]


def blocks(text: str, language: str = "") -> list[str]:
    """Return the fenced blocks of a language. Blocks without one hold shell commands and their output."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for found, code in fenced if found == language]


def execute(code: str, path: Path, names: dict[str, Any]) -> None:
    """Run a block unchanged, with the names that earlier blocks defined."""
    exec(compile(code, str(path), "exec"), names)


def write_files(text: str, directory: Path) -> None:
    """Write each block that begins with a file's name to that file."""
    for code in blocks(text, "python"):
        if named := FILE.match(code):
            (directory / named[1]).write_text(code)


def printed_commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (module, arguments) of every `python -m ..` of ours, also within sentences and in brackets, in order.

    Punctuation after a word ends a command; brackets around optional words are dropped.
    """
    found = []
    for module, rest in PRINTED.findall(text):
        words = []
        for word in shlex.split(rest.replace("\\\n", " "), comments=True):
            if word.startswith("("):
                break
            words.append(re.sub(r"[,;:.)]+$", "", word.strip("[]")) or word)
            if words[-1] != word.strip("[]"):
                break
        found.append((module, words))
    return found


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (module, arguments) of every `python -m launch.X ..` and every simulation in the blocks, in order."""
    found = []
    for block in blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["python", "-m"] and words[2].startswith(("launch.", "benchmarks.simulate")):
                found.append((words[2], words[3:]))
    return found
