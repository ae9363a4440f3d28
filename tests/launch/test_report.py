import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launch.report.__main__
from launch.report import write_report
from launch.report.charts import CHARTS
from launch.report.page import DOCS
from launch.report.series import MOST, series, strokes, thin
from launch.report.warnings import warnings
from launch.run.metric_log import STANDARD_METRICS
from launch.run.records import read_run
from tests.launch.programs import Refusal
from tests.launch.run_directories import write_lines, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def data_of(report: Path) -> dict[str, Any]:
    """Return what the page's script draws. A page without it, or that loads anything, fails."""
    page = report.read_text()
    assert not re.search(r"\b(src|import)\b|<link|url\(|https?://(?!www.w3.org/2000/svg)", page)
    (data,) = re.findall(r'<script type="application/json" id="data">([^<]*)</script>', page)
    return json.loads(data)


def run_of(directory: Path, steps: int = 40) -> Path:
    """Write a run with a probe in every tenth step, an alarm over three steps, and draft training in every second."""
    rng = np.random.default_rng(0)
    each = range(1, steps + 1)
    probed = [0.5 if step % 10 == 0 else None for step in each]
    stages = "prepare generation reward logprob train".split()
    constant = dict(
        memory__host_peak_gib=10.5, grad_norm__policy=1.0, rollout__tokens=100, time__step=2.0, time__data=0.1
    )
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
        **{f"rollout__acceptance_rate_pos_{i}": [1 / (i + 1)] * steps for i in range(1, 11)},
        **{name: [value] * steps for name, value in constant.items()},
        **{f"time__{stage}": probed for stage in stages},
        perf__speedup_vs_autoregressive=probed,
        **{"my_loss/<x>": list(rng.random(steps))},
    )
    pieces = [["3", 1], [" <b>", 2], ["\n", 3], ["&", 4], ["", 2]]
    scored = {"prompt": "1 < 2?", "answer": "2", "reward": 1.0, "stopped": True, "pieces": pieces}
    scored |= {"extracted": "3", "advantage": -0.5}
    failed = scored | {
        "reward": None,
        "extracted": None,
        "advantage": None,
        "stopped": False,
        "pieces": [[f"w{i}", None] for i in range(700)],
    }
    write_lines(
        directory / "samples.jsonl",
        [{"step": step, "budget": 8, "lengths": [5, 8, 8], "completions": [scored, failed]} for step in (1, 40)],
    )
    start = {"date": "2026-01-02T03:04:05+00:00", "device": "2 x cpu", "host": "2 cores", "versions": {"jax": "0.10"}}
    lines = [
        {"step": 0, "start": start},
        {"step": 0, "summary": ["model: tiny", "draft: none"]},
        {"step": 10, "warning": "drafting loses"},
        {"step": 20, "start": start},
    ]
    measured = {"generation_speedup": 1.25, "generation_speedup_low": 1.2, "generation_speedup_high": 1.31}
    lines += [{"step": 20, "times": {"compiling": 60.5, "steps": 40.0, "total": 100.5}}]
    lines += [{"step": 40, "times": {"steps": 40.0, "other": 0.5, "total": 40.5}}]
    write_lines(directory / "diary.jsonl", [*lines, {"step": 40, "result": measured | {"step_speedup": 1.1}}])
    return directory


def test_a_report_shows_all_of_a_run_in_one_file(tmp_path: Path):
    path = write_report(run_of(tmp_path / "my run"))
    assert path == tmp_path / "my run" / "report.html"
    data = data_of(path)
    charts = {chart["title"]: chart for charts in data["sections"].values() for chart in charts}
    shown = {"Reward", "Accuracy", "Acceptance by position", "Measured and promised acceptance", "Tokens per second"}
    # A metric that no list names.
    assert shown | {"my_loss/<x>"} < set(charts) and "Entropy" not in charts and "Gradient norms" in charts
    other = {"title": "my_loss/<x>", "lines": [["my_loss/<x>", "<x>"]], "zero": False}
    assert data["sections"]["Other metrics"] == [other]
    assert [label for _, label in charts["Acceptance by position"]["lines"]] == [f"position {i}" for i in range(1, 11)]
    assert {metric for chart in charts.values() for metric, _ in chart["lines"]} <= set(data["metrics"])
    (stages,) = data["stages"]
    assert [part["value"] for part in stages["series"]] == ["0.100 s, 3.8%", *["0.500 s, 19.2%"] * 5]
    assert [part["label"] for part in data["lengths"][0]["series"]] == ["step 1", "step 40"]
    said = "\n".join([*data["about"], *(f"{value} {label}" for value, label in data["figures"])])
    for words in (
        "seed 3",
        "2 x cpu",
        "jax 0.10",
        "resumed after step 20",
        "1.25x [1.20, 1.31] generation",
        "1.10x step speed-up",
        "10.5 GiB peak of the process",
        "time of the run: 141.0 s = compiling 60.5, steps 80.0, other 0.5",
        "2 min time of the run",
        "40 of 40 steps",
        "draft: none",
    ):
        assert words in said
    assert ["seed", "3"] in data["config"]
    (newest, about, (scored, failed)), (oldest, *_) = data["samples"]
    assert (newest, oldest, about) == ("step 40", "step 1", "0% of these tokens written by the draft")
    assert scored["head"][:3] == [["3", 1], [" <b>", 2], ["\n", 3]] and scored["prompt"] == "1 < 2?"
    assert (len(failed["head"]), failed["hidden"], len(failed["tail"])) == (400, 200, 100)
    assert scored["facts"] == ["5 tokens", "expected 2", "extracted 3", "reward 1", "advantage -0.50"]
    assert failed["facts"] == ["700 tokens", "expected 2", "not scored", "cut off at the length budget"]


def test_observed_tokens_have_a_shade_of_their_own(tmp_path: Path):
    run = run_of(tmp_path)
    (line, _), kinds = [json.loads(each) for each in (run / "samples.jsonl").read_text().splitlines()], [5, 2, 5, 5, 1]
    observed = line["completions"][0] | {"ending": "timed_out", "turns": 2, "environment_reward": 0.5}
    observed["pieces"] = [["x", kind] for kind in kinds]
    write_lines(run / "samples.jsonl", [line | {"completions": [observed | {"ending": "new"}, observed]}])
    data = data_of(write_report(run))
    ((_, about, (_, shown)),) = data["samples"]
    assert about == "50% of these tokens written by the draft" and shown["facts"][0] == "5 tokens, 3 observed"
    assert shown["facts"][-3:] == ["0.5 from the environment", "2 turns", "the environment took too long"]
    assert [writer for writer, _ in data["writers"]] == [1, 2, 3, 4, 5]
    assert [writer for writer, _ in data_of(write_report(run_of(tmp_path)))["writers"]] == [1, 2, 3, 4]
    style = (DOCS.parent / "launch/report/style.css").read_text()
    assert style.count("--w5:") == 2 and ".w5{background:var(--w5)}" in style


def test_the_accuracy_at_the_end_is_the_last_of_its_chart(tmp_path: Path):
    directory = write_run(tmp_path / "run", 3, eval__accuracy=[0.25, None, None])
    write_lines(directory / "diary.jsonl", [{"step": 3, "result": {"accuracy_before": 0.25, "accuracy_after": 0.5}}])
    assert data_of(write_report(directory))["metrics"]["eval/accuracy"]["line"] == [[[1, 0.25], [3, 0.5]]]


def test_without_javascript_the_page_tells_what_matters(tmp_path: Path):
    page = write_report(run_of(tmp_path / "<my run>")).read_text()
    told = re.findall("<p>(.*?)</p>", page[page.index("<noscript><h1>&lt;my run&gt;</h1>") : page.index("</noscript>")])
    assert {"model: tiny", "40 of 40 steps done", "1.25x [1.20, 1.31] generation speed-up at the end"} < set(told)
    assert "warning at step 10: drafting loses" in told


def test_charts_name_metrics_that_runs_have():
    charts = [chart for charts in json.loads(CHARTS.read_text()).values() for chart in charts]
    named = [name for chart in charts for name in chart["metrics"]]
    others = ("tokens_per_s", "asynchronous/lag", "asynchronous/waiting")
    others += ("time/training_mesh_idle", "time/rollout_mesh_idle", "time/rollout_wait")
    others += ("rollout/turns", "rollout/observed_tokens", "rollout/failed")
    others += ("time/decoding", "time/tools", "time/waiting")
    others += ("teacher/reverse_kl", "teacher/forward_kl", "teacher/overlap", "teacher/stop_gap", "time/teacher")
    others += ("teacher/divergence", "teacher/entropy")
    assert {name for name in named if "(" not in name} <= {*STANDARD_METRICS, *others}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_script_draws_the_page(tmp_path: Path):
    page = drawn(write_report(run_of(tmp_path / "my run")).read_text(), tmp_path)
    titles = re.findall(r"<figcaption>(.*?)<", page)
    assert {"Accuracy", "Stages of a step", "my_loss/&lt;x&gt;", "Completion length distribution"} < set(titles)
    assert re.findall("<h2>(.*?)<", page)[-3:] == ["Other metrics", "Completions", "Configuration"]
    link = r'<li>step 10: drafting loses <a href="[^"]*docs/troubleshooting.md#speculation-is-slower-than-none">'
    assert "<h1>my run</h1>" in page and re.search(link, page)
    # The seventh line has the color of the first.
    assert '<i style="color:var(--p6)" class=""></i>position 6' in page
    assert '<i style="color:var(--p1)" class="dashed"></i>position 7' in page
    # Each token has its writer's shade, and texts are escaped.
    assert '<span class="w1">3</span><span class="w2"> &lt;b&gt;</span><span class="w3">\u21b5\n</span>' in page
    assert '<span class="end w2">stop</span>' in page and "1 &lt; 2?" in page and "200 tokens …" in page
    assert '<div class=""><span>seed</span><b>3</b></div>' in page
    drawings = re.findall(r'(?:d|x|y|cx|cy|width|height|viewBox)="([^"]*)"', page)
    assert drawings and not [each for each in drawings if re.search("NaN|undefined|Infinity", each)]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_ticks_are_round_and_differ(tmp_path: Path):
    """Levels that differ by the rounding of float32, or little more, have ticks too."""
    ranges = [(0, 1), (0, 47_000), (-0.01, 0.03), (0, 4e-5)]
    for magnitude in 10.0 ** np.arange(-12, 13):
        for low in (magnitude * np.random.default_rng(0).uniform(1, 10, 5)).astype(np.float32):
            ends = [(float(low), float(low * np.float32(1 + steps * 2**-23))) for steps in (0, 1, 2, 30, 1000)]
            ranges += [*ends, *((-high, -low) for low, high in ends)]
    page = write_report(write_run(tmp_path / "run", 0)).read_text()
    call = f"document.body.textContent = JSON.stringify({json.dumps(ranges)}.map(([low, high]) => {{"
    call += "const found = ticks(low, high, 5); return [found, found.map(value => number(value, false, 7))];}));"
    body = drawn(page.replace("</html>", f"<script>{call}</script>"), tmp_path).partition("<body>")[2]
    found = json.loads(body.partition("</body>")[0])
    assert [labels for _, labels in found[:4]] == [
        ["0", "0.2", "0.4", "0.6", "0.8", "1"],
        ["0", "10K", "20K", "30K", "40K", "50K"],
        ["-0.01", "0", "0.01", "0.02", "0.03"],
        ["0", "0.00001", "0.00002", "0.00003", "0.00004"],
    ]
    for (low, high), (values, labels) in zip(ranges, found, strict=True):
        slack = 1e-8 * (values[-1] - values[0])
        assert values[0] <= low + slack and high <= values[-1] + slack, (low, high, labels)
        assert len(set(labels)) == len(labels) > 1, (low, high, labels)


def drawn(page: str, directory: Path) -> str:
    """Return a page as HTML after a browser ran its script."""
    (directory / "page.html").write_text(page)
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory / 'profile'}"]
    command += ["--dump-dom", str(directory / "page.html")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_report_of_an_asynchronous_run_shows_lag_exposed_generation_and_idle_meshes(tmp_path: Path):
    waited = {f"time__{name}": [0.5, 0.5, 0.5] for name in ("rollout_wait", "rollout_mesh_idle")}
    exposed = {"time__step": [9.0, 2.0, 2.0], "time__training_mesh_idle": [None, 0.5, 0.1]}
    data = data_of(write_report(write_run(tmp_path, 3, asynchronous__lag=[0, 1, 1], **waited, **exposed)))
    assert [chart["title"] for chart in data["sections"]["Time"]] == ["Step time", "Idle meshes", "Lag"]
    assert not data["sections"]["Other metrics"]
    assert ["15.0%", "of the time of steps is exposed generation"] in data["figures"]


def test_warnings_are_read_back_with_their_steps(tmp_path: Path):
    lines, sections = zip(*warnings(read_run(run_of(tmp_path)), tmp_path), strict=True)
    headings = re.findall("^## (.*)", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert set(sections) <= {heading.lower().replace(" ", "-") for heading in headings}
    assert [
        section.split("-")[0] for section in sections
    ] == "reward updates speculation acceptance the updates".split()
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
    assert any(
        "up to inf on average and by up to inf over a sequence" in line
        for line, _ in warnings(read_run(tmp_path), tmp_path)
    )


def test_a_run_that_went_on_after_a_stop_is_not_said_to_be_stopped(tmp_path: Path):
    write_run(tmp_path, 3, reward__mean=[0.0, 0.0, 0.0])
    stops = [{"step": step, "warning": f"stopped after step {step}; .."} for step in (1, 3)]
    write_lines(tmp_path / "diary.jsonl", stops)
    said = [line for line, _ in warnings(read_run(tmp_path), tmp_path) if "stopped" in line]
    assert said == ["stopped after step 3; .."]


def test_row_88_without_the_times_of_each_start_the_report_says_what_is_summed(tmp_path: Path):
    """A process that was killed has left none."""
    directory = write_run(tmp_path, 2, time__step=[2.0, 3.0], perf__speedup_vs_autoregressive=[0.9, 1.1])
    start = {"date": "", "device": "", "host": "", "versions": {}}
    write_lines(directory / "diary.jsonl", [*[{"step": 0, "start": start}] * 2, {"step": 2, "times": {"total": 9.0}}])
    figures = data_of(write_report(directory))["figures"]
    assert ["5.0 s", "total time of steps, without what is around them"] in figures
    # Several probes have an interval; one has none.
    assert ["1.00x [0.90, 1.10]", "generation speed-up, the last 2 probes"] in figures
    write_run(directory, 1, perf__speedup_vs_autoregressive=[0.9])
    assert ["0.90x", "generation speed-up, one probe"] in data_of(write_report(directory))["figures"]


def test_row_97_charts_begin_at_the_first_step(tmp_path: Path):
    """An evaluation before it is a line of step 0."""
    directory = write_run(tmp_path, 12, reward__mean=[0.5] * 12, eval__accuracy=[None] * 12)
    lines = (directory / "metrics.jsonl").read_text()
    first = {"step": 0} | dict.fromkeys(STANDARD_METRICS) | {"eval/accuracy": 0.25}
    (directory / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{lines}")
    data = data_of(write_report(directory))
    assert data["span"] == [1, 12] and data["metrics"]["eval/accuracy"]["line"] == [[[0, 0.25]]]
    if CHROMIUM is not None:
        ticks = re.findall(r'class="tick middle"[^>]*>(\d+)<', drawn(write_report(directory).read_text(), tmp_path))
        assert ticks == ["1", "5", "10", "0", "5", "10"]


def test_a_run_that_has_not_begun_or_was_killed_has_a_report_too(tmp_path: Path):
    run = write_run(tmp_path / "run", 0)
    assert data_of(write_report(run))["metrics"] == {}
    run_of(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "rew')
    assert read_run(run).steps.tolist() == list(range(1, 41))


def test_a_long_run_is_thinned():
    steps = np.arange(100_000)
    values = np.sin(steps / 1e4)
    values[54_321] = 50.0
    kept = thin(values)
    assert len(kept) <= 2 * MOST + 2 and {0, 54_321, 99_999} <= set(kept.tolist())
    shown = series(steps, values)
    assert len(json.dumps(shown)) < 40_000
    # One outlier does not flatten the curve.
    assert shown["high"] == pytest.approx(1.0, abs=0.01) and max(y for _, y in shown["line"][0]) < 1.01


def test_missing_measurements_are_gaps():
    steps = np.array([1, 2, 3, 10, 11, 12])
    assert [[x for x, _ in part] for part in strokes(steps, steps / 3)] == [[1, 2, 3], [10, 11, 12]]
    assert len(strokes(np.arange(0, 100, 20), np.zeros(5))) == 1
    one = series(steps[:1], np.array([0.0]))
    assert one == {"line": [[[1, 0.0]]], "faint": [], "low": 0.0, "high": 0.0}


def test_the_program_refuses_other_directories(tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", 1)
    (run / "config.json").write_text("[1]\n")
    for arguments, said in (["nowhere"], "DIR = nowhere: "), ([], "DIR"), ([str(run)], "config.json: "):
        assert said in refusal(launch.report.__main__.main, arguments)
    assert launch.report.__main__.main([str(run_of(write_run(run, 1)))]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
