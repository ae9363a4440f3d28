"""The counter of lines of code, and the modules of docs/architecture.md."""

import re
import runpy
import subprocess
import sys

from tests.documents import ROOT

SAMPLE = '''"""Add numbers.

More.
"""

import os  # counted once


# Not counted.
def name() -> str:
    """Not counted."""
    text = """counted,

    with its blank line"""
    return text
'''


def test_docstrings_comments_and_blank_lines_are_not_code():
    count = runpy.run_path(str(ROOT / "scripts" / "modules.py"))["lines_of_code"]
    assert count(SAMPLE) == 6


def test_a_room_is_listed_with_what_its_modules_hold():
    command = [sys.executable, "scripts/modules.py", "specjax/verify"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) == len(list((ROOT / "specjax/verify").rglob("*.py")))
    assert all(re.match(r" *\d+ specjax/verify/\w+\.py: \w", line) for line in listed), listed


def test_files_named_in_the_architecture_exist():
    named = re.findall(
        r"`((?:specjax|models|configs|launch|benchmarks|tests)/[\w/.]*\w\.py)`",
        (ROOT / "docs" / "architecture.md").read_text(),
    )
    assert named and not [name for name in named if not (ROOT / name).exists()]
