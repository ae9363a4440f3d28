"""The command `specjax`, which starts the programs."""

import subprocess
import sys

import pytest

from launch.__main__ import PROGRAMS, main
from tests.test_imports import PROGRAMS as FILES
from tests.test_imports import module_of


def start(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/specjax", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return main()


def test_help_names_every_program_and_imports_none():
    command = [sys.executable, "-X", "importtime", "-m", "launch", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in ended.stdout.splitlines() if line.startswith("  ")]
    modules = [module_of(path).removesuffix(".__main__") for path in FILES]
    assert sorted(f"launch.{name}" for name in listed) == sorted(name for name in modules if name.startswith("launch."))
    imported = [line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()]
    assert "launch" in imported and not {"jax", "launch.cli"} & set(imported)


@pytest.mark.parametrize("name", PROGRAMS)
def test_usage_is_what_was_typed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, name, "--help")
    assert not ended.value.code and capsys.readouterr().out.startswith(f"usage: specjax {name} ")


@pytest.mark.parametrize(
    ("name", "said"),
    [("trian", "did you mean train?; must be one of train, "), ("zzz", "must be one of train, ")],
)
def test_an_unknown_program_is_one_line(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert start(monkeypatch, name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: PROGRAM = {name}: {said}")


def test_bad_input_ends_as_in_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert start(monkeypatch, "report", "nowhere") == 2
    assert capsys.readouterr().err.startswith("error: ")
