import json
from pathlib import Path

from rich.console import Console

from launch.run.event_log import Diary


def test_what_was_said_behind_the_step_that_is_resumed_is_dropped(tmp_path: Path, capsys):
    console = Console(highlight=False, soft_wrap=True)
    diary = Diary(tmp_path, console)
    diary.warn(3, "drafting loses [here]")
    diary.warn(3, "twice")
    diary.warn(8, "too late")
    Diary(tmp_path, console, step=5).result(9, accuracy_after=0.5)
    lines = [json.loads(line) for line in (tmp_path / "diary.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 3, 3, 5, 9]
    assert set(lines[0]["start"]) == {"date", "device", "host", "versions"} and lines[0]["start"]["versions"]["jax"]
    assert lines[1] == {"step": 3, "warning": "drafting loses [here]"}
    assert lines[4] == {"step": 9, "result": {"accuracy_after": 0.5}}
    assert capsys.readouterr().out == "drafting loses [here]\ntwice\ntoo late\n"
