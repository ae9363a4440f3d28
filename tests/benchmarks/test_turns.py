"""The measurements of turns, on very little of everything."""

from dataclasses import replace

import pytest

from benchmarks import turns
from benchmarks.turns import QUICK, TOOL_S, TURNS, Quotes, Step
from specjax.environments import HostEnvironment


def test_a_tools_time_is_counted_by_turn_in_threads_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    measured = turns.tools(QUICK)
    assert list(measured) == ["threads", "processes"]
    for arms in measured.values():
        ((fast,), (slow,)) = arms[0.0], arms[TOOL_S]
        # Every row waits for each of its turns.
        assert slow["seconds"] > TOOL_S * TURNS
        for times in (fast, slow):
            parts = sum(times[f"time/{part}"] for part in ("decoding", "waiting", "tools"))
            assert 0 < parts <= times["seconds"]
    capsys.readouterr()
    times = {"time/decoding": 1.0, "time/waiting": 0.25, "time/tools": 0.125}
    arm = {0.0: [times | {"seconds": 1.0}], TOOL_S: [times | {"seconds": 1.5}]}
    turns.print_tools({"threads": arm, "processes": arm | {0.0: arm[TOOL_S]}})
    *_, slower, fails, same, holds = capsys.readouterr().out.splitlines()
    assert slower.split() == ["threads", "125", "1.000", "0.250", "0.125", "1.500", "1.000"] and "FAILS" in fails
    assert same.split()[1] == "0" and "holds" in holds


def test_a_step_is_compared_with_the_one_of_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    plain = [Step(seconds, 0.5, 100, 50, 1.0) for seconds in (1.0, 4.0)]
    faster = [replace(step, seconds=step.seconds / 2, acceptance=2.0) for step in plain]
    turns.print_steps({"no drafts": plain, "lookup": faster}, 0.5)
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        *("lookup", "1.25", "0.50", "100", "50", "2.00", "2.00x", "1.00x")
    ]


def test_an_answer_quotes_the_prompt() -> None:
    environment = Quotes(turns.np.arange(64)[None])
    assert isinstance(environment, HostEnvironment)
    answer = environment.begin(0, 1).step([7, 3]).result()
    assert list(answer.tokens) == list(range(10, 26)) and answer.reward == 1


@pytest.mark.slow
def test_all_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    turns.main(["--quick", "--temperatures", "0.5"])
    said = capsys.readouterr().out
    assert said.startswith("command") and "prefill over append" in said
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line}
    # All arms sample the same tokens.
    assert lines["lookup"][3:5] == lines["EAGLE-3"][3:5] == lines["no"][4:6]
