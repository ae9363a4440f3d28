import json
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from launch.run.metric_log import STANDARD_METRICS, MetricLog
from tests.refusals import refuses

STEP = {"reward/mean": 0.5, "reward/accuracy": 0.25, "rollout/tokens": 1000.0, "time/step": 0.5}
KNOWN = {"rollout/length_mean": 120.4, "rollout/truncated": 0.375, "memory/host_peak_gib": 10.44}
PROBE = {
    **{"time/data": 0.01, "time/prepare": 0.02, "time/generation": 0.2, "time/reward": 0.03},
    **{"time/logprob": 0.0, "time/train": 0.25},
    **{"perf/generation_tokens_per_s": 5000.0, "perf/speedup_vs_autoregressive": 1.5},
}


def log(directory: Path, steps: range, resume_step: int | None = None) -> None:
    with MetricLog(directory, resume_step=resume_step) as metric_log:
        for step in steps:
            metric_log.log(step, STEP | {"reward/mean": step / 10})


def lines(directory: Path) -> list[dict[str, Any]]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (directory / "metrics.jsonl").read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=no_constants) for line in text.splitlines()]


def events(directory: Path) -> list[Event]:
    """Return the records of the TensorBoard files, oldest first: length, checksum, bytes, checksum."""
    found = []
    for path in sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_standard_metrics_are_in_every_line_and_others_by_their_names(tmp_path: Path):
    others = {"my_loss/sharpness": jnp.float32(0.25), "plain": 3, "rows": np.int64(7), "my_loss/odd": jnp.nan}
    with MetricLog(tmp_path) as metric_log:
        metric_log.log(1, STEP | {"entropy": None})
        metric_log.log(2, STEP | PROBE | others | {"reward/failed": jnp.int32(3), "ratio/max": jnp.float32(jnp.inf)})
    first, second = lines(tmp_path)
    assert first == {"step": 1} | dict.fromkeys(STANDARD_METRICS) | STEP
    assert tuple(second) == ("step", *STANDARD_METRICS, *sorted(others))
    assert [second[name] for name in others] == [0.25, 3, 7, None]
    assert second["reward/failed"] == 3 and second["ratio/max"] is None
    tags = {value.tag for event in events(tmp_path) for value in event.summary.value}
    assert tags == {*STEP, *PROBE, *others, "reward/failed"} - {"my_loss/odd"}


def test_what_cannot_be_logged_is_refused(tmp_path: Path):
    with MetricLog(tmp_path) as metric_log:
        for name, value in (("my_loss/rows", jnp.zeros(3)), ("step", 1.0)):
            with refuses(f"{name}: "):
                metric_log.log(1, {name: value})
        metric_log.log(3, STEP)
        with refuses("step = 3:...3"):
            metric_log.log(3, STEP)
    assert [line["step"] for line in lines(tmp_path)] == [3]


@pytest.mark.parametrize("restored, kept", [(3, [1, 2, 3]), (5, [1, 2, 3, 4, 5]), (0, [])])
def test_no_step_appears_twice_after_a_resume(tmp_path: Path, restored: int, kept: list[int]):
    log(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/me')
    with MetricLog(tmp_path, resume_step=restored) as metric_log:
        assert [line["step"] for line in lines(tmp_path)] == kept
        metric_log.log(restored + 1, STEP | {"reward/mean": -1.0})
    assert [line["step"] for line in lines(tmp_path)] == [*kept, restored + 1]
    assert lines(tmp_path)[-1]["reward/mean"] == -1.0


def test_row_51_the_evaluation_before_the_first_step_is_step_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with MetricLog(tmp_path, last_step=3) as metric_log:
        for step, values in enumerate([{"eval/accuracy": 0.365}, *[STEP | {"time/step": 60.0}] * 2, STEP]):
            metric_log.log(step, values)
    assert [line["eval/accuracy"] for line in lines(tmp_path)] == [0.365, None, None, None]
    first, header, *steps = capsys.readouterr().out.splitlines()
    assert first == "held-out accuracy before the first step: 36.5%" and header.split()[0] == "step"
    assert [line.split()[0] for line in steps] == ["1/3", "2/3", "3/3"]
    # Nothing is estimated from the first step.
    assert steps[1].endswith("1 min 0 s left") and "left" not in steps[0] + steps[2]


def test_tensorboard(tmp_path: Path):
    log(tmp_path, range(1, 4))
    log(tmp_path, range(3, 5), resume_step=2)
    rewards = [
        (event.step, round(value.simple_value, 6))
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == "reward/mean"
    ]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.3), (4, 0.4)]
    # TensorBoard drops its records of this step and later ones.
    assert [event.step for event in events(tmp_path) if event.session_log.status] == [0, 3]
    assert not any(value.tag == "time/generation" for event in events(tmp_path) for value in event.summary.value)


def test_an_alarm_is_printed_once_and_skipped_updates_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    apart = {"rollout/logprob_alarm": 1, "rollout/logprob_gap_mean": 0.25}
    without_end = apart | {"rollout/logprob_gap_mean": jnp.nan}
    with MetricLog(tmp_path, print_every=100) as metric_log:
        for step, values in enumerate((apart, apart, {"rollout/logprob_alarm": 0}, without_end), start=1):
            metric_log.log(step, STEP | values | {"update/skipped": int(step > 2)})
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ALARM")]
    starts = [line.partition(":")[0] for line in said]
    assert starts == ["ALARM at step 1", "ALARM at step 3", "ALARM at step 4", "ALARM at step 4"]
    assert "0.250" in said[0] and "skipped" in said[1] and " - " in said[2]


def test_console_lines_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with MetricLog(tmp_path) as metric_log:
        for step in range(1, 22):
            metric_log.log(step, STEP | {"rollout/acceptance_length": 2.5} | KNOWN)
        metric_log.log(
            22,
            STEP
            | PROBE
            | {"memory/peak_gib": 78.25, "memory/host_peak_gib": 10.5, "eval/accuracy": 0.4, "reward/failed": 2},
        )
        metric_log.log(23, {})
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [i for i, line in enumerate(said) if line[:1] == ["step"]] == [0, 21]
    assert said[1] == ["1", "0.500", "25.0%", "2.50", "2000", "0.50", "120", "38%", "10.4"]
    (probed,) = (i for i, line in enumerate(said) if line[:1] == ["22"])
    assert said[probed] == "22 0.500 25.0% - 2000 0.50 - - 78.2/10.5 held out 40.0% 2 not scored".split()
    assert "0.010 0.020 0.200 0.030 0.000 0.250 0.500 5000 1.50".split() in said[probed:]
    assert said[-1] == ["23", *"--------"]


def test_row_97_a_line_fits_in_120_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with MetricLog(tmp_path, last_step=9999) as metric_log:
        for step in (9000, 9001):
            metric_log.log(step, STEP | KNOWN | {"memory/peak_gib": 78.2, "time/step": 1.0, "eval/accuracy": 0.4})
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
