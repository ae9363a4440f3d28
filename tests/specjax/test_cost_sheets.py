"""The roofline that follows from sheets: what makes it faster, its units, and that every figure has a source."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from models.published import DECODERS, eagle3_config
from models.sheets import decoder_sheet, eagle3_sheet
from specjax.cost import (
    ENGINES,
    HARDWARE,
    Cell,
    CostModel,
    Deployment,
    Efficiency,
    EngineProfile,
    Hardware,
    cost_model,
    find_engine,
    find_hardware,
    round_seconds,
)
from specjax.rollout.plan import Phase
from tests.refusals import refuses

H100, IDEAL = HARDWARE["h100"], EngineProfile("ideal", "test", layer=0.0)
AS_STORED, ASSUMED = Deployment(), Efficiency()
ROWS = np.array([1.0, 16.0, 256.0, 2048.0])


def model_of(
    name: str = "qwen3-8b",
    hardware: Hardware = H100,
    deployment: Deployment = AS_STORED,
    efficiency: Efficiency = ASSUMED,
    engine: EngineProfile = ENGINES["specjax"],
) -> CostModel:
    draft = eagle3_sheet(eagle3_config(name))
    return cost_model(decoder_sheet(DECODERS[name]), draft, hardware, deployment, efficiency, engine)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_every_figure_has_a_source(hardware: Hardware):
    figures = {field.name for field in fields(Hardware)} - {"name", "sources"}
    assert {name for name in figures if getattr(hardware, name) is not None} <= hardware.sources.keys()
    assert all(hardware.sources.values())


def test_what_has_no_sheet_is_refused():
    with refuses("hardware = h999: no such sheet; must be one of a100, h20"):
        find_hardware("h999")
    with refuses("engine = sglang: no such profile; must be one of specjax"):
        find_engine("sglang")
    with refuses("weight_bytes = 1: NVIDIA A100-SXM4-80GB has no such products"):
        model_of(hardware=HARDWARE["a100"], deployment=Deployment(weight_bytes=1))
    assert model_of(hardware=HARDWARE["a100"], deployment=Deployment(weight_bytes=1, factor_bytes=2)).policy.weights


# Models, devices and deployments that differ in what binds them.
CASES = [
    ("qwen3-8b", "h100", AS_STORED),
    ("qwen3-8b", "cpu", Deployment(weight_bytes=4, cache_bytes=4)),
    ("qwen3-30b-a3b", "h200", Deployment(tensor=2, expert=4)),
    ("qwen3-235b-a22b", "gb200", Deployment(expert=64, weight_bytes=1)),
]


def seconds(model: CostModel, k: int, length: int = 2000) -> np.ndarray:
    return np.asarray(model.seconds(ROWS, ROWS * length, k))


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("name, device, deployment", CASES)
def test_better_hardware_and_smaller_networks_are_never_slower(name: str, device: str, deployment: Deployment, k: int):
    hardware, policy = HARDWARE[device], decoder_sheet(DECODERS[name])
    draft, base = eagle3_sheet(eagle3_config(name)), model_of(name, HARDWARE[device], deployment)
    for field in ("bandwidth", "fp32", "bf16", "fp8", "link", "network"):
        if (figure := getattr(hardware, field)) is not None:
            better = replace(hardware, **{field: 1.5 * figure})
            assert (seconds(model_of(name, better, deployment), k) <= seconds(base, k)).all(), field
    fewer = decoder_sheet(replace(DECODERS[name], num_layers=DECODERS[name].num_layers - 1, feature_layers=()))
    shallow = seconds(cost_model(fewer, draft, hardware, deployment), k)
    assert (shallow < seconds(base, k)).all()
    assert (seconds(base, k) <= seconds(base, k + 1)).all()
    assert (seconds(base, k) <= seconds(base, k, length=2001)).all()
    assert (np.diff(seconds(base, k)) >= 0).all()
    assert (seconds(cost_model(policy, None, hardware, deployment), k) <= seconds(base, k)).all()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_draft_length_of_0_is_autoregressive_decoding(engine: EngineProfile):
    """Whatever the draft: one forward of one token of each row, and what the engine adds to any round."""
    base = model_of(engine=engine)
    plain = cost_model(decoder_sheet(DECODERS["qwen3-8b"]), None, H100, engine=engine)
    np.testing.assert_array_equal(seconds(base, 0), seconds(plain, 0))
    assert base.drafting(4, 800, 0) == 0
    np.testing.assert_allclose(seconds(base, 0), base.policy.seconds(ROWS, 2000 * ROWS) + engine.host)


def test_units():
    """Twice as fast a device, in every unit that has a second, takes half the seconds."""
    name, deployment = "qwen3-30b-a3b", Deployment(tensor=2, expert=4)
    doubled = replace(
        H100, **{field: 2 * getattr(H100, field) for field in ("bandwidth", "fp32", "bf16", "fp8", "link", "network")}
    )
    engine = EngineProfile("test", "test", layer=2e-5, host=1e-3, draft_pass=5e-4)
    halved = replace(engine, layer=1e-5, host=5e-4, draft_pass=2.5e-4)
    slow = model_of(name, H100, deployment, Efficiency(collective=8e-6), engine)
    fast = model_of(name, doubled, deployment, Efficiency(collective=4e-6), halved)
    for k in (0, 3):
        np.testing.assert_allclose(seconds(fast, k), seconds(slow, k) / 2, rtol=1e-12)


def test_what_binds_is_the_longer_of_reading_and_computing():
    """Against figures by hand: weights in bfloat16 over the bandwidth, or 2 FLOPs a weight and token over the peak."""
    sheet, perfect = decoder_sheet(DECODERS["qwen3-8b"]), Efficiency(bandwidth=1.0, compute=1.0, overlap=1.0)
    model = cost_model(sheet, None, H100, efficiency=perfect, engine=IDEAL)
    few, many = model.parts(1, 4096, 0), model.parts(4096, 4096, 0)
    assert few["weights"] == pytest.approx(2 * sheet.dense / H100.bandwidth)
    assert many["weights"] == pytest.approx(2 * sheet.dense * 4096 / H100.bf16)
    assert few["attention"] == pytest.approx(144 * 1024 * 4096 / H100.bandwidth)
    # 4 FLOPs for each layer, head and dimension: a query by a key, and a weight by a value.
    assert model.parts(1, 4096, 999)["attention"] == pytest.approx(4 * 36 * 32 * 128 * 4096 * 1000 / H100.bf16)
    assert sum(many.values()) == model.seconds(4096, 4096, 0)
    both = cost_model(sheet, None, replace(H100, overlapped=False), efficiency=perfect, engine=IDEAL)
    product = 2 * sheet.dense / H100.bf16
    assert both.parts(1, 4096, 0)["weights"] == pytest.approx(few["weights"] + product)
    half = cost_model(sheet, None, H100, efficiency=replace(perfect, overlap=0.5), engine=IDEAL)
    assert half.parts(1, 4096, 0)["weights"] == pytest.approx(few["weights"] + product / 2)


def test_devices_share_weights_heads_and_experts():
    """Beyond the 4 key-value heads, devices of a tensor axis hold copies of the cache."""
    name, hardware = "qwen3-235b-a22b", HARDWARE["gb200"]
    one, eight = (model_of(name, hardware, Deployment(tensor=count), engine=IDEAL).policy for count in (1, 8))
    for field in ("weights", "product", "expert", "expert_product", "attended", "head", "score"):
        assert getattr(eight, field) == pytest.approx(getattr(one, field) / 8), field
    assert eight.cached == pytest.approx(one.cached / 4)
    # Each device samples from all logits, once they are gathered.
    assert eight.sample == pytest.approx(one.sample + 151_936 * 4 / hardware.link)
    assert (one.exchange, one.fixed) == (0, 0) and eight.exchange > 0 and eight.fixed > 0
    spread = model_of(name, hardware, Deployment(tensor=2, expert=8)).policy
    assert spread.experts is not None and spread.experts.replicas == 4
    assert spread.expert == pytest.approx(one.expert / 8)
    assert spread.expert_product == pytest.approx(one.expert_product / 2)
    same = model_of(name, hardware, Deployment(tensor=2, expert=8, same_rows=True)).policy
    assert same.experts is not None and same.experts.replicas == 1
    assert same.expert == pytest.approx(spread.expert)
    assert same.expert_product == pytest.approx(spread.expert_product / 4)
    # A draft is stored by itself: in 2 bytes beside a policy in 8 bits, unless it is said.
    stored = Deployment(tensor=2, weight_bytes=1)
    draft = eagle3_sheet(eagle3_config(name)).network
    for deployment, each in ((stored, 2), (replace(stored, draft_bytes=1), 1)):
        weights = model_of(name, hardware, deployment, Efficiency(bandwidth=1.0)).later.weights
        assert weights == pytest.approx(draft.dense * each / 2 / hardware.bandwidth)
    # Beyond the devices that links join, activations pass through the network.
    near, far = (model_of(name, H100, Deployment(expert=count)).policy.exchange for count in (8, 16))
    assert far == pytest.approx(near * H100.link / H100.network)


def test_what_an_engine_adds():
    base, rows, positions = model_of(engine=IDEAL), 16, 16 * 2000
    device = float(base.seconds(rows, positions, 3))

    def added(**fields: Any) -> float:
        engine = replace(IDEAL, **fields)
        return float(replace(base, engine=engine).seconds(rows, positions, 3)) - device

    assert added(host=1e-3, draft_pass=2e-4) == pytest.approx(1.6e-3)
    # Qwen3-8B has 4 query heads for each key-value head: 16 query rows at k = 3.
    attention = float(base.parts(rows, positions, 3)["attention"])
    assert added(attention=((16.0, 1.0), (24.0, 6.0))) == pytest.approx(0, abs=1e-12)
    assert added(attention=((8.0, 1.0), (24.0, 6.0))) == pytest.approx(2.5 * attention)
    assert [IDEAL.attention_factor(rows) for rows in (1, 99)] == [1, 1]


@pytest.mark.parametrize("name, slots", [("qwen3-8b", 64), ("qwen3-8b", 256), ("qwen3-30b-a3b", 64)])
def test_what_a_run_measures_tells_the_rest(name: str, slots: int):
    """Three phases on a roofline: all lengths of the last are timed, the ends of the others, and two smaller shapes."""
    lengths, model = (0, 1, 3, 5, 7), model_of(name, HARDWARE["gb200"])
    phases = [Phase(slots, 4096), Phase(slots // 2, 4096), Phase(slots // 4, 4096)]
    smaller = [Phase(slots // 16, 4096), Phase(slots // 4, 2048)]
    timed = {(phase, k) for phase in (*phases, *smaller) for k in (0, 7)} | {(phases[-1], k) for k in lengths}

    def exact(phase: Phase, k: int) -> float:
        return float(model.seconds(phase.slots, phase.slots * phase.window, k))

    cells = [Cell(*phase, k, exact(phase, k)) for phase, k in sorted(timed)]
    found = round_seconds(cells, phases, lengths, decoder_sheet(DECODERS[name]).mixture)
    np.testing.assert_allclose(found, [[exact(phase, k) for k in lengths] for phase in phases], rtol=0.1)
