"""Faults in the measured times of steps and in their log lines."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch.run.step_timer
from launch.run.metric_log import MetricLog
from launch.run.step_timer import DispatchedStep, StepTimer

SECONDS = (3.0, 1.0, 2.0, 1.0, 4.0, 1.0, 1.0)
# Seconds that the host works before it takes a step's prompts, and from then to the step's call.
IDLE, DATA = 0.25, 0.125


class Device:
    """A device that runs steps in order, and a clock that advances only when the host works or waits."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def run(self, seconds: float) -> "Result":
        """Enqueue a step."""
        self.free = max(self.free, self.now) + seconds
        return Result(self, self.free)

    def wait(self, tree: Any) -> None:
        ends = [x.end for x in jax.tree.leaves(tree) if isinstance(x, Result)]
        self.now = max(self.now, *ends, 0.0)


class Result:
    """Metric of a step that ends at a given time."""

    def __init__(self, device: Device, end: float) -> None:
        self.device, self.end = device, end

    def is_ready(self) -> bool:
        return self.device.now >= self.end


def times(monkeypatch: pytest.MonkeyPatch, blocking: list[bool]) -> tuple[list[float], float]:
    """Return `time/step` of each step and the final clock. blocking: calls that return only when their step ends."""
    device, logged = Device(), dict[int, float]()
    monkeypatch.setattr(launch.run.step_timer.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(jax, "block_until_ready", device.wait)
    monkeypatch.setattr(jax, "Array", Result)

    def log(number: int, metrics: dict[str, Any]) -> dict[str, float | None]:
        assert number == len(logged)
        logged[number] = metrics["time/step"]
        return {}

    timer = StepTimer(log)  # pyright: ignore[reportArgumentType]
    for number, (seconds, blocks) in enumerate(zip(SECONDS, blocking, strict=True)):
        device.now += IDLE
        start, device.now = device.now, device.now + DATA
        result = device.run(seconds)
        if blocks:
            device.wait(result)
        timer.dispatched(DispatchedStep(number, start, {"loss": result}, None, None))  # pyright: ignore[reportArgumentType]
    timer.finish()
    return list(logged.values()), device.now


@pytest.mark.parametrize(
    "blocking",
    [[False] * 7, [True] * 7, [False, True] * 3 + [False], [True, False] * 3 + [True], [False] * 6 + [True]],
    ids=["never", "always", "every second", "every other second", "the last"],
)
def test_row_12_the_times_of_steps_sum_to_the_clock(monkeypatch: pytest.MonkeyPatch, blocking: list[bool]) -> None:
    found, clock = times(monkeypatch, blocking)
    assert len(found) == len(SECONDS)
    # Only the host's work between two steps, while the device is idle, belongs to no step.
    assert clock - IDLE * len(SECONDS) <= sum(found) <= clock - IDLE
    assert min(found) >= min(SECONDS) / 2


STEP = {"reward/mean": 0.0, "reward/accuracy": 0.5, "rollout/tokens": 100.0, "rollout/acceptance_length": 2.0}


def test_row_12_lines_are_averages_since_the_line_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricLog(tmp_path, print_every=4) as metric_log:
        for number in range(1, 11):
            # The fifth has no acceptance length, and an evaluation follows the sixth.
            values = STEP | {"reward/mean": number, "time/step": 0.5 * number}
            values |= {"rollout/acceptance_length": np.nan} if number == 5 else {}
            values |= {"eval/accuracy": 0.75} if number == 6 else {}
            metric_log.log(number, values)
    _, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert lines[0] == ["4", "2.500", "50.0%", "2.00", "80", "1.25", "-", "-", "-"]
    assert lines[1] == ["6", "5.500", "50.0%", "2.00", "36", "2.75", "-", "-", "-", "held", "out", "75.0%"]
    assert lines[2] == ["8", "7.500", "50.0%", "2.00", "27", "3.75", "-", "-", "-"] and len(lines) == 3


def test_a_line_of_an_asynchronous_run_has_its_lag_and_idle_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricLog(tmp_path) as metric_log:
        for number in (1, 2):
            times = {"time/rollout_wait": 0.5, "time/rollout_mesh_idle": 0.25, "time/training_mesh_idle": number / 8}
            metric_log.log(number, STEP | times | {"time/step": 1.0, "asynchronous/lag": number - 1})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("  lag 1: 0.25 s exposed, 0.25 s rollout mesh idle, 0.50 s waited")
