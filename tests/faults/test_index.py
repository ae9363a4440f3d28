"""README.md lists every row of faults with the files of its tests."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_row_is_listed_with_its_tests() -> None:
    listed = dict[int, set[str]]()
    for row, files in re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (HERE / "README.md").read_text(), re.MULTILINE):
        listed[int(row)] = set(re.findall(r"`(.*?)`", files))
    found = dict[int, set[str]]()
    for path in HERE.parent.rglob("test_*.py"):
        name = path.name if path.parent == HERE else path.relative_to(HERE.parents[1]).as_posix()
        for row in re.findall(r"^def test_row_(\d+)_", path.read_text(), re.MULTILINE):
            found.setdefault(int(row), set()).add(name)
    assert listed == found and set(range(1, 32)) <= set(found)
