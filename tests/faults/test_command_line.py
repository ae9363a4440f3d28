"""Faults around a command line: closed output pipes, and recipes and modules that exit."""

import subprocess
import sys
from pathlib import Path

import pytest

import launch.train
from launch.cli.errors import ConfigError
from launch.cli.functions import load_function
from launch.cli.options import run_program
from launch.cli.recipes import load_recipe
from tests.refusals import refuses

EXITS = (
    *("raise SystemExit(0)", "raise SystemExit", "raise SystemExit('two\\nlines')", "import sys; sys.exit(3)"),
    *("exit()", "raise GeneratorExit", "class Own(BaseException): pass\nraise Own('x')", "raise BaseException"),
    *("1 / 0", "("),
)


@pytest.mark.parametrize(("arguments", "read"), [(["--help"], 0), (["tiny", "--help", "all"], 1)])
def test_row_23_a_closed_output_pipe_is_not_an_error(arguments: list[str], read: int) -> None:
    program = [sys.executable, "-m", "launch.train", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(read)
        process.stdout.close()
        assert process.stderr.read() == ""
        # The whole output may fit into the pipe before it is closed.
        assert process.wait() in (141, 0 if read else 141)


def test_row_23_other_broken_pipes_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: list[str]) -> int:
        raise BrokenPipeError(32, "a scorer is gone")

    assert run_program(main) == 1
    assert "a scorer is gone" in capsys.readouterr().err


@pytest.mark.parametrize("number", range(len(EXITS)))
def test_row_23_a_file_that_exits_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / f"exits_{number}.py"
    recipe.write_text(EXITS[number])
    with pytest.raises(ConfigError, match=f"CONFIG = {recipe}: "):
        load_recipe(str(recipe))
    monkeypatch.syspath_prepend(tmp_path)
    with refuses(f"loss.function = exits_{number}:f: ", ConfigError):
        load_function("loss.function", f"exits_{number}:f")
    monkeypatch.setattr(sys, "argv", ["program", str(recipe)])
    assert run_program(launch.train.main) == 2
    recipe.write_text("raise KeyboardInterrupt")
    assert run_program(launch.train.main) == 130
