"""README.md lists every row of faults with the files of its tests."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = 31


def test_every_row_is_listed_with_its_tests() -> None:
    listed = dict[int, set[str]]()
    for row, files in re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (HERE / "README.md").read_text(), re.MULTILINE):
        listed[int(row)] = set(re.findall(r"`(.*?)`", files))
    found = {row: set[str]() for row in range(1, ROWS + 1)}
    for path in [*HERE.glob("test_*.py"), *(HERE.parent / "launch").glob("test_*.py")]:
        name = path.name if path.parent == HERE else f"tests/launch/{path.name}"
        for row in re.findall(r"^def test_row_(\d\d)_", path.read_text(), re.MULTILINE):
            found[int(row)].add(name)
    assert listed == found and all(found.values())
