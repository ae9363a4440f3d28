"""benchmarks.bench: the memory floor, the stand-ins that force acceptance and lengths, reports, and bad input."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from benchmarks.bench import __main__ as bench
from benchmarks.bench import plots
from benchmarks.bench.model_flops import causal_pairs, device_sheet
from benchmarks.bench.models import BenchNetworks, check_grid, random_networks, random_prompts
from benchmarks.bench.presets import PRESETS, LongTail, Preset
from benchmarks.bench.report import BenchSection, Row, cell_by_cell, print_section, where_it_fits
from benchmarks.bench.rollout_timer import ANY_LENGTH
from benchmarks.bench.sections import decoding, layout
from benchmarks.bench.sections.generation import acceptance
from benchmarks.bench.sections.layout import Runs
from benchmarks.bench.sections.update import Gradient, head_gradient, policy_gradient, update
from benchmarks.bench.stubs import STOP, forced_lengths
from benchmarks.bench.timers import rollout_timer
from benchmarks.gpu.step_programs import policy_params, step_networks
from launch.errors import ConfigError
from launch.plan.flops import flops
from models.sheets import block_sheet, eagle3_sheet
from specjax import kernels
from specjax.cost import HARDWARE, Cell
from specjax.keys import seed_step, sequence_keys
from specjax.rollout.plan import RolloutConfig
from tests.benchmarks.presets import SMALL
from tests.refusals import refuses
from tests.specjax.training import AS_SHIPPED


@pytest.fixture(scope="module")
def networks() -> BenchNetworks:
    return random_networks(SMALL)


def test_the_floor_counts_what_a_round_and_a_copy_move(networks: BenchNetworks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.bench.sections.decoding.time_call", lambda run: (run(), 0.5)[1])
    copy = decoding.CopyBandwidth()
    assert copy.measure() == 2 * copy.nbytes * 8 / 0.5
    assert SMALL.decoder.tie_embeddings
    tied = networks.trained.policy
    # A tied embedding is the output layer too. One that is not tied is only looked up.
    every = sum(x.size * 4 for x in jax.tree.leaves(tied))
    assert decoding.read_bytes(networks.policy, tied) == every
    untied = tied | {"head": {"kernel": tied["embed"]["embedding"].T}}
    assert decoding.read_bytes(networks.policy, untied) == every


def test_model_flops_are_those_of_the_traced_products(networks: BenchNetworks, monkeypatch: pytest.MonkeyPatch):
    """Traced attention multiplies masked pairs too, each pass computes its laws, and the last token needs no logits.

    Logits of one token of each row are traced, and left out by XLA.
    """
    # On CPUs the angles of the rotary embedding pass through a product.
    monkeypatch.setenv("SPECJAX_KERNELS", "plain")
    decoder, length, rows = SMALL.decoder, 8, 4
    width = decoder.num_heads * decoder.head_dim

    def traced(gradient: Gradient) -> float:
        with jax.set_mesh(networks.mesh):
            return sum(flops(jax.make_jaxpr(gradient.run)(*gradient.args).jaxpr))

    policy = policy_gradient(networks, SMALL, "none", length)
    assert policy.microbatches == rows and len(policy.args[1].tokens) == rows
    masked = 12 * decoder.num_layers * width * (length**2 - causal_pairs(length))
    unread, dead = (times * decoder.hidden_size * decoder.vocab_size for times in (6, 2))
    assert policy.flops == traced(policy) - rows * (masked - unread + dead)
    # Frozen weights have no gradient, nor has the input of the first layer.
    key = jax.random.key(0)
    adapted = step_networks(SMALL, decoding.EAGLE3, policy_params(SMALL, 2, networks.mesh, key), networks.mesh, key)
    policy = policy_gradient(adapted, SMALL, "none", length)
    assert policy.flops == traced(policy) - rows * (masked - unread * 4 // 6 + dead)
    draft, indices, passes, anchors = head_gradient(networks, SMALL, 0, length), length - 2, 3, 2
    masked = passes * 12 * width * (indices**2 - causal_pairs(indices))
    again = 2 * decoder.hidden_size * decoder.vocab_size * (passes - 1) * (indices - 1)
    assert draft.flops == traced(draft) - masked - again
    # An anchor sees half of the keys of its row in the mean.
    draft = head_gradient(networks, SMALL, anchors, length)
    masked = passes * (indices - (indices + 1) / 2)
    assert draft.flops == traced(draft) - 12 * width * anchors * masked


def test_a_device_is_found_by_the_name_that_its_driver_gives():
    for kind, name in {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H20": "h20"}.items():
        assert device_sheet("gpu", kind) is HARDWARE[name]
    assert device_sheet("gpu", "NVIDIA H1") is None


def test_gradients_are_timed(networks: BenchNetworks):
    *_, section = update(networks, SMALL)
    assert [row["gradient"] for row in section.rows] == ["policy, remat none", "draft, 32 anchors", "draft, all tokens"]
    for row in section.rows:
        assert isinstance(row["MFU"], float) and 0 < row["MFU"] < 1
        assert isinstance(row["tokens/s"], float) and np.isfinite(row["tokens/s"])


@pytest.mark.parametrize("k, rate", [(1, 0.3), pytest.param(3, 0.8, marks=pytest.mark.slow)])
def test_acceptance_is_forced(networks: BenchNetworks, k: int, rate: float):
    """The fraction of rounds that accept a position is the forced rate, within five standard deviations."""
    rows = 64
    config = RolloutConfig(group_size=1, max_new_tokens=64, draft_length=k)
    timer = rollout_timer(networks, random_prompts(networks, rows, 4), config)
    rollout = timer.generate(0, np.float32(rate))
    # The budget cuts the last rounds, which affects later positions. Position 1 counts whenever it could be emitted.
    drafted, accepted = (np.asarray(x.sum(axis=0), float) for x in (rollout.drafted, rollout.accepted))
    reached = np.append(drafted[0], accepted[:-1] * drafted[1:] / drafted[:-1])
    error = 5 * np.sqrt(rate * (1 - rate) / reached)
    assert (reached > 200).all()
    np.testing.assert_array_less(np.abs(accepted / reached - rate), error)
    # Another rate uses the same program.
    assert timer.measure(0, np.float32(0)).acceptance_length == 1.0
    assert timer.measure(0, np.float32(1)).acceptance_length > k


@pytest.mark.slow
@pytest.mark.parametrize("k, phases", [(0, ()), (3, ((4, ANY_LENGTH), (2, ANY_LENGTH)))])
def test_lengths_are_forced(networks: BenchNetworks, k: int, phases: tuple[tuple[int, int], ...]):
    tail = LongTail(median=6, every=4)
    config = RolloutConfig(group_size=2, max_new_tokens=tail.longest, draft_length=k, phases=phases)
    prompts = random_prompts(networks, 8, 4)
    rollout = rollout_timer(networks, prompts, config, tail=tail).generate(0, np.float32(0.7))
    sequences = jnp.arange(16)
    keys = sequence_keys(seed_step(0, 0), prompts.id[sequences // 2], sequences % 2)
    expected = np.asarray(forced_lengths(keys, tail))
    np.testing.assert_array_equal(rollout.lengths, expected)
    tokens = np.asarray(rollout.tokens)
    assert rollout.stopped is not None and rollout.stopped.all()
    assert (np.argmax(tokens == STOP, axis=1) == expected - 1).all()
    assert set(expected[expected > 8]) == {48} and expected[expected <= 8].min() >= 3


@pytest.mark.slow
def test_rounds_are_put_in_tables_and_plots(networks: BenchNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sections: dict[str, BenchSection] = {}
    for measure in (decoding.floor, decoding.verify, decoding.draft, acceptance):
        *_, section = measure(networks, SMALL)
        sections[measure.__name__] = section
        assert len({tuple(row) for row in section.rows}) == 1, "rows of one table have the same columns"
        assert any("cost model" in note for note in section.notes) == (measure is decoding.draft)
        if measure is decoding.draft:
            assert [(row["draft"], row["k"]) for row in section.rows] == [("eagle3", 2), ("dspark", 7)]
            assert any("dspark is as fast as eagle3 at k = 2 if" in note for note in section.notes)
        for row in section.rows:
            compile_seconds = row["compile s"]
            assert isinstance(compile_seconds, float) and compile_seconds > 0
            assert row.keys() >= {"context", "batch"} or measure is acceptance
    (row,) = section.rows
    assert row["k"] == 2 and row["rate"] == 0.5 and isinstance(row["speed-up"], tuple)
    drawn: dict[str, plots.Lines] = {}
    monkeypatch.setattr(plots, "_draw", lambda path, lines, *_, **__: drawn.update({path.name: lines}))
    plots.save_plots(tmp_path, sections)
    named = {name: list(lines) for name, lines in drawn.items()}
    assert named == {"throughput.png": ["context 8"], "speedup.png": ["rate 0.5"]}


@pytest.mark.slow
def test_layouts_are_put_in_a_table(networks: BenchNetworks):
    *_, section = layout.layout(networks, replace(SMALL, gradients=False, repeats=1))
    names = ["phases", "windows", "queue", "fewer slots after a queue", "prefill shared by a group"]
    assert [row["what"] for row in section.rows] == names
    assert section.notes[-1].startswith("ladder not measured")
    for row in section.rows:
        off, on = row["off s"], row["on s"]
        assert isinstance(off, float) and isinstance(on, float)
        assert row["speed-up"] == pytest.approx((off / on,) * 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [layout.phases, layout.windows, layout.queue, layout.phases_after_queue, layout.shared_prefill]
)
def test_compared_rollouts_do_the_same_work(networks: BenchNetworks, make: Callable[[BenchNetworks, Preset], Runs]):
    """Completions have the same lengths in both; only rounds, slots or prompts differ."""

    def lengths(run: Callable[[], Any]) -> np.ndarray:
        done = run()
        return np.concatenate([np.asarray(part.lengths) for part in (done if isinstance(done, list) else [done])])

    off, on = make(networks, SMALL)
    if make is layout.shared_prefill:
        assert lengths(off).sum() == lengths(on).sum() == 16 * SMALL.tail.median
    else:
        np.testing.assert_array_equal(lengths(off), lengths(on))
        assert lengths(on).max() == SMALL.tail.longest > 2 * np.median(lengths(on))


@pytest.mark.slow
def test_the_ladder_gives_the_gradients_of_padded_rows(networks: BenchNetworks, monkeypatch: pytest.MonkeyPatch):
    # With the emitters that tests turn off, XLA (jax 0.10.2) gets the gradient of a tied embedding wrong here.
    shipped = kernels.compiler_options(networks.policy.dtype) | AS_SHIPPED
    monkeypatch.setattr("specjax.kernels.cpu.compiler_options", lambda dtype: shipped)
    off, on = (jax.tree.leaves(run()) for run in layout.ladder(networks, SMALL))
    assert max(float(jnp.abs(x).max()) for x in off) > 0
    for padded, cut in zip(off, on, strict=True):
        np.testing.assert_allclose(cut, padded, rtol=1e-3, atol=1e-6)


def test_the_cost_model_reports_its_error():
    exact = [Cell(slots, 100, k, 1e-3 + 1e-5 * slots * (k + 1)) for slots in (1, 4) for k in (0, 3)]
    (note,) = decoding._cost_model_note(exact)
    assert "fixed 1e+03, " in note and note.endswith("relative error 0% in the median cell, at most 0%")
    (note,) = decoding._cost_model_note([*exact, exact[0]._replace(seconds=2 * exact[0].seconds)])
    assert not note.endswith("by 0% at most")
    assert decoding._cost_model_note(exact[:1]) == []


def test_the_acceptance_length_at_which_both_drafts_are_as_fast_is_noted():
    row: Row = {"context": 8, "batch": 2, "draft": "eagle3", "k": 3, "dspark / this": (1.25, 1.2, 1.3)}
    unknown: list[Row] = [{**row, "dspark / this": None}, {"context": 8, "batch": 4}]
    (note,) = decoding._break_even([row, *unknown], (0.5,))
    # A round at acceptance 0.5 has 1 + 1/2 + 1/4 + 1/8 tokens.
    assert note.startswith("2 rows, 8 positions: ") and note.endswith("1.25 [1.2, 1.3] times as long: 2.34 at 0.5")


def test_the_drafts_of_a_preset_have_the_published_sizes():
    preset = PRESETS["qwen3-8b"]
    head, block = eagle3_sheet(preset.head).network, block_sheet(preset.block)
    assert preset.block_decoder.feature_layers == (2, 10, 18, 26, 34) and block.markov is not None
    sizes = block.network.dense, block.network.head, block.fused, block.markov.head, head.dense, head.head
    assert [round(size / 1e6) for size in sizes] == [965, 622, 84, 39, 218, 131]


def test_a_cell_that_does_not_fit_does_not_end_the_benchmark(capsys: pytest.CaptureFixture[str]):
    def fails(message: str) -> list[list[Row]]:
        raise jax.errors.JaxRuntimeError(message)

    full = where_it_fits({"batch": 256}, lambda: fails("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7."))
    after_a_turn = where_it_fits({"batch": 64}, lambda: chain([[{"ms": 9.0}]], map(fails, ["RESOURCE_EXHAUSTED"])))
    fitting = where_it_fits({"batch": 1}, lambda: [[{"ms": 4.0}], [{"ms": 3.0}, {"ms": 5.0}]])
    *_, earlier, rows = cell_by_cell([full, after_a_turn, fitting])
    assert earlier == [{"batch": 256}, {"batch": 64, "ms": 9.0}, {"batch": 1, "ms": 4.0}]
    assert rows == [*earlier[:2], {"batch": 1, "ms": 3.0}, {"batch": 1, "ms": 5.0}]
    assert capsys.readouterr().err.splitlines()[-1] == "measured: batch 1, ms 5"
    print_section(BenchSection("a title", rows), Console())
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[2:5]]
    assert shown == [["256", "-"], ["64", "9"], ["1", "3"]]
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        next(where_it_fits({}, lambda: fails("INTERNAL: something else")))


def test_a_cell_that_cannot_fit_is_not_tried(networks: BenchNetworks):
    preset, tried = replace(SMALL, batches=(1, 10**9), contexts=(8, 10**9)), []
    check_grid(preset)
    *_, rows = decoding._each_cell(networks, preset, lambda *cell: tried.append(cell) or iter([[{"ms": 3.0}]]))
    assert tried == [(8, 1)] and [len(row) for row in rows] == [3, 2, 2, 2]


def test_everything_measured_is_kept_when_a_later_section_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    row = {"context": 8, "batch": 1, "tokens/s": 120.0, "why": None}

    def measured(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
        assert preset.batches == (3, 5) and preset.contexts == (7,)
        yield BenchSection("a title", [row | {"share": (float(preset.repeats), 1.0, 9.0)}], ["note"])

    def fails(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
        yield BenchSection("after a turn", [row], [])
        raise RuntimeError("broken")

    monkeypatch.setattr(bench, "SECTIONS", bench.SECTIONS | {"floor": measured, "verify": fails})
    monkeypatch.setattr(bench, "random_networks", lambda preset: None)
    path, varied = tmp_path / "bench.json", "--preset tiny --batches 3 5 --contexts 7 --repeats 4"
    with pytest.raises(RuntimeError, match="broken"):
        bench.main(f"{varied} --sections floor verify --json {path} --plots {tmp_path / 'plots'}".split())
    found = json.loads(path.read_text())
    assert found.keys() == {"preset", "provenance", "sections"} and found["preset"] == "tiny"
    assert found["provenance"][0].startswith("command   python -m benchmarks.bench")
    rows = [row | {"share": [4.0, 1.0, 9.0]}]
    after_a_turn = {"title": "after a turn", "rows": [row], "notes": []}
    assert found["sections"] == {"floor": {"title": "a title", "rows": rows, "notes": ["note"]}, "verify": after_a_turn}
    shown = capsys.readouterr().out
    assert "4 [1, 9]" in shown and "after a turn" in shown
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["throughput.png"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--preset huge", "preset = huge: "),
        ("--sections floor roof", "sections = roof: "),
        ("--repeats 0", "repeats = 0: "),
        ("--contexts 1024 0", "contexts = (1024, 0): "),
        ("--json nowhere/at/all.json", "json = nowhere/at/all.json: "),
        ("--plots /dev/null/plots", "plots = /dev/null/plots: "),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options: str, message: str):
    with refuses(message, ConfigError):
        bench.main(options.split())
