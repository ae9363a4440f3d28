"""Take examples out of the documents, to run them."""

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# The first line of a block that is to be a file: `# my_rewards.py`.
FILE = re.compile(r"# (\w+\.py)\n")


def section(path: Path, title: str) -> str:
    """The text below a heading of the second level."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE)
    assert text, f"{path.name} has no section {title!r}"
    return text[1]


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced blocks of a language; those of none are shell commands and what is printed."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for found, code in fenced if found == language]


def execute(code: str, path: Path, names: dict[str, Any]) -> None:
    """Run a block as it stands, with the names of those before it."""
    exec(compile(code, str(path), "exec"), names)


def write_files(text: str, directory: Path) -> None:
    """Each block that begins with the name of a file, as that file."""
    for code in blocks(text, "python"):
        if named := FILE.match(code):
            (directory / named[1]).write_text(code)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(module, arguments) of every `python -m launch.X ..` in the blocks, in their order."""
    found = []
    for block in blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["python", "-m"] and words[2].startswith("launch."):
                found.append((words[2], words[3:]))
    return found
