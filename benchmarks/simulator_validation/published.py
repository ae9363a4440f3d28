"""Numbers that others published: rounds of one engine, whole steps, and what cannot be predicted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.simulation.acceptance import predict_length
from benchmarks.simulator_validation.cells import Figure, Kind, PageSection, rows_of
from launch.comparison.stage_times import step_speedup
from models.published import DECODERS, eagle3_config
from models.sheets import decoder_sheet, eagle3_sheet
from specjax.cost import (
    CostModel,
    Deployment,
    DraftSheet,
    EngineProfile,
    Forward,
    cost_model,
    find_engine,
    find_hardware,
)

# Positions of a row where none are published.
POSITIONS = 1024
HELD = f"{POSITIONS:,} positions of a row"
GIVEN = "the generation of the same run, as published"
ROOFLINE, VLLM = find_engine("specjax"), find_engine("vllm-2025")
ENGINES = {"roofline": ROOFLINE, "vllm-2025": VLLM}


def model_of(model: str, hardware: str, engine: EngineProfile, tensor: int = 1, draft: str | None = None) -> CostModel:
    """Return the cost model of a published model. draft: a small model that drafts; None: an EAGLE-3 head."""
    sheet = eagle3_sheet(eagle3_config(model)) if draft is None else DraftSheet(decoder_sheet(DECODERS[draft]))
    policy, device = decoder_sheet(DECODERS[model]), find_hardware(hardware)
    return cost_model(policy, sheet, device, Deployment(tensor=tensor, expert=tensor), engine=engine)


def cost(round_costs: CostModel, rows: int, k: int, positions: int = POSITIONS) -> float:
    """Return the seconds of a round over the seconds of a round without drafts."""
    return float(round_costs.seconds(rows, rows * positions, k) / round_costs.seconds(rows, rows * positions, 0))


def plain_ms(round_costs: CostModel, rows: int, positions: int = POSITIONS) -> float:
    """Return the milliseconds of a round without drafts."""
    return 1e3 * float(round_costs.seconds(rows, rows * positions, 0))


# Costs of rounds in rounds without drafts, and milliseconds of the latter.
LLAMA = {2: 1.44, 3: 1.61, 4: 1.76, 5: 1.94, 6: 2.06, 7: 2.15}
ANGELSLIM = {
    "qwen3-1.7b": (2.62, 1.29),
    "qwen3-4b": (4.29, 1.25),
    "qwen3-8b": (6.59, 1.17),
    "qwen3-14b": (10.72, 1.15),
    "qwen3-32b": (23.08, 1.12),
    "qwen3-30b-a3b": (3.12, 1.49),
}
_BY_ROWS = {2: 1.54, 4: 1.53, 8: 1.72, 16: 1.89, 24: 2.01, 32: 2.11, 48: 2.02, 56: 2.08, 64: 2.02}
EAGLE3 = {rows_of(rows): (rows, 3, cost) for rows, cost in _BY_ROWS.items()}
SPECFORGE = {rows_of(rows): (rows, 3, cost) for rows, cost in {1: 2.59, 4: 2.35}.items()}
VLLM_031 = {1: (125.0, 10.5), 8: (898.0, 4739 / 898), 32: (2726.0, 9538 / 2726)}
PR_2059 = {f"k = {k}": (16, k, cost) for k, cost in {1: 1.53, 2: 1.77, 4: 2.61, 7: 4.83, 10: 6.23}.items()}

# NVIDIA's cohort of 2026-08-23: acceptance length at k = 3, rows of an engine, positions of a row.
COHORT, COHORT_ROWS, COHORT_POSITIONS = 2.5, 8, 800


def rounds() -> Iterator[PageSection]:
    """Yield the sections of rounds of one engine, from a roofline and with the constants fitted to the first."""
    notes = [
        f"Rows hold {POSITIONS:,} positions, where none are published. `vllm-2025` is a roofline with three times "
        "fitted to the first set: of a layer, of the host and of a draft pass. No bound is promised: the draft pass is "
        "not one constant, neither over engines nor over versions."
    ]
    yield PageSection("Rounds: Llama-3.1-8B, H100, one row", "vLLM#20780, EAGLE-3", notes, [*_llama()])
    yield PageSection("Rounds: Qwen3, H20, one row, k = 2", "AngelSlim's table; k to be checked", [], [*_angelslim()])
    notes = ["The acceptance length, 2.79, is assumed: the paper's table gives speed-ups alone."]
    yield PageSection(
        "Rounds: Llama-3.1-8B, H100, k = 3, by rows",
        "EAGLE-3, table 3, SGLang",
        notes,
        [*_costs("llama-3.1-8b", EAGLE3, f"acceptance length, and {HELD}")],
    )
    yield PageSection("Rounds: Qwen3-8B, H100, vLLM 0.31", "gist of jiangLLM, 2026-10-18", [], [*_newer_vllm()])
    mixture = _costs("qwen3-30b-a3b", SPECFORGE, tensor=2)
    yield PageSection("Rounds: Qwen3-30B-A3B, two H100, k = 3", "SpecForge#339", [], [*mixture])
    notes = [
        "16 rows a GPU and tensor 4 are assumed. A draft of a third of the size costs as much: launches, not bytes."
    ]
    title = "Rounds: Qwen3-32B drafted by Qwen3-1.7B, 8 GPUs"
    draft_model = _costs("qwen3-32b", PR_2059, f"rows, sharding and {HELD}", tensor=4, draft="qwen3-1.7b")
    yield PageSection(title, "NeMo RL PR#2059, temperature 1", notes, [*draft_model])


def _llama() -> Iterator[Figure]:
    for name, engine in ENGINES.items():
        round_costs = model_of("llama-3.1-8b", "h100", engine)
        kind: Kind = "assumed" if engine is ROOFLINE else "fitted"
        why = HELD if engine is ROOFLINE else ""
        yield Figure(f"{name}: ms without drafts", 7.07, plain_ms(round_costs, 1), kind, why=why)
        for k, published in LLAMA.items():
            yield Figure(f"{name}: cost at k = {k}", published, cost(round_costs, 1, k), kind, why=why)


def _angelslim() -> Iterator[Figure]:
    for name, engine in ENGINES.items():
        for model, (plain, ratio) in ANGELSLIM.items():
            round_costs = model_of(model, "h20", engine)
            yield Figure(f"{name}: {model}, ms without drafts", plain, plain_ms(round_costs, 1), "assumed", why=HELD)
            yield Figure(f"{name}: {model}, cost", ratio, cost(round_costs, 1, 2), "assumed", why=f"k = 2, and {HELD}")


def _costs(
    model: str, published: Mapping[str, tuple[int, int, float]], why: str = HELD, **options: Any
) -> Iterator[Figure]:
    """Yield costs of rounds on H100s, by name: (rows, draft length, the published cost). options: of model_of."""
    for engine_name, engine in ENGINES.items():
        round_costs = model_of(model, "h100", engine, **options)
        for name, (rows, k, value) in published.items():
            yield Figure(f"{engine_name}: {name}", value, cost(round_costs, rows, k), "assumed", why=why)


def _newer_vllm() -> Iterator[Figure]:
    for name, engine in ENGINES.items():
        round_costs = model_of("qwen3-8b", "h100", engine)
        for rows, (speed, oracle) in VLLM_031.items():
            tokens_per_s = 1e3 * rows / plain_ms(round_costs, rows)
            yield Figure(f"{name}: {rows_of(rows)}, tokens/s without drafts", speed, tokens_per_s, "assumed", why=HELD)
            # Drafts of 12 tokens that are always right, and cost nothing to make.
            free = replace(round_costs, first=Forward(), later=Forward(), engine=replace(engine, draft_pass=0.0))
            yield Figure(
                f"{name}: {rows_of(rows)}, cost with an oracle, k = 12",
                13 / oracle,
                cost(free, rows, 12),
                "assumed",
                why=HELD,
            )


def steps() -> PageSection:
    """Return the cells of whole steps that others measured."""
    cells: list[Figure] = []
    skyrl = 400.7 - 310.1
    for name, engine in ENGINES.items():
        round_costs = model_of("qwen3-8b", "h100", engine)
        band = [3.32 / cost(round_costs, rows, 3, 3000) for rows in (8, 64)]
        why = "as Qwen3-8B with an EAGLE-3 head, 8 to 64 rows a GPU; it is Qwen3.5-9B with its own MTP head"
        middle = float(np.mean(band))
        cells.append(Figure(f"SkyRL#1832, generation, {name}", 2.03, middle, "assumed", why=why))
        step = 400.7 / (310.1 / middle + skyrl + 61.3 - 57.3)
        cells.append(Figure(f"SkyRL#1832, step, {name}", 1.62, step, "assumed", why=why))
    step = 400.7 / (152.4 + skyrl + 61.3 - 57.3)
    name, why = "SkyRL#1832, step, from the published generation and training", "all its stages, as published"
    cells.append(Figure(name, 1.62, step, "assumed", 0.05, why=why))
    share = (1 - 1 / 1.17) / (1 - 1 / 1.28)
    cells.append(
        Figure("NVIDIA cohort 2026-08-23, 30B-A3B, EAGLE-3 k = 3: step", 1.17, step_speedup(share, 1.28), "fitted")
    )
    cohort = {"EAGLE-3 k = 5": (1.24, 1.14), "DFlash k = 5, in-domain": (1.63, 1.32), "DFlash k = 7": (1.62, 1.32)}
    cohort |= {"DSpark k = 5": (1.56, 1.30), "DFlash k = 5, as published": (1.36, 1.19)}
    for draft, (generation, published) in cohort.items():
        name = f"the same, {draft}: step, from the published generation"
        cells.append(Figure(name, published, step_speedup(share, generation), "assumed", 0.05, why=GIVEN))
    for name, engine in ENGINES.items():
        round_costs = model_of("qwen3-30b-a3b", "gb200", engine)
        for k, published in {3: 1.28, 5: 1.24}.items():
            value = predict_length(COHORT, 3, k) / cost(round_costs, COHORT_ROWS, k, COHORT_POSITIONS)
            why = (
                f"acceptance length {COHORT} at k = 3 (2.3 to 2.7 is published elsewhere), and {COHORT_POSITIONS} "
                f"positions of a row; published: {COHORT_ROWS} rows an engine, at most 1,024 tokens"
            )
            cells.append(Figure(f"the same, EAGLE-3 k = {k}: generation, {name}", published, value, "assumed", why=why))
        value = 1.657 / cost(model_of("qwen3-235b-a22b", "gb200", engine, tensor=8), 16, 1, 4000)
        why = "16 rows, tensor 8. NVIDIA's own measurement against its projection: a round of k = 1 cost 1.68"
        cells.append(
            Figure(f"NVIDIA note 2026-06-02, 235B, k = 1: generation, {name}", 0.986, value, "assumed", why=why)
        )
    notes = [
        "A step follows from its generation to within a few percent. Generation in a given engine does not follow "
        "from sheets: the 235B note is the best counter-example to the paper's projection, and to ours."
    ]
    return PageSection(
        "Steps that others measured", "NovaSky-AI/SkyRL#1832; NVIDIA, #62140680971 and #60041381152", notes, cells
    )


# What was published, its numbers, and why no model here gives them.
UNPREDICTABLE: Sequence[tuple[str, str, str]] = (
    ("n-gram drafts of the paper, Zero / Think", "0.71 / 0.51", "their draft length is not published"),
    ("Nemotron 3 Ultra, production RL", "1.46", "model and acceptance are not published"),
    (
        "SpecRoll 2608.04962",
        "1.26 to 2.15; step 1.21 to 2.04",
        "trees of drafts; acceptance by model is not in our sources",
    ),
    ("FastGRPO 2509.21792", "step 2.35 to 2.72", "its own claim, without rounds or acceptance"),
    ("EfficientRollout 2606.18967", "1.24; step 1.15", "a quantised copy drafts; its cost is not published"),
    ("verl-SpeCo 2026-09-30", "1.04; step 1.067", "compares two ways to train the draft, not drafts with none"),
    ("verl-SpeCo README, NPU", "1.2; step 1.11", "no sheet of an NPU"),
    ("marin#9114, 67B-A2B on GH200", "1.61 a stream; step 1.42", "shape of the model is not in our sources"),
    (
        "NVIDIA note, 30B-A3B, k = 1 up to 2,048 tokens at once",
        "1.366",
        "how often a step had fewer tokens is not published",
    ),
    (
        "NVIDIA, 30B-A3B, EAGLE-3 k = 5, 4k, 64 prompts",
        "0.91; step 0.97",
        "samples of a prompt and GPUs are not published",
    ),
    ("vLLM 0.31 with EAGLE-3 at its best k", "2.85 / 2.39 / 2.68", "acceptance is not published"),
    ("RedHatAI EAGLE-3 on a GB200-class GPU, 1 to 32 rows", "1.77 to 2.15", "acceptance is not published"),
    ("vLLM adaptive verification, DeepSeek-V4-Pro", "0.47 fixed, 1.41 adaptive", "shape of the model is not public"),
    ("vime#351, MiMo-7B", "1.50; 0.74 without refit", "rows and lengths are not published"),
    ("verl MTP guide, MiMo-7B on H20", "0.5", "SGLang's rounds there are not published"),
)
