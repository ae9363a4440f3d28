"""launch.compare as a user runs it, with tiny networks."""

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

import launch.compare
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.comparison.asynchronous import NOTE
from launch.comparison.closing import check_comparison, compare_steps
from launch.comparison.first_difference import FirstDifference, first_difference
from launch.comparison.options import CompareArgs
from launch.comparison.stage_times import (
    STAGES,
    VariantReport,
    drafts_keep_tokens,
    print_stage_times,
    read_reports,
    steady_speedup,
    step_speedup,
    time_variants,
)
from launch.comparison.variants import StepTime
from launch.errors import ConfigError, Stopped
from launch.rewards.reward_fn import make_reward
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.state import fresh_state
from models.drafts.block import block_like
from specjax.parallel.memory import MemoryPart
from specjax.train.timed_step import StagedStep
from specjax.types import Prompts, Rollout, TrainState
from tests.launch.programs import FEW, LEAST, ONE_LAYER, Options, Refusal, argv, flags, leave_run
from tests.refusals import assert_refused, refuses

Compared = tuple[dict[str, Any], str]
ARMS = ["autoregressive", "2", "automatic"]
SMALL = FEW | flags(
    "--mesh.data 1 --rollout.group-size 4 --rollout.verifier coupled --steps 5",
    "--distill.answers 32 --distill.chunks 1 --distill.batch-size 16",
)


def run_program(found: Path, options: Options) -> tuple[dict[str, Any], str]:
    """Run a comparison; return its JSON and its output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert launch.compare.main(argv("tiny", SMALL | options | {"--json": str(found)})) == 0
    return json.loads(found.read_text()), said.getvalue()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Return results and output, for an undistilled draft and costs with which drafting always pays."""
    directory = tmp_path_factory.mktemp("compared")
    cell = {"slots": 16, "window": 26}
    cells = [cell | {"draft_length": 0, "seconds": 1.0}, cell | {"draft_length": 2, "seconds": 0.5}]
    (directory / "costs.json").write_text(json.dumps({"cells": cells}))
    options = {"--draft.kind": "none", "--draft.lookup.kind": "ngram", "--draft.lookup.min-n": "1"}
    options |= {"--warmup.steps": "0", "--cost-table": str(directory / "costs.json")}
    options |= {"--draft-lengths": "2,0"}
    return run_program(directory / "found.json", options)


def test_stages_sum_to_the_step_and_speedups_are_those_of_the_same_turns(compared: Compared):
    """The sum of the stages is within 5% of the separately timed step."""
    arms = compared[0]["arms"]
    assert list(arms) == ARMS
    plain = arms["autoregressive"]
    share = plain["seconds"]["generation"] / plain["step_s"]
    for arm in arms.values():
        assert list(arm["seconds"]) == list(STAGES) and min(arm["seconds"].values()) > 0
        sums = [sum(turn[stage] for stage in STAGES) / turn["step"] for turn in arm["turns"]]
        assert len(sums) == 5 and arm["summed"] == pytest.approx(np.median(sums)) and 0.95 <= arm["summed"] <= 1
        for name, stage in (("generation_speedup", "generation"), ("step_speedup", "step")):
            ratios = [a[stage] / b[stage] for a, b in zip(plain["turns"], arm["turns"], strict=True)]
            middle, low, high = arm[name]
            assert low <= middle <= high and middle == pytest.approx(np.median(ratios))
        assert arm["amdahl"] == pytest.approx(step_speedup(share, arm["generation_speedup"][0]))
        assert arm["bound"] == pytest.approx(step_speedup(share, arm["alpha"]))
    assert plain["generation_speedup"] == plain["step_speedup"] == [1, 1, 1]


def test_the_steady_step_includes_a_part_of_draft_training():
    """Training adds 2 s to the first step. The steady speed-up adds an eighth of this to every step."""
    train_s = [3.0, 1.0, 1.0, 1.0]
    steps = [{"step_s": 1.75 + s, "seconds": {"train": s}, "trained": s > 1} for s in train_s]
    plain = [{"step_s": 6.0}] * 4
    assert steady_speedup(plain, steps, 8) == (2.0, (2.0, 2.0, 2.0))
    always = [step | {"trained": True} for step in steps]
    assert steady_speedup(plain, always, 1) == (None, pytest.approx((6 / 2.75, 6 / 4.75, 6 / 2.75)))


def rollout_of(tokens: Any, lengths: Any) -> Rollout:
    return Rollout(tokens=np.array(tokens, np.int32), lengths=np.array(lengths))  # pyright: ignore[reportArgumentType]


def test_a_comparison_that_is_stopped_shows_the_steps_so_far():
    rollout = rollout_of([[1, 2]], [2])

    def arm(seconds: float) -> SimpleNamespace:
        def time_step(number: int) -> StepTime:
            if number == 3:
                raise Stopped(15, "stopped")
            return StepTime(dict.fromkeys(STAGES, seconds), 6 * seconds, np.array([5]), rollout, {})

        return SimpleNamespace(time_step=time_step, chosen=None)

    variants: Any = {"autoregressive": arm(2.0), "3": arm(1.0)}
    shown = dict[str, VariantReport]()
    draft_training, rollout_options = SimpleNamespace(max_every=32), SimpleNamespace(lengths=(0, 3))
    model = SimpleNamespace(dtype="bfloat16")
    config: Any = SimpleNamespace(draft_training=draft_training, rollout=rollout_options, model=model)
    with pytest.raises(Stopped):
        time_variants(variants, config, 9, Console(), shown.update)
    assert len(shown["3"].turns) == 2 and shown["3"].step_speedup == (2.0, 2.0, 2.0)


def test_turns_before_a_death_are_in_the_file(tmp_path: Path):
    """An error of XLA, no memory, SIGKILL or an abort in the fifteenth turn: the other fourteen make a table."""
    command = [sys.executable, "-m", "tests.launch.dying_comparison", str(tmp_path)]
    endings = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert endings == {"exception": 1, "memory": 1, "kill": -signal.SIGKILL, "abort": -signal.SIGABRT}
    for how, ending in endings.items():
        reports = read_reports(json.loads((tmp_path / f"{how}.json").read_text())["arms"])
        assert [len(report.turns) for report in reports.values()] == [14, 14]
        assert reports["3"].step_speedup == pytest.approx((2.0, 2.0, 2.0))
        shown = io.StringIO()
        print_stage_times(reports, Console(file=shown, width=200))
        # What can still print does so itself.
        assert (shown.getvalue().splitlines()[2] in (tmp_path / f"{how}.txt").read_text()) == (ending > 0)


@pytest.mark.parametrize(
    "options",
    [
        {"--rollout.draft-lengths": "0 2", "--lora.rank": "2"},
        pytest.param({"--asynchronous.lag": "1", "--rollout.draft-length": "2"}, marks=pytest.mark.slow),
    ],
)
def test_the_closing_comparison_times_new_steps_at_the_runs_lengths(options: Options, monkeypatch: pytest.MonkeyPatch):
    """Steps of the run would draft what its history lookup remembers of them."""
    words = LEAST | {"--steps": "4", "--speedup.steps": "1", "--draft.lookup.kind": "history"} | options
    experiment = build_experiment(parse_run(argv("tiny", words), "", ""), takes_steps=True)
    check_comparison(experiment)
    steps, said = list[int](), io.StringIO()

    def record(step: StagedStep, state: TrainState, prompts: Prompts, chosen: Any = None) -> Any:
        steps.append(int(state.step))
        return take(step, state, prompts, chosen)

    take = StagedStep.__call__
    monkeypatch.setattr(StagedStep, "__call__", record)
    lengths = experiment.config.rollout.draft_lengths
    # Costs with which drafting always pays.
    seconds = np.array([[1.0, 0.5]] * len(experiment.phases), np.float32) if lengths else None
    state = fresh_state(experiment, experiment.networks.params, seconds)
    reward = make_reward(None, experiment.problems.train, experiment.tokenizer)
    report = compare_steps(experiment, reward, state, Console(file=said, width=170))
    assert set(steps) == {4, 5} and set(report.draft_lengths) == {2} and len(report.turns) == 1
    assert ("automatic" in said.getvalue()) == bool(lengths)
    # One step has no interval.
    assert "95%" not in said.getvalue() and "[" not in said.getvalue()


def test_every_variant_has_the_same_tokens(compared: Compared):
    """With `coupled`, tokens do not depend on the drafts, of which some are accepted."""
    (found, said), arms = compared, compared[0]["arms"]
    assert found["versions"].startswith("Python 3") and (found["recipe"], found["checkpoint"]) == ("tiny", None)
    for part in ("command", "device", "draft length 2 at 16 slots of 26 positions"):
        assert part in said
    assert "warm-up: " not in said and "random weights" not in said
    assert all(arm["parting"] is None for arm in arms.values())
    assert len({arm["tokens"] for arm in arms.values()}) == 1
    assert [arm["draft_lengths"] for arm in arms.values()] == [[], [2], [2]]
    assert arms["autoregressive"]["alpha"] == 1
    assert 1 < arms["2"]["alpha"] == arms["automatic"]["alpha"] <= 3


@pytest.mark.slow
def test_it_starts_from_a_distilled_draft_or_from_that_of_a_run(tmp_path: Path):
    """It also measures the cost of rounds. Draft training does not change the generated tokens."""
    options = {"--draft-lengths": "1,3", "--automatic": "False", "--ladder": "26"}
    assert list(run_program(tmp_path / "found.json", options)[0]["arms"]) == ["autoregressive", "1", "3"]
    options = {"--draft-lengths": "1,3", "--rollout.verifier": "coupled"}
    found, said = run_program(tmp_path / "found.json", options)
    assert "random weights" in said and "extra seconds of a step that trains it" in said
    assert [arm["trained_steps"] for arm in found["arms"].values()] == [0, 1, 1, 1]
    assert list(found["arms"]) == ["autoregressive", "1", "3", "automatic"]
    assert found["arms"]["automatic"]["draft_lengths"][0] in (0, 1, 3)
    assert all(arm["parting"] is None for arm in found["arms"].values())
    leave_run(tmp_path / "run", build_experiment(parse_run(argv("tiny", SMALL), "", "")))
    options = {"--checkpoint": str(tmp_path / "run"), "--draft-lengths": "1", "--asynchronous.lag": "1"}
    found, said = run_program(tmp_path / "found.json", options)
    assert "warm-up: " not in said and "random weights" not in said
    assert "exposed generation" in said and NOTE in said and "absolute figures mean little" in said
    assert list(found["asynchronous"]) == ["synchronous", "lag 1"]
    for kind, devices in zip(found["asynchronous"].values(), (1, 2), strict=True):
        assert list(kind) == ["autoregressive", "1"] and all(x["devices"] == devices for x in kind.values())
    rows = [row for kind in found["asynchronous"].values() for row in kind.values()]
    for row in rows:
        assert len(row["turns"]) == 2, "of 3 steps each"
        ratios = [a["step_s"] / b["step_s"] for a, b in zip(rows[0]["turns"], row["turns"], strict=True)]
        assert row["step_speedup"] == pytest.approx([np.median(ratios), min(ratios), max(ratios)])
        assert np.divide(row["step_speedup"], row["device_speedup"]) == pytest.approx(row["devices"])
        for times in row["turns"]:
            if row["devices"] == 2:  # the reward is traced, so that the training mesh is idle or trains
                assert times["step_s"] == pytest.approx(times["exposed_s"] + times["train_s"])
            assert times["step_s"] > times["train_s"] > 0 and times["generation_s"] > 0
    assert (found["checkpoint"], found["checkpoint_step"]) == (str(tmp_path / "run"), 1)
    with refuses("checkpoint_step = 7:...1", ConfigError):
        launch.compare.main(argv("tiny", SMALL | {"--checkpoint": str(tmp_path / "run"), "--checkpoint-step": "7"}))


def test_the_memory_of_both_kinds_of_step_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[tuple[list[int], Mesh]]()

    def check(parts: Sequence[MemoryPart], mesh: Mesh) -> None:
        checked.append(([part.size for part in parts], mesh))
        if len(checked) % 4 == 0:
            raise ValueError("enough = 4: checked")

    monkeypatch.setattr("launch.predict.refusals.check_memory", check)
    for lag in (0, 2):
        config = parse_run(argv("tiny", SMALL | {"--asynchronous.lag": str(lag)}), "", "")
        experiment = build_experiment(config, takes_steps=True)
        with refuses("enough = 4", ConfigError):
            launch.compare.compare(experiment, CompareArgs())
    for meshes in ([mesh for _, mesh in checked[:4]], [mesh for _, mesh in checked[4:]]):
        assert meshes == [experiment.rollout_mesh, *[experiment.mesh] * 3]
    (copies, parts, waiting, *_), (more_copies, more_parts, more_waiting, *_) = checked[0][0], checked[4][0]
    # The parts of a copy on one device are as large as itself.
    assert (more_copies, more_parts) == (3 * copies, copies) and parts == waiting == 0 < more_waiting


def test_the_law_of_amdahl():
    assert step_speedup(0.0, 3.0) == 1
    assert step_speedup(1.0, 3.0) == pytest.approx(3)
    # RL-Zero in the paper: generation takes 100.0 s of a step of 151.2 s, and becomes 1.77 times as fast.
    assert step_speedup(100.0 / 151.2, 1.77) == pytest.approx(1.41, abs=0.01)


def test_the_first_difference_of_two_rollouts():
    tokens = np.array([[5, 6, 0, 0], [5, 6, 7, 0], [5, 6, 7, 8], [1, 0, 0, 0]], np.int32)
    ids, plain = np.array([7, 9]), rollout_of(tokens, [2, 3, 4, 1])
    assert first_difference(3, ids, plain, plain) is None
    # Tokens after the end do not count.
    assert first_difference(3, ids, plain, rollout_of(np.where(tokens > 0, tokens, 4), plain.lengths)) is None
    apart = first_difference(3, ids, plain, rollout_of(np.where(tokens == 8, 2, tokens), plain.lengths))
    assert apart == FirstDifference(3, 9, 0, 3, 8, 2)
    assert_refused(str(apart), "first difference in step 3...prompt 9...sample 0...position 3...8...2")
    assert first_difference(1, ids, plain, rollout_of(tokens, [2, 2, 4, 1])) == FirstDifference(1, 7, 1, 2, 7, None)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--rollout.verifier coupled --model.dtype float32", True),
        ("--rollout.verifier coupled --model.dtype bfloat16", False),
        ("--rollout.verifier rejection --model.dtype float32", False),
        ("--rollout.verifier block --model.dtype float32 --rollout.law.temperature 0 --allow-truncated-law True", True),
    ],
)
def test_row_99_a_first_difference_is_said_where_drafts_must_change_no_token(options: str, kept: bool):
    assert drafts_keep_tokens(parse_run(argv("tiny", LEAST | flags(options)), "", "")) is kept


@pytest.mark.parametrize(
    "block_size, saved, lengths", [(7, False, (0, 3, 5, 7)), (6, True, (0, 3, 5)), (2, False, (0, 2))]
)
def test_by_default_it_times_lengths_that_the_draft_can_do(
    block_size: int, saved: bool, lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def build(config: RunConfig, **_: Any) -> Experiment:
        raise ConfigError(f"draft_lengths = {config.rollout.draft_lengths}")

    monkeypatch.setattr(launch.compare, "build_experiment", build)
    options = {"draft.kind": "dspark", "--draft.head.block-size": str(block_size)}
    if saved:
        head = block_like(replace(ONE_LAYER, feature_layers=(0,)), block_size, markov_rank=2)
        described = {"kind": "block", "head": asdict(head), "feature_layers": [0]}
        (tmp_path / "config.json").write_text(json.dumps(described))
        options = {"--draft.kind": "dspark", "--draft.path": str(tmp_path)}
    with refuses(f"draft_lengths = {lengths}", ConfigError):
        launch.compare.main(argv("tiny", SMALL | options))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"--draft-lengths": "0"}, "draft_lengths = (0,): "),
        ({"--draft-lengths": "-1,3"}, "draft_lengths = (-1, 3): "),
        ({"--draft-lengths": "0;3"}, "draft_lengths = 0;3:...INT"),
        ({"--json": "nowhere/x.json"}, "json = nowhere/x.json: "),
        ({"--steps": "0"}, "steps = 0: "),
        ({"--draft.kind": "none", "--rollout.draft-length": "0"}, "draft.kind = none: "),
        ({"--plots": "here"}, "--plots"),
        ({"--distill.batch-size": "64"}, "distill.batch_size = 64: "),
        ({"--draft.kind": "dspark", "--draft-lengths": "0,9"}, "rollout.draft_lengths = (0, 9): must be at most 7"),
    ],
)
def test_it_refuses(refusal: Refusal, options: Options, message: str):
    assert_refused(refusal(launch.compare.main, argv("tiny", SMALL | options)), message)
