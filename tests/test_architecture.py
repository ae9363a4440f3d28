"""docs/architecture.md has a line for every module, and none for a module that is gone."""

import re

from tests.documents import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("specjax", "models", "configs", "launch")


def modules() -> set[str]:
    """Return every module but the `__init__`s, by its path within its package."""
    found = (path.relative_to(ROOT / package) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.as_posix() for path in found if path.name != "__init__.py"}


def test_every_module_is_on_the_map():
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert modules() - set(re.findall(r"`([^`\n]+)`", prose)) == set()
    assert set(re.findall(r"^\| `([\w/]+\.py)` \|", prose, re.MULTILINE)) - modules() == set()
