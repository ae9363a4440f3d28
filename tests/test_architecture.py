"""docs/architecture.md lists every module of the packages and of two rooms of `benchmarks`, and no other."""

import re

from tests.documents import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("specjax", "models", "configs", "launch")
ROOMS = ("benchmarks/bench", "benchmarks/simulation")


def modules() -> set[str]:
    """Return the paths of all modules within their packages, except `__init__` files."""
    found = (
        path.relative_to(ROOT / folder.split("/")[0])
        for folder in (*PACKAGES, *ROOMS)
        for path in (ROOT / folder).rglob("*.py")
    )
    return {path.as_posix() for path in found if path.name != "__init__.py"}


def test_every_module_is_on_the_map():
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert modules() - set(re.findall(r"`([^`\n]+)`", prose)) == set()
    assert set(re.findall(r"^\| `([\w/]+\.py)` \|", prose, re.MULTILINE)) - modules() == set()
