import json
from pathlib import Path

import pytest

from launch.run.logs import EventLog


def test_events_after_the_resumed_step_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    events = EventLog(tmp_path)
    events.warn(3, "drafting loses [here]")
    events.record_warning(3, "printed elsewhere")
    events.warn(8, "too late")
    EventLog(tmp_path, step=5).record_result(9, accuracy_after=0.5)
    lines = [json.loads(line) for line in (tmp_path / "diary.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 3, 3, 5, 9]
    assert set(lines[0]["start"]) == {"date", "device", "host", "versions"} and lines[0]["start"]["versions"]["jax"]
    assert lines[1:3] == [{"step": 3, "warning": text} for text in ("drafting loses [here]", "printed elsewhere")]
    assert lines[4] == {"step": 9, "result": {"accuracy_after": 0.5}}
    assert capsys.readouterr().out == "drafting loses [here]\ntoo late\n"
