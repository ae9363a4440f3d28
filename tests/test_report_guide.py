"""What the guide to the report shows runs, as far as a test can: every command is taken from the page itself."""

import re
import shlex
from pathlib import Path

import pytest

import launch.report.__main__
import launch.train
from launch.cli.options import parse_run
from launch.run.metric_log import MetricLog
from tests.documents import ROOT, blocks
from tests.launch.programs import LEAST, argv, fake_wandb
from tests.launch.run_directories import write_run

GUIDE = ROOT / "docs" / "report.md"


def commands() -> list[list[str]]:
    return [shlex.split(line, comments=True) for block in blocks(GUIDE.read_text()) for line in block.splitlines()]


def test_every_command_runs_or_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", 0)
    with MetricLog(run) as metric_log:
        metric_log.log(1, {"reward/mean": 0.5})
    ran = []
    for program, *arguments in commands():
        arguments = [str(run) if argument == "DIR" else argument for argument in arguments]
        if program == "tensorboard":
            # It is no part of what is installed: its files are there, where it looks for them.
            assert arguments == ["--logdir", str(run)] and list(run.glob("events.out.tfevents.*"))
            ran.append(program)
            continue
        assert (program, arguments[0]) == ("python", "-m")
        ran.append(arguments[1])
        if arguments[1] == "launch.report":
            assert launch.report.__main__.main(arguments[2:]) == 0
            assert "report.html" in capsys.readouterr().out
        else:
            config = parse_run(arguments[2:], arguments[1], "")
            assert (config.log.wandb_project, config.profile_step) in (("sums", 0), (None, 30))
    assert ran == ["launch.report", "tensorboard", "launch.train", "launch.train"]


@pytest.mark.slow
def test_its_runs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But for size: the recipe's own is that of minutes."""
    calls = fake_wandb(monkeypatch)
    for number, (_, _, program, *arguments) in enumerate(
        command for command in commands() if "launch.train" in command
    ):
        assert program == "launch.train"
        options = LEAST | {"--steps": "30", "--out": str(tmp_path / str(number))}
        assert launch.train.main([*argv(arguments[0], options), "--speedup.slots", *arguments[1:]]) == 0
    assert [call[0] for call in calls[1:-1]] == list(range(1, 31)) and calls[-1] == "finish"
    assert list(tmp_path.glob("1/profile/**/*.xplane.pb"))


def test_every_file_and_chart_it_names_is_there():
    text = GUIDE.read_text()
    page = "".join(path.read_text() for path in (ROOT / "launch").rglob("*.py"))
    assert all(f'"{name}"' in page for name in re.findall(r"^\| `(\w+\.\w+)`", text, re.MULTILINE))
    charts = text[text.index("| chart") : text.index("**Completions**")]
    for row in re.findall(r"^\| ([A-Z].*?) \|", charts, re.MULTILINE):
        assert all(f'"{name}"' in page for name in row.split(", ")), row
