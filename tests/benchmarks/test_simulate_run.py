"""benchmarks.simulate --from-run: acceptance, lengths and costs of a real run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulate import main
from benchmarks.simulation.answer import resolve_pair, run
from benchmarks.simulation.machine import Evidence, round_costs
from benchmarks.simulation.options import SimulateArgs
from benchmarks.simulation.uncertainty import input_ranges
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from launch.run.records import as_recorded
from specjax.types import Mixture
from tests.benchmarks.points import read_options, run_drafted, run_plain, speedups
from tests.launch.run_directories import write_lines, write_run
from tests.refusals import refuses


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A run of 24 completions a step, whose rounds with drafts take twice as long."""
    third = [None, 0.9, 0.8]
    metrics = {f"rollout__acceptance_rate_pos_{i}": [x and x**i for x in third] for i in (1, 2, 3)}
    times = {f"time__{stage}": [None, 2.0, 4.0] for stage in ("train", "logprob", "data", "prepare", "reward")}
    times["time__generation"] = [None, 20.0, 20.0]
    path = write_run(tmp_path / "run", 3, **metrics, **times, rollout__length_mean=[30.0] * 3)
    recipe = load_recipe("tiny")
    recipe = replace(recipe, rollout=replace(recipe.rollout, draft_length=3, max_new_tokens=100, group_size=4))
    config = replace(recipe, data=replace(recipe.data, prompts=6, max_prompt_tokens=20))
    (path / "config.json").write_text(json.dumps(as_recorded(config)))
    write_lines(path / "samples.jsonl", [{"step": 1, "budget": 100, "lengths": [20, 30, 40, 90], "completions": []}])
    cells = [
        {"slots": slots, "window": 120, "draft_length": k, "seconds": 0.01 * (slots + 4) * (1 + k / 3)}
        for slots in (6, 24)
        for k in (0, 3)
    ]
    (path / "cost_table.json").write_text(json.dumps({"cells": cells}))
    return path


def changed_config(run: Path, **values: object) -> None:
    """Change config.json by path (`__` stands for a dot)."""
    config = json.loads((run / "config.json").read_text())
    config |= {name.replace("__", "."): value for name, value in values.items()}
    (run / "config.json").write_text(json.dumps(config))


def test_from_a_run(measured: Path, capsys: pytest.CaptureFixture[str]):
    args, evidence = read_options("--from-run", str(measured))
    expected = 1 + np.mean([sum(rate**i for i in (1, 2, 3)) for rate in (0.9, 0.8)])
    assert args.acceptance_length == pytest.approx(expected) and args.measured_at == 3
    assert (args.sequences, args.slots, args.prompt_tokens, args.limit_tokens) == (24, 24, 20, 100)
    assert (args.train_s, args.logprob_s, args.other_s, args.mean_tokens) == (3, 3, 9, 45)
    plain = run_plain(args.point, evidence)
    # The longest of 24 quantiles of the measured lengths; every round pays for all slots.
    assert plain.generation == pytest.approx(90 * 0.28, rel=0.1)
    assert 1.2 < speedups(args.point, evidence)[0] < expected / 2 * 1.01
    assert {"acceptance_length", "train_s"} <= set(input_ranges(args.point, evidence, {}))
    assert "bandwidth_share" not in input_ranges(args.point, evidence, {})
    assert main(["--from-run", str(measured), "--draft-length", "1", "--samples", "4"]) == 0
    said = capsys.readouterr().out
    assert "measured 20 s, modelled" in said and f"{evidence.modelled_s / 20 - 1:+.0%}" in said
    own = run_drafted(args.point, evidence)
    assert evidence.modelled_s == pytest.approx(own.generation), "of the run's own draft length"
    assert "4 measured rounds" in said and "never probed" not in said
    more, _ = read_options("--from-run", str(measured), "--hardware", "h100", "--model", "qwen3-8b")
    assert more.train_s is None and more.slots == 0 and more.acceptance_length == args.acceptance_length


def edited(run: Path, **metrics: float) -> tuple[SimulateArgs, Evidence]:
    """Return the options and evidence of a run with these metrics in each step; NaN: not measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    given = {name.replace("__", "/"): None if value != value else value for name, value in metrics.items()}
    write_lines(run / "metrics.jsonl", [line | given for line in lines])
    return read_options("--from-run", str(run))


def test_rounds_that_a_run_measured_cost_what_it_measured(measured: Path):
    """One window is cheaper than the fit says, at all draft lengths; a phase that begins with it pays for that one."""
    # Prompts are padded to 20 tokens, since none is longer.
    changed_config(measured, rollout__phases=[[24, 70], [6, 120]], data__max_prompt_tokens=1024)
    table = json.loads((measured / "cost_table.json").read_text())
    table["cells"] += [{"slots": 24, "window": 70, "draft_length": k, "seconds": 0.05 * (1 + k)} for k in (0, 3)]
    (measured / "cost_table.json").write_text(json.dumps(table))
    args, evidence = read_options("--from-run", str(measured))
    assert evidence.phases == ((24, 70), (24, 120), (6, 120)) and args.phases == (24, 6)
    seconds = round_costs(args.point, evidence)
    for rows, held, k, expected in ((24, 50, 0, 0.05), (24, 70, 3, 0.2), (24, 71, 3, 0.56), (6, 50, 0, 0.1)):
        assert seconds(np.array([rows]), np.array([rows * held]), k) == pytest.approx(expected)
    between = [np.sum(seconds(np.array([24]), np.array([24 * 50]), k)) for k in (0, 1, 3)]
    assert between == sorted(between), "a draft length that was not timed has the ratio of its phase"


def test_the_experts_of_a_run(measured: Path):
    config = json.loads((measured / "config.json").read_text())

    def asked(**model: object) -> Evidence:
        (measured / "config.json").write_text(json.dumps(config | {f"model.{name}": model[name] for name in model}))
        return read_options("--from-run", str(measured))[1]

    assert asked().mixture is None
    experts = {"num_experts": 8, "active": 2, "layers": [0, 3]}
    found = asked(**{f"architecture.experts.{name}": each for name, each in experts.items()})
    assert found.mixture == Mixture(layers=2, experts=8, active=2)
    assert asked(path="tests/golden/qwen3_moe").mixture == Mixture(layers=3, experts=8, active=2)
    assert asked(path="Qwen/Qwen3-30B-A3B@main").mixture == Mixture(layers=48, experts=128, active=8)
    (note,) = asked(path="/nowhere").notes
    assert note.startswith("model.path = /nowhere: is not here; ")


def test_training_the_draft_counts_with_drafts_alone(measured: Path):
    """A step of 20 s spends 1 s on the draft. The two probes trained it, as every step did: 3 s are 2 and 1."""
    args, evidence = edited(measured, draft__trained=1)
    assert args.train_s == 3 and not args.draft_training and "not told apart" in evidence.notes[0]
    edited(measured, time__step=20.0, time__generation=math.nan, time__draft_training=0.05)
    args, evidence = edited(measured)
    assert (args.train_s, args.draft_training, evidence.notes) == (2, pytest.approx(0.5), ())
    plain, drafted = (run(point, evidence).stages for point in resolve_pair(args.point, evidence))
    assert (plain.train, plain.draft_training, drafted.draft_training) == (2, 0, pytest.approx(1))
    assert "never probed" in edited(measured, time__train=math.nan)[1].notes[0]


@pytest.mark.parametrize(("devices", "tensor", "training"), [(3, 1, 3), (4, 2, 2)])
def test_an_asynchronous_run(measured: Path, devices: int, tensor: int, training: int):
    """It has one data shard for rollouts and devices to train, which are idle for 2 of 20 s, and none of the stages."""
    changed_config(measured, asynchronous__lag=1, asynchronous__rollout_mesh__tensor=tensor, mesh__data=devices)
    stages = dict.fromkeys(("time__train", "time__logprob", "time__prepare", "time__generation"), math.nan)
    stages |= {"time__step": 20.0, "time__training_mesh_idle": 2.0, "time__rollout_mesh_busy": 19.0}
    args, evidence = edited(measured, **stages)
    share = training / (1 + training)
    assert (args.lag, args.gpus, args.generation_gpus) == (1, 1 + training, 1) and evidence.generation_s == 19
    assert args.slots == 24 and args.train_s == pytest.approx(18 * share)
    assert run_drafted(args.point, evidence).stages.train == pytest.approx(18)
    alone = replace(args.point, lag=0)
    assert run_drafted(alone, evidence).stages.train == pytest.approx(18 * share)
    elsewhere, _ = read_options("--from-run", str(measured), "--hardware", "h100", "--model", "qwen3-8b")
    assert (elsewhere.lag, elsewhere.gpus, elsewhere.generation_gpus) == (0, 8, 0)


def test_a_draft_length_replaces_the_choice_of_a_run(measured: Path):
    recipe = load_recipe("tiny")
    rollout = replace(recipe.rollout, draft_length=3, draft_lengths=(0, 1, 3), max_new_tokens=100, group_size=4)
    (measured / "config.json").write_text(json.dumps(as_recorded(replace(recipe, rollout=rollout))))
    automatic, _ = read_options("--from-run", str(measured))
    assert automatic.point.lengths == (0, 1, 3)
    assert automatic.point.changed({"draft_length": 1}).lengths == (1,)
    assert read_options("--from-run", str(measured), "--draft-length=3")[0].point.lengths == (3,)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--sweep hardware=h100,h200 --model qwen3-8b", "sweep = hardware: ..."),
        ("--sweep model=qwen3-8b,qwen3-4b", "sweep = model: ...--hardware"),
        ("--hardware h200", "hardware = h200: ...--model"),
    ],
)
def test_machines_of_a_run_do_not_mix(measured: Path, options: str, message: str):
    with refuses(message, ConfigError):
        main(["--from-run", str(measured), *options.split()])


def test_a_run_that_cannot_be_asked(measured: Path):
    config = json.loads((measured / "config.json").read_text())
    config.setdefault("rollout", {})["carry_over"] = 0.5
    (measured / "config.json").write_text(json.dumps(config))
    with refuses("from_run = ...: its rollout.carry_over = 0.5", ConfigError):
        read_options("--from-run", str(measured))
    del config["rollout"]["carry_over"]
    (measured / "config.json").write_text(json.dumps(config))
    (measured / "cost_table.json").unlink()
    with refuses("from_run = ...cost_table.json", ConfigError):
        read_options("--from-run", str(measured))
    (measured / "config.json").write_text("{}")
    with refuses("config.json: rollout.draft_length = None: ", ConfigError):
        read_options("--from-run", str(measured))
    write_run(measured, 2)
    with refuses("from_run = ...drafted", ConfigError):
        read_options("--from-run", str(measured))
