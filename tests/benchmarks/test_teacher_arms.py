"""The measurement of on-policy distillation, on very little of everything."""

import json
from pathlib import Path

import pytest

from benchmarks import teacher
from configs.override import override
from tests.launch.programs import SMALLEST
from tests.launch.test_teacher import write_teacher


def test_an_arm_tells_its_steps_to_an_accuracy_and_its_means() -> None:
    arm = teacher.Arm("GRPO", [0, 2, 4], [0.25, 0.5, 0.75], [0.5, 0.25, 0.125], [1.0, 2.0, 3.0, 5.0])
    assert (arm.steps_to(0.5), arm.steps_to(0.8)) == ("2", "not within 4")
    assert arm.means() == [1.5, 4.0]
    assert arm.newest().split() == ["GRPO", "4", "75.0%", "0.1250", "4.00"]


@pytest.mark.slow
def test_every_arm_is_run_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"distill.steps": 2, "distill.answers": 8, "distill.batch_size": 4, "reward.scorer": "exact_traced"}
    monkeypatch.setattr(teacher.tiny, "config", override(SMALLEST, small))
    directory = write_teacher(tmp_path / "teacher")
    options = ["--teacher", str(directory), "--steps", "4", "--every", "2", "--json", str(tmp_path / "arms.json")]
    assert teacher.main([*options, "--plot", str(tmp_path / "arms.png")]) == 0
    arms = {arm["name"]: arm for arm in json.loads((tmp_path / "arms.json").read_text())}
    assert {name: arm["at"][-1] for name, arm in arms.items()} == dict.fromkeys(teacher.ARMS, 2) | {teacher.GRPO: 4}
    # All arms start alike, and the same teacher's laws are compared.
    assert len({(arm["accuracy"][0], arm["divergence"][0]) for arm in arms.values()}) == 1
    assert (tmp_path / "arms.png").stat().st_size
    monkeypatch.setattr(teacher, "learn", None)
    assert teacher.main(options) == 0
