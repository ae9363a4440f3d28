"""Print lines of code, without docstrings, comments and blank lines: `python scripts/modules.py [FOLDER ...]`.

Without folders, a line for each package and its rooms. With folders, a line for each of their modules, and what it
holds: the first line of its docstring.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("specjax", "models", "configs", "launch", "benchmarks", "examples", "tests")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(source: str) -> int:
    """Return the number of lines with code in the source of a module."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def folder_lines(folder: Path) -> int:
    """Return the lines of code of all modules in a folder."""
    return sum(lines_of_code(path.read_text()) for path in folder.rglob("*.py"))


def main(folders: list[str]) -> None:
    """Print the packages and their rooms, or the modules of some folders."""
    for package in () if folders else PACKAGES:
        print(f"{folder_lines(ROOT / package):6,} {package}")
        for room in sorted({path.parent for path in (ROOT / package).glob("*/*.py")}):
            print(f"{folder_lines(room):14,} {room.relative_to(ROOT)}")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text()
        first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        print(f"{lines_of_code(source):6,} {path.relative_to(ROOT)}: {first}")


if __name__ == "__main__":
    main(sys.argv[1:])
