"""benchmarks.simulate: from a command line to answers with intervals."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.simulation.answer
from benchmarks.simulate import main
from benchmarks.simulation.answer import SHRINKING, break_even, resolve_pair, run, worth_of_training
from benchmarks.simulation.machine import adapter_parameters, memory, round_costs, sheet_model, stages
from benchmarks.simulation.point import Point
from benchmarks.simulation.rollout import simulate
from benchmarks.simulation.uncertainty import Range, in_the_middle, input_ranges, interval, sample_answers
from benchmarks.simulator_validation.answers import step_example
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from models.decoder import init_decoder
from models.lora import LoraConfig, adapted_layers
from models.published import DECODERS
from specjax.cost import find_engine, find_hardware
from tests.benchmarks.points import NONE, SMALL, check_table, read_options, run_drafted, run_plain, speedups
from tests.documents import ROOT, blocks
from tests.refusals import refuses


def answered(tmp_path: Path, options: str) -> dict[str, Any]:
    """Run the program for a small point, and return its JSON."""
    words = f"--sequences 32 --mean-tokens 100 --limit-tokens 400 {options} --json {tmp_path / 'found.json'}"
    assert main(words.split()) == 0
    return json.loads((tmp_path / "found.json").read_text())


def test_an_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = answered(tmp_path, "--draft-training 0.1 --samples 6")
    said = capsys.readouterr().out
    assert "qwen3-8b on 8 " in said and "k=7 " in said and "training the draft pays if" in said
    (only,), swings = found["answers"], found["details"]["swings"]
    value, low, high = only["step_speedup"]
    assert low <= value <= high and low < high and 1 < value < only["generation_speedup"][0]
    assert only["depends_most_on"] in found["ranges"]
    for name in ("break_even", "worth_of_training"):
        value, low, high = found["details"][name]["length"]
        assert low < value < high and found["details"][name]["depends_most_on"] in found["ranges"]
        assert f"{value:.2f} [{low:.2f}, {high:.2f}] (" in said
    sizes = [abs(swing["high"] - swing["low"]) for swing in swings]
    assert sizes == sorted(sizes, reverse=True) and {swing["name"] for swing in swings} == set(found["ranges"])


def test_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    sweep = "--sweep draft-length=0,3 model=qwen3-8b,qwen3-235b-a22b --ranges other_s=1,1 acceptance_length=2.5,3"
    found = answered(tmp_path, f"--samples 12 {sweep}")
    assert capsys.readouterr().out.count("none: tensor = 1: ") == 2
    assert "other_s" not in found["ranges"] and found["ranges"]["acceptance_length"]["low"] == 2.5
    plain, refused, drafted, _ = found["answers"]
    assert plain["step_speedup"] == [1, 1, 1] and plain["depends_most_on"] is None
    assert drafted["depends_most_on"] in found["ranges"]
    assert drafted["step_speedup"][1] > 1 and "step_speedup" not in refused


def test_a_sweep_of_lags_is_the_table_of_asynchronous_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = answered(tmp_path, "--samples 6 --generation-gpus 6 --sweep lag=0,1")
    assert "exposed generation" in capsys.readouterr().out
    rows, answers = found["lags"], found["answers"]
    expected = [(lag, draft, gpus) for lag, gpus in ((0, 8), (1, 6)) for draft in ("none", "k = 3")]
    assert [(row["lag"], row["draft"], row["generation_gpus"]) for row in rows] == expected
    assert rows[0]["step_speedup"] == [1, 1, 1] and rows[1]["step_speedup"] == answers[0]["step_speedup"]
    for row in rows:
        exposed, generation = (row["seconds"][name] for name in ("exposed", "generation"))
        assert exposed == pytest.approx(generation) if not row["lag"] else exposed[0] < generation[0]
    answered(tmp_path, "--samples 6 --sweep lag=0,1 draft-length=1,3")
    assert "exposed generation" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        ("--hardware abacus", "hardware = abacus: ...h100"),
        ("--engine none", "engine = none: ...vllm-0.17"),
        ("--model gpt", "model = gpt: ...qwen3-8b"),
        ("--gpus 0", "gpus = 0: ...1"),
        ("--gpus 6 --tensor 4", "gpus = 6: ...tensor, 4"),
        ("--gpus 1 --sequences 5000", "sequences = 5000: ...4096"),
        ("--expert 3 --tensor 2", "expert = 3: ...tensor, 2"),
        ("--lag 1 --gpus 1", "lag = 1: "),
        ("--generation-gpus 8", "generation_gpus = 8: ...8"),
        ("--acceptance-length 5", "acceptance_length = 5.0: ...4"),
        ("--mean-tokens 9000", "mean_tokens = 9000.0: ...8192"),
        ("--draft-lengths 3 1", "draft_lengths = (3, 1): "),
        ("--model qwen3-235b-a22b", "tensor = 1: ...GB"),
        ("--weight-bytes 1 --hardware a100 --engine vllm-0.17", "weight_bytes = 1: "),
        ("--sweep lag", "sweep = lag: ...NAME=VALUE"),
        ("--sweep phases=1", "sweep = phases=1: ...NAME one of"),
        ("--sweep lag=x", "lag = x: ...INT"),
        ("--sweep lag=0,1,2 draft-length=0,1,2,3,4,5,6,7 sequences=1,2,3,4,5,6,7,8,9 gpus=1,2", "sweep = ...400"),
        ("--ranges mean_tokens=3,1", "ranges = mean_tokens=...LOW,HIGH"),
        ("--ranges mean_tokens=1,9000", "mean_tokens = 9000.0: "),
        ("--hardware measured", "hardware = measured: ...--from-run"),
        ("--sweep hardware=h100,measured", "sweep = hardware=measured: ...--from-run"),
        ("--from-run /nowhere", "DIR = /nowhere: "),
        ("--json /nowhere/x.json", "json = /nowhere/x.json: "),
    ],
)
def test_nonsense_is_refused_in_one_line(options: str, message: str):
    with refuses(message, ConfigError):
        main(options.split())


def test_ranges_stay_within_what_is_allowed():
    point = replace(SMALL, mean_tokens=1.0, other_s=1e6, layer_us=1e6, length_spread=4.0)
    found = input_ranges(point, NONE, {})
    assert found["other_s"][:2] == (5e5, 1e6) and found["layer_us"].high == 1e6 and found["length_spread"].high == 4
    assert found["mean_tokens"].low == 1


def test_samples():
    """Seconds of training follow the tokens of a sample; a default acceptance is less sure than a given one."""
    pair = resolve_pair(replace(SMALL, train_s=10.0, draft_length=0), NONE)
    ranges = {"mean_tokens": Range(50.0, 150.0, ""), "train_s": Range(8.0, 12.0, "")}
    for values, found in sample_answers(pair, NONE, ranges, 3):
        assert found.plain.stages.train == pytest.approx(values["train_s"] * values["mean_tokens"] / 100)
    asked = [read_options(*words) for words in ((), ("--acceptance-length", "2.8"))]
    default, given = (input_ranges(args.point, evidence, {})["acceptance_length"] for args, evidence in asked)
    assert default.high - default.low > 5 * (given.high - given.low)
    # An interval holds its value.
    assert interval(40.0, [float(x) for x in range(101)]) == pytest.approx((40, 5, 95))
    assert interval(99.0, [float(x) for x in range(101)]) == pytest.approx((99, 5, 99))
    assert interval(50.0, [*map(float, range(90)), *[math.inf] * 11]) == (50, 5, math.inf)


def test_the_value_is_in_the_middle_of_what_was_not_given():
    pair = resolve_pair(SMALL, NONE)
    ranges = {name: Range(0.2, 0.6, "") for name in ("bandwidth_share", "compute_share", "training_share")}
    middle = in_the_middle(tuple(replace(each, training_share=0.3) for each in pair), ranges)[1]  # pyright: ignore[reportArgumentType]
    assert (middle.bandwidth_share, middle.compute_share, middle.training_share) == (0.4, 0.4, 0.3)


def test_no_sequence_is_invented():
    """One sequence on 64 replicas is one, and of 96 a replica has one or two."""
    counts = {1: 1, 64: 64, 96: 96, 128: 128}
    drawn = list[np.ndarray]()

    def seconds(sequences: int) -> float:
        return run_plain(replace(SMALL, gpus=64, sequences=sequences, length_spread=1.5)).generation

    with pytest.MonkeyPatch.context() as patch:
        module = benchmarks.simulation.answer
        patch.setattr(module, "simulate", lambda lengths, *rest: drawn.append(lengths) or simulate(lengths, *rest))
        slower = [seconds(sequences) for sequences in counts]
    assert [int((lengths > 1).sum()) for lengths in drawn] == [*counts.values()] and slower[0] < slower[1] <= slower[-1]


def test_more_is_never_slower():
    for engine in ("specjax", "vllm-0.17"):
        point = replace(SMALL, engine=engine)
        taken = [run_drafted(replace(point, acceptance_length=x)).step for x in (1.0, 2.0, 3.0, 4.0)]
        assert taken == sorted(taken, reverse=True)
        assert speedups(replace(point, draft_length=0)) == (1.0, 1.0)
    base = run_drafted(SMALL)
    assert run_drafted(replace(SMALL, bandwidth_share=1.0)).generation < base.generation
    for name in ("compute_share", "training_share"):
        assert run_drafted(replace(SMALL, **{name: 1.0})).step <= base.step
    two, four = (run_drafted(replace(SMALL, model="qwen3-0.6b", gpus=gpus)) for gpus in (2, 4))
    assert two.step > four.step


def test_stages():
    """A token of 8B parameters takes 6 x 8e9 operations to train on."""
    found = stages(Point(training_share=0.5), 1e6, 8)
    assert found.train == pytest.approx(6 * 7.57e9 * 1e6 / (8 * 989e12 * 0.5), rel=0.01)
    assert (found.logprob, found.movement) == (0, 0)
    vllm = stages(Point(training_share=0.5, engine="vllm-0.17", draft_training=0.1), 1e6, 4)
    assert vllm.logprob == pytest.approx(0.4 * vllm.train) and vllm.train == pytest.approx(2 * found.train)
    assert vllm.movement == pytest.approx(0.3, rel=0.1) and vllm.draft_training == pytest.approx(0.1 * vllm.train)
    assert "logprob_share" not in input_ranges(Point(), NONE, {})
    assert input_ranges(Point(engine="vllm-0.17"), NONE, {})["logprob_share"][:2] == (0.25, 0.6)
    given = stages(Point(train_s=10.0, logprob_s=4.0), 1e6, 4)
    assert (given.train, given.logprob) == (20, 8)


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_adapters_take_a_third_less_training_and_their_own_state(model: str):
    full = Point(model=model, engine="vllm-0.17", gpus=8, lag=1, training_share=0.5)
    adapted = replace(full, lora_rank=8)
    layers = adapted_layers(partial(init_decoder, DECODERS[model]), LoraConfig(rank=8))
    parameters = sum(layer.rank * (math.prod(layer.into) + math.prod(layer.features)) for layer in layers)
    assert adapter_parameters(adapted) == parameters
    before, after = (stages(point, 1e6, 4) for point in (full, adapted))
    assert after.train == pytest.approx(before.train * 4 / 6) and after.logprob == pytest.approx(before.logprob)
    assert after.movement == pytest.approx(parameters * 2 / find_hardware(adapted.hardware).network)
    frozen, trained = (memory(replace(point, engine="specjax", lag=0), 0) for point in (adapted, full))
    assert frozen.weights == trained.weights and frozen.training < trained.training / 3
    assert resolve_pair(Point(gpus=1, sequences=64, lora_rank=32), NONE)[1].lora_rank == 32


def test_lag_hides_generation():
    synchronous, late = (run_drafted(replace(SMALL, lag=lag)) for lag in (0, 1))
    assert synchronous.exposed == pytest.approx(synchronous.generation)
    assert late.exposed < late.generation and 0 < late.generation_gpus < SMALL.gpus
    alone = replace(SMALL, lag=1, generation_gpus=2)
    assert run_drafted(alone).generation_gpus == 2


def test_whether_drafts_pay():
    pair = resolve_pair(replace(SMALL, draft_training=0.2), NONE)
    length = break_even(pair, NONE)
    assert 1 < length < 3
    at_it = run(replace(pair[1], acceptance_length=length), NONE).step
    assert at_it == pytest.approx(run(pair[0], NONE).step, rel=1e-3)
    assert 0 < worth_of_training(pair, NONE) < 3
    assert worth_of_training(resolve_pair(SMALL, NONE), NONE) == pytest.approx(0, abs=1e-3)
    assert break_even(resolve_pair(replace(SMALL, draft_training=10.0, train_s=10.0), NONE), NONE) == math.inf


def test_the_default_phases_are_those_of_the_mixtures():
    recipes = [load_recipe(name) for name in ("qwen3_30b_a3b", "qwen3_235b_a22b")]
    for slots in ([slots for slots, _ in recipe.rollout.phases] for recipe in recipes):
        assert [slots[0] // divisor for divisor in SHRINKING] == slots
    few = replace(SMALL, sequences=4 * 32)
    others = replace(few, phases=(32,)), replace(few, engine="vllm-0.17")
    shrinking, whole, free = map(run_plain, (few, *others))
    assert (shrinking.phases, whole.phases, free.phases) == ((32, 8, 2), (32,), ())
    assert shrinking.generation < whole.generation


def test_memory():
    """8B in 16 bits on one device, with a second vocabulary table and the draft; caches of 147 kB a position."""
    held = memory(SMALL, 0)
    assert held.weights == pytest.approx(17e9, rel=0.05)
    assert held.sequence == pytest.approx(420 * (147_456 + 4096), rel=0.01)
    assert held.training == pytest.approx(16 * 8.6e9 / 4, rel=0.05)
    assert memory(replace(SMALL, lag=1), 0).training == memory(replace(SMALL, engine="vllm-0.17"), 0).training == 0
    assert held.slots == int((0.95 * held.device - held.weights - held.training) // held.sequence)
    with refuses("tensor = 1: ...training state"):
        resolve_pair(replace(SMALL, gpus=1), NONE)
    # 1,000 sequences of a device do not fit, given as slots or as phases; 8 sequences fit in any number of slots.
    many = replace(SMALL, sequences=4000)
    for field, value in {"slots": 1000, "phases": (1000, 4)}.items():
        with refuses(f"{field} = 1000: ...at most as many"):
            resolve_pair(replace(many, **{field: value}), NONE)
        assert resolve_pair(replace(SMALL, **{field: value}), NONE)[1].phases in ((), (1000, 4))
    _ = resolve_pair(replace(many, engine="vllm-0.17", phases=(9999,)), NONE)  # it has no phases
    assert memory(replace(SMALL, engine="vllm-0.17"), 42.0).sequence == pytest.approx(held.sequence / 10)
    assert memory(replace(SMALL, tensor=4), 0).weights == pytest.approx(held.weights / 4)


def test_experts_are_spread_over_devices_with_the_same_rows():
    """In specjax a replica is all of them; elsewhere each group of `tensor` devices has rows of its own."""
    mixture = replace(SMALL, model="qwen3-30b-a3b", gpus=8, tensor=2, expert=4, sequences=64, slots=64)
    assert (mixture.replica, replace(mixture, engine="vllm-0.17").replica) == (4, 2)
    arms = [run_plain(replace(mixture, engine=engine)) for engine in ("specjax", "vllm-0.17")]
    assert [arm.slots for arm in arms] == [32, 16]
    with refuses("generation_gpus = 2: ...replica, 4"):
        replace(mixture, lag=1, generation_gpus=2)


def test_times_of_an_engine_are_given_in_microseconds():
    engine = find_engine("vllm-0.17")
    given = {name: 1e6 * getattr(engine, name) for name in ("layer", "draft_pass", "host")}
    point = replace(SMALL, engine=engine.name)
    found = sheet_model(replace(point, **{f"{name}_us": value for name, value in given.items()}))
    rows, positions = np.array([4.0]), np.array([4000.0])
    assert found.seconds(rows, positions, 3) == pytest.approx(sheet_model(point).seconds(rows, positions, 3))


def test_drafts_cost_more_with_rows_and_block_drafts_pass_once():
    one, many = np.array([1.0]), np.array([32.0])
    for draft in ("eagle3", "block"):
        base, slow = (round_costs(replace(SMALL, draft=draft, drafted_factor=x), NONE) for x in (1.0, 1.2))
        assert slow(one, 1024 * one, 0) == base(one, 1024 * one, 0)
        assert slow(one, 1024 * one, 3) == pytest.approx(1.2 * base(one, 1024 * one, 3))
    full, half = (sheet_model(replace(SMALL, overlap=overlap)) for overlap in (1.0, 0.4))
    verified = [[x.seconds(n, 1024 * n, 3) - x.drafting(n, 1024 * n, 3) for x in (half, full)] for n in (one, many)]
    excess = [slower / faster - 1 for slower, faster in verified]
    assert excess[0] < 0.02 and 0.1 < excess[1] < 0.3
    eagle, block = (round_costs(replace(SMALL, draft=draft), NONE) for draft in ("eagle3", "block"))
    assert eagle(one, 1024 * one, 0) == block(one, 1024 * one, 0)
    more = [costs(one, 1024 * one, 7) - costs(one, 1024 * one, 3) for costs in (eagle, block)]
    assert more[1] < more[0] / 2 and block(one, 1024 * one, 1) > eagle(one, 1024 * one, 1)


def test_the_example_of_the_page():
    """docs/simulator.md shows what its first command prints: values inside their intervals, and parts that add up."""
    text = (ROOT / "docs" / "simulator.md").read_text()
    command, lines = blocks(text, "bash")[0], blocks(text)[0].splitlines()
    assert step_example(command.split("benchmarks.simulate ")[1])["lines"] == lines
    check_table(lines)
