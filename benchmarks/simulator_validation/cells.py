"""Measured numbers that `benchmarks.simulate` is held against: published ones, and our own rounds on a GPU.

Each cell is a command line of `benchmarks.simulate`, and what to read from its answer.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

RESULTS = Path(__file__).parents[1] / "results"
OWN_FILE = RESULTS / "rounds_h100.txt"
PAPER = "arXiv 2604.26779, Qwen3-8B on GB200, NeMo RL 0.6 with vLLM 0.17"
OWN = "benchmarks/results/rounds_h100.txt, Qwen3-8B on an H100, specjax"


class Cell(NamedTuple):
    """A measured number.

    Attributes:
        source:  Where it was published.
        name:    What was measured.
        value:   The number.
        read:    Which figure of the answer it is: a speed-up, or of rounds of one length the cost in rounds without
                 drafts (cost) or the milliseconds without drafts (ms).
        options: Options of benchmarks.simulate. What was not published is assumed.
        fitted:  Engines with constants from this number.
    """

    source: str
    name: str
    value: float
    read: Literal["generation_speedup", "step_speedup", "cost", "ms"]
    options: str
    fitted: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Return the words by which a coverage names the cell's source."""
        return {PAPER: "numbers of vLLM 0.17 in arXiv 2604.26779", OWN: "of our own rounds on an H100"}.get(
            self.source, "of other engines"
        )


def cells() -> list[Cell]:
    """Return all cells, grouped by source."""
    return [*_paper(), *_rounds(), *_steps(), *_own()]


def rows_of(rows: int) -> str:
    """Return a number of rows in words."""
    return "1 row" if rows == 1 else f"{rows} rows"


# (run, draft length, draft) -> (acceptance length, speed-up of generation)
GENERATION = {
    ("Zero", 3, "DAPO"): (3.32, 1.77),
    ("Zero", 5, "DAPO"): (4.35, 1.44),
    ("Zero", 7, "DAPO"): (5.06, 1.21),
    ("Zero", 3, "UltraChat"): (2.88, 1.51),
    ("Zero", 3, "UltraChat, online"): (3.04, 1.63),
    ("Zero", 3, "DAPO, online"): (3.29, 1.78),
    ("Think", 3, "DAPO"): (2.77, 1.53),
    ("Think", 5, "DAPO"): (3.23, 0.84),
    ("Think", 7, "DAPO"): (3.48, 0.71),
    ("Think", 3, "UltraChat"): (2.40, 1.19),
    ("Think", 3, "UltraChat, online"): (2.55, 1.26),
    ("Think", 3, "DAPO, online"): (2.74, 1.52),
}
# The draft pass and the attention of the engine `vllm-0.17` come from these.
FITTED = ("Zero", 3, "DAPO"), ("Zero", 5, "DAPO")
# Rows, limit and spreads are assumed. The means are those at which generation without drafts takes the published
# seconds: 100 and 133.6.
_MACHINE = "--model qwen3-8b --hardware gb200 --limit-tokens 32768"
WORKLOADS = {
    "Zero": f"{_MACHINE} --gpus 32 --sequences 512 --length-spread 0.9 --mean-tokens 2290",
    "Think": f"{_MACHINE} --gpus 32 --sequences 512 --length-spread 0.6 --mean-tokens 5830",
}
# Seconds of the stages of the runs without drafts.
_STAGES = {
    "Zero": "--train-s 31.3 --logprob-s 17.8 --other-s 2.1",
    "Think": "--train-s 31.4 --logprob-s 17.9 --other-s 2.4",
}
# The asynchronous run: 64.6 s of other stages on 16 GPUs follow from its step and its exposed generation.
_ASYNCHRONOUS = (
    f"{_MACHINE} --gpus 64 --generation-gpus 48 --lag 1 --sequences 768 --length-spread 0.6 --mean-tokens 2430 "
    "--train-s 15.6 --logprob-s 0 --other-s 2"
)


def _paper() -> Iterator[Cell]:
    for (run, k, draft), (length, speedup) in GENERATION.items():
        options = f"{WORKLOADS[run]} {_drafts(length, k)}"
        fitted = ("vllm-0.17",) if (run, k, draft) in FITTED else ()
        yield Cell(PAPER, f"{run}, k = {k}, {draft}", speedup, "generation_speedup", options, fitted)
    for run, speedup in {"Zero": 151.2 / 107.5, "Think": 185.3 / 137.4}.items():
        options = f"{WORKLOADS[run]} {_STAGES[run]} {_drafts(GENERATION[run, 3, 'DAPO'][0], 3)}"
        # With the published stages, the step of Zero follows from a generation that was fitted.
        fitted = ("vllm-0.17",) if run == "Zero" else ()
        yield Cell(PAPER, f"{run}, k = 3, DAPO: step", round(speedup, 3), "step_speedup", options, fitted)
    options = f"{_ASYNCHRONOUS} {_drafts(2.77, 3)}"
    yield Cell(PAPER, "Think, k = 3, lag 1: step", 1.24, "step_speedup", options)


def _drafts(length: float, k: int) -> str:
    return f"--acceptance-length {length} --measured-at {k} --draft-length {k}"


def _round(model: str, hardware: str, rows: int, k: int, positions: int = 1024, gpus: int = 1) -> str:
    """Return the options of a replica of `gpus` GPUs, whose rows hold `positions` positions and accept nothing.

    A completion of two tokens then takes two rounds, and the speed-up is the inverse of the cost of a round.
    """
    lengths = "--mean-tokens 2 --limit-tokens 2 --length-spread 0 --ranges mean_tokens=2,2"
    return (
        f"--model {model} --hardware {hardware} --gpus {gpus} --tensor {gpus} --expert {gpus} --lora-rank 1 "
        f"--sequences {rows} --phases {rows} --prompt-tokens {positions - 1} {lengths} {_drafts(1, k)}"
    )


# Costs of rounds in rounds without drafts.
_LLAMA = {2: 1.44, 3: 1.61, 4: 1.76, 5: 1.94, 6: 2.06, 7: 2.15}
_ANGELSLIM = {
    "qwen3-1.7b": (2.62, 1.29),
    "qwen3-4b": (4.29, 1.25),
    "qwen3-8b": (6.59, 1.17),
    "qwen3-14b": (10.72, 1.15),
    "qwen3-32b": (23.08, 1.12),
    "qwen3-30b-a3b": (3.12, 1.49),
}
# The acceptance length, 2.79, is assumed: the source has only speed-ups.
_BY_ROWS = {2: 1.54, 4: 1.53, 8: 1.72, 16: 1.89, 24: 2.01, 32: 2.11, 48: 2.02, 56: 2.08, 64: 2.02}


def _rounds() -> Iterator[Cell]:
    source, options = "vLLM#20780, Llama-3.1-8B on an H100, one row", ("llama-3.1-8b", "h100", 1)
    yield Cell(source, "ms without drafts", 7.07, "ms", _round(*options, 1))
    for k, cost in _LLAMA.items():
        yield Cell(source, f"cost at k = {k}", cost, "cost", _round(*options, k))
    source = "AngelSlim, Qwen3 on an H20, one row, k = 2 (to be checked)"
    for model, (ms, cost) in _ANGELSLIM.items():
        yield Cell(source, f"{model}, ms without drafts", ms, "ms", _round(model, "h20", 1, 2))
        yield Cell(source, f"{model}, cost", cost, "cost", _round(model, "h20", 1, 2))
    for rows, cost in _BY_ROWS.items():
        options = _round("llama-3.1-8b", "h100", rows, 3)
        yield Cell("EAGLE-3, table 3, SGLang, Llama-3.1-8B on an H100, k = 3", rows_of(rows), cost, "cost", options)
    for rows, speed in {1: 125, 8: 898, 32: 2726}.items():
        options = _round("qwen3-8b", "h100", rows, 1)
        yield Cell(
            "jiangLLM, vLLM 0.31, Qwen3-8B on an H100", f"{rows_of(rows)}, ms", 1e3 * rows / speed, "ms", options
        )
    for rows, cost in {1: 2.59, 4: 2.35}.items():
        options = _round("qwen3-30b-a3b", "h100", rows, 3, gpus=2)
        yield Cell("SpecForge#339, Qwen3-30B-A3B on two H100, k = 3", rows_of(rows), cost, "cost", options)


def _steps() -> Iterator[Cell]:
    source = "SkyRL#1832, Qwen3.5-9B with its MTP head on 8 H100, as Qwen3-8B with an EAGLE-3 head, k = 3"
    # 310.1 s of generation, 90.6 s of other stages. Sequences and lengths are assumed.
    options = f"--hardware h100 --gpus 8 --train-s 88.6 --logprob-s 0 {_drafts(3.32, 3)}"
    yield Cell(source, "generation", 2.03, "generation_speedup", options)
    yield Cell(source, "step", 1.62, "step_speedup", f"{options} --mean-tokens 6000 --limit-tokens 16384")
    source = "NVIDIA cohort 2026-08-23, Qwen3-30B-A3B on GB200, EAGLE-3"
    # 8 rows an engine and at most 1,024 tokens are published; 2.5 tokens a verification at k = 3 are assumed.
    for k, speedup in {3: 1.28, 5: 1.24}.items():
        options = f"--model qwen3-30b-a3b --hardware gb200 --gpus 1 --lora-rank 1 --sequences 8 --draft-length {k}"
        options += " --acceptance-length 2.5 --measured-at 3 --mean-tokens 800 --limit-tokens 1024 --length-spread 0.3"
        yield Cell(source, f"k = {k}: generation", speedup, "generation_speedup", options)
    source = "NVIDIA note 2026-06-02, Qwen3-235B-A22B on GB200, k = 1"
    options = "--model qwen3-235b-a22b --hardware gb200 --gpus 8 --tensor 8 --expert 8 --lora-rank 1 --sequences 16"
    options += f" --mean-tokens 6000 --limit-tokens 8192 --length-spread 0.3 {_drafts(1.657, 1)}"
    yield Cell(source, "generation", 0.986, "generation_speedup", options)


_PLAIN = re.compile(r"measured: context (\d+), batch (\d+), ms a round ([\d.]+)")
_DRAFTED = re.compile(r"^ +(\d+) +(\d+) +(\d+) +[\d.]+ +\S+ \[.*?\] +\S+ \[.*?\] +(\S+) \[", re.MULTILINE)


def _own() -> Iterator[Cell]:
    text = OWN_FILE.read_text(encoding="utf-8")
    for positions, rows, ms in _PLAIN.findall(text):
        options = _round("qwen3-8b", "h100", int(rows), 1, int(positions))
        # The share of computing that reading hides (specjax.cost.Efficiency.overlap) comes from their ratios.
        fitted = ("specjax", "vllm-0.17") if positions == "1024" else ()
        yield Cell(OWN, f"{rows_of(int(rows))} of {int(positions):,} positions: ms", float(ms), "ms", options, fitted)
    for positions, rows, k, cost in _DRAFTED.findall(text):
        options = _round("qwen3-8b", "h100", int(rows), int(k), int(positions))
        name = f"{rows_of(int(rows))} of {int(positions):,} positions, k = {k}: cost"
        yield Cell(OWN, name, float(cost), "cost", options)
