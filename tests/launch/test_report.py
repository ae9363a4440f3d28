import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import launch.report.__main__
from launch.report import write_report
from launch.report.charts import line_chart
from launch.report.scales import tick_labels, ticks
from launch.report.series import MOST, Series, stretches, thin
from launch.report.warnings import warnings
from launch.run.records import read_run
from tests.launch.programs import Refusal
from tests.launch.run_directories import write_lines, write_run

VOID = {"meta", "br", "link", "img"}


class Checked(HTMLParser):
    """HTML parser that verifies that elements are closed in order, and that nothing is loaded from other places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all("nan" not in (value or "").lower() for _, value in attrs), (tag, attrs)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("figcaption", "h2"):
            self.titles.append(data)


def run_of(directory: Path, steps: int = 40) -> Path:
    """Write a run with a probe in every tenth step, an alarm over three steps, and draft training in every second."""
    rng = np.random.default_rng(0)
    each = range(1, steps + 1)
    probed = [0.5 if step % 10 == 0 else None for step in each]
    stages = "prepare generation reward logprob train".split()
    constant = dict(grad_norm__policy=1.0, rollout__tokens=100, time__step=2.0, time__data=0.1)
    constant |= dict(draft__measured_acceptance=0.4, draft__promised_acceptance=0.7)
    write_run(
        directory,
        steps,
        reward__mean=list(rng.random(steps)),
        reward__accuracy=list(rng.random(steps)),
        reward__failed=[2 if step in (7, 8) else 0 for step in each],
        eval__accuracy=[0.25 if step % 20 == 0 else None for step in each],
        loss__policy=[None if step == 9 else 0.0 for step in each],
        grad_norm__draft=[1.0 if step % 2 else None for step in each],
        draft__alarm=[1 if 20 < step <= 23 else 0 for step in each],
        rollout__logprob_alarm=[1 if step in (25, 27) else 0 for step in each],
        rollout__logprob_gap_mean=[step / 100 for step in each],
        rollout__sequence_logprob_gap_max=[step / 25 for step in each],
        update__skipped=[2 if step == 30 else 0 for step in each],
        **{f"rollout__acceptance_rate_pos_{i}": [1 / (i + 1)] * steps for i in range(1, 8)},
        **{name: [value] * steps for name, value in constant.items()},
        **{f"time__{stage}": probed for stage in stages},
        perf__speedup_vs_autoregressive=probed,
        **{"my_loss/<x>": list(rng.random(steps))},
    )
    pieces = [["3", 1], [" <b>", 2], ["\n", 3], ["&", 4], ["", 2]]
    scored = {"prompt": "1 < 2?", "answer": "2", "reward": 1.0, "stopped": True, "pieces": pieces}
    failed = scored | {"reward": None, "stopped": False, "pieces": [[f"w{i}", None] for i in range(700)]}
    write_lines(
        directory / "samples.jsonl",
        [{"step": step, "budget": 8, "lengths": [5, 8, 8], "completions": [scored, failed]} for step in (1, 40)],
    )
    start = {"date": "2026-01-02T03:04:05+00:00", "device": "2 x cpu", "host": "2 cores", "versions": {"jax": "0.10"}}
    lines = [{"step": 0, "start": start}, {"step": 10, "warning": "drafting loses"}, {"step": 20, "start": start}]
    write_lines(
        directory / "diary.jsonl", [*lines, {"step": 40, "result": {"generation_speedup": 1.25, "step_speedup": 1.1}}]
    )
    return directory


def test_a_report_shows_all_of_a_run_in_one_file(tmp_path: Path):
    path = write_report(run_of(tmp_path / "my run"))
    text = path.read_text()
    assert path == tmp_path / "my run" / "report.html" and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    titles = Checked(text).titles
    shown = {
        "Reward",
        "Accuracy",
        "Acceptance by position",
        "Measured and promised acceptance",
        "Stages of a step",
        "Tokens per second",
    }
    # A metric that no list names.
    shown |= {"Other metrics", "my_loss/<x>"}
    assert shown < set(titles) and "Entropy" not in titles and "Gradient norms" in titles
    for said in ("<h1>my run</h1>", "seed 3", "2 x cpu", "jax 0.10", "resumed after step 20", "1.25x"):
        assert said in text
    # The seventh line has the color of the first.
    assert '<i class="b6"></i>position 6' in text and '<i class="b1 dashed"></i>position 7' in text
    # Each token has its writer's shade, and texts are escaped.
    assert '<span class="w1">3</span><span class="w2"> &lt;b&gt;</span><span class="w3">\u21b5\n</span>' in text
    assert '<span class="end w2">stop</span>' in text and "1 &lt; 2?" in text
    assert "200 tokens …" in text and "not scored" in text and "cut off at the length budget" in text
    assert "<div><span>seed</span><b>3</b></div>" in text


def test_a_report_of_an_asynchronous_run_shows_lag_exposed_generation_and_idle_meshes(tmp_path: Path):
    waited = {f"time__{name}": [0.5, 0.5, 0.5] for name in ("rollout_wait", "rollout_mesh_idle")}
    exposed = {"time__step": [9.0, 2.0, 2.0], "time__training_mesh_idle": [None, 0.5, 0.1]}
    text = write_report(write_run(tmp_path, 3, asynchronous__lag=[0, 1, 1], **waited, **exposed)).read_text()
    assert {"Lag", "Idle meshes"} < set(Checked(text).titles) and "Other metrics" not in text
    assert "<b>15.0%</b><span>of the time of steps is exposed generation</span>" in text


def test_warnings_are_read_back_with_their_steps(tmp_path: Path):
    lines = warnings(read_run(run_of(tmp_path)))
    assert [re.findall(r"steps? (\d+)", line)[0] for line in lines] == ["7", "9", "10", "21", "25", "30"]
    for line, facts in zip(
        lines,
        (
            ["4 completions", "steps 7, 8"],
            ["loss/policy", "not finite", "step 9"],
            ["step 10: drafting loses"],
            ["accepts 0.40", "at least 0.70", "lasted to step 23"],
            ["up to 0.270 on average", "up to 1.080 over a sequence", "steps 25, 27"],
            ["2 updates of the policy", "step 30"],
        ),
        strict=True,
    ):
        assert all(fact in line for fact in facts), line
    # A NaN counts as the largest gap.
    write_run(tmp_path, 2, rollout__logprob_alarm=[1, 1], rollout__logprob_gap_mean=[0.25, None])
    assert any("up to inf on average and by up to inf over a sequence" in line for line in warnings(read_run(tmp_path)))


def test_a_run_that_has_not_begun_or_was_killed_has_a_report_too(tmp_path: Path):
    run = write_run(tmp_path / "run", 0)
    Checked(write_report(run).read_text())
    run_of(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "rew')
    assert read_run(run).steps.tolist() == list(range(1, 41))


def test_a_long_run_is_thinned(tmp_path: Path):
    steps = np.arange(100_000)
    values = np.sin(steps / 1e4)
    values[54_321] = 50.0
    chart = line_chart("much", [Series("sine", steps, values, 1)])
    assert len(chart) < 40_000
    kept = thin(values)
    assert len(kept) <= 2 * MOST + 2 and {0, 54_321, 99_999} <= set(kept.tolist())
    # One outlier does not flatten the curve.
    assert ">1.0<" in chart and ">50<" not in chart


def test_missing_measurements_are_gaps():
    steps = np.array([1, 2, 3, 10, 11, 12])
    assert [steps[part].tolist() for part in stretches(steps)] == [[1, 2, 3], [10, 11, 12]]
    assert len(stretches(np.arange(0, 100, 20))) == 1
    assert line_chart("none", [Series("none", steps[:0], steps[:0], 1)]) == ""
    Checked(line_chart("one", [Series("one", steps[:1], np.array([0.0]), 1)], percent=True))


@pytest.mark.parametrize(
    "low, high, labels",
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 47_000, ["0", "10k", "20k", "30k", "40k", "50k"]),
        (-0.01, 0.03, ["\u22120.01", "0", "0.01", "0.02", "0.03"]),
        (0, 4e-5, ["0", "1e-5", "2e-5", "3e-5", "4e-5"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]):
    assert tick_labels(ticks(low, high)) == labels


@pytest.mark.parametrize("magnitude", [10.0**power for power in range(-12, 13)])
def test_levels_that_differ_by_rounding_or_little_more_have_ticks(magnitude: float):
    for digits in np.random.default_rng(0).uniform(1, 10, 20):
        low = np.float32(magnitude * digits)
        for steps in (1, 2, 30, 1000):
            high = low * np.float32(1 + steps * 2**-23)
            for ends in ((float(low), float(high)), (-float(high), -float(low))):
                found = ticks(*ends)
                assert found[0] <= ends[0] and ends[1] <= found[-1]
                assert len(set(tick_labels(found))) == len(found) > 1, ends


def test_the_program_writes_a_report_and_refuses_other_directories(
    tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "run", 1)
    (run / "config.json").write_text("[1]\n")
    for arguments, said in (["nowhere"], "DIR = nowhere: "), ([], "DIR"), ([str(run)], "config.json: "):
        assert said in refusal(launch.report.__main__.main, arguments)
    assert launch.report.__main__.main([str(run_of(write_run(run, 1)))]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
