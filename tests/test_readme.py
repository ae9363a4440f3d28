"""What the README shows runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert 1 <= float(capsys.readouterr().out) <= 4


def test_every_program_named_exists():
    for program in set(re.findall(r"python -m (launch\.\w+)", README.read_text())):
        path = README.parent / program.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
