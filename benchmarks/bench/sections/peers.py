"""Sections that compare with other samplers, on completions of one length and on a long-tailed rollout."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from benchmarks.bench.models import BenchNetworks, random_prompts
from benchmarks.bench.peers import load_peers
from benchmarks.bench.peers.protocol import PeerSampler, failure
from benchmarks.bench.presets import Preset
from benchmarks.bench.report import NO_ROOM, BenchSection, Row, cell_by_cell, ratio, where_it_fits
from benchmarks.bench.rollout_timer import RolloutTimer
from benchmarks.bench.sections.layout import GROUP, halving
from benchmarks.bench.timers import rollout_timer
from launch.timing import interleaved, time_call, turn_by_turn
from specjax.parallel import processes
from specjax.rollout.plan import RolloutConfig

# Turns for choosing our best draft length; they are not reported.
SCREENED = 3
PACKAGES = ("google-tunix", "torch", "transformers", "vllm")
PLAIN, FORCED = "specjax, autoregressive", "specjax, k = {k}, forced"
NOTES = (
    "ours / it: our autoregressive tokens/s over the sampler's; ours forced / it: the same at our best draft length",
    "first run s: for ours the compile time, for peers the first call including compiling",
)
# By row name: a function that runs one turn of a peer, or the reason why it cannot run.
PeerRuns = Mapping[str, Callable[[], object] | str]


def peers(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure tokens/s of completions of one length, ours and each peer's, and their ratio."""

    def rows(samplers: Mapping[str, PeerSampler | str], batch: int) -> Iterator[list[Row]]:
        prompts, lengths = random_prompts(networks, batch, preset.prompt), np.full(batch, preset.new, np.int32)
        config = RolloutConfig(group_size=1, max_new_tokens=preset.new)

        def run(sampler: PeerSampler) -> dict[str, Callable[[], object]]:
            return {"": partial(sampler.generate, processes.fetch(prompts.tokens), lengths, False)}

        our_timers = {
            name: rollout_timer(networks, prompts, replace(config, draft_length=k), forced=k > 0)
            for name, k in _our_draft_lengths(preset).items()
        }
        return _compare(lengths, our_timers, _peer_runs(samplers, batch, run), preset)

    samplers = _loaded_peers(networks)
    notes = [
        f"{preset.prompt} prompt tokens and {preset.new} new tokens per row, temperature 1; no row ends early; "
        "times include the prefill",
        f"forced: a drafted token is accepted with probability {preset.peer_rate}; peers that draft have "
        "the acceptance of random weights",
        *NOTES,
        NO_ROOM,
        _versions(),
    ]
    cells = (where_it_fits({"batch": batch}, partial(rows, samplers, batch)) for batch in preset.peer_batches)
    for table in cell_by_cell(cells):
        yield BenchSection("completions of one length, against other samplers on the same weights", table, notes)


def rollouts(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure tokens/s of a long-tailed rollout. Peers take all sequences at once, and a quarter at a time."""
    tail, sequences = preset.tail, GROUP * preset.batch
    prompts = random_prompts(networks, sequences, preset.prompt)
    # First a window that most rows never outgrow, then half the slots each time half of the rows have ended.
    halves = halving(sequences)
    phases = ((sequences, preset.prompt + 3 * tail.median // 2), *halves)
    config = RolloutConfig(group_size=1, max_new_tokens=tail.longest, phases=phases)

    def rows() -> Iterator[list[Row]]:
        our_timers = {
            name: rollout_timer(networks, prompts, replace(config, draft_length=k), tail=tail)
            for name, k in _our_draft_lengths(preset).items()
        }
        lengths, tokens = processes.fetch((our_timers[PLAIN].generate(0, np.float32(0)).lengths, prompts.tokens))

        def run(sampler: PeerSampler) -> dict[str, Callable[[], object]]:
            sizes = (sequences, sequences // 4)
            return {f", {size} at a time": partial(_in_parts, sampler, tokens, lengths, size) for size in sizes}

        return _compare(lengths, our_timers, _peer_runs(_loaded_peers(networks), sequences, run), preset)

    notes = [
        f"{sequences} completions, one in {tail.every} of {tail.longest} tokens, the others around {tail.median}; "
        f"prompts of {preset.prompt}",
        "a peer that cannot end rows separately runs all to the longest; tokens beyond a row's length do not count",
        f"forced: a drafted token is accepted with probability {preset.peer_rate}; ours decodes in phases of "
        f"{', '.join(str(slots) for slots, _ in halves)} slots, at first with a window of {phases[0][1]} positions",
        *NOTES,
        NO_ROOM,
        _versions(),
    ]
    for table in where_it_fits({"batch": sequences}, rows):
        yield BenchSection("long-tailed rollout, against other samplers on the same weights", table, notes)


@lru_cache(maxsize=1)
def _loaded_peers(networks: BenchNetworks) -> Mapping[str, PeerSampler | str]:
    """Load the peers once for both sections, because engines take time and memory."""
    with tempfile.TemporaryDirectory() as directory:
        return load_peers(networks, Path(directory) / "policy")


def _versions() -> str:
    """Return a note with the versions of the installed peers."""
    installed = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed.append(f"{package} {version(package)}")
    return f"versions: {', '.join(installed) or 'none of ' + ', '.join(PACKAGES)}"


def _our_draft_lengths(preset: Preset) -> dict[str, int]:
    """Return our draft lengths, 0 included, by row name."""
    return {PLAIN: 0} | {FORCED.format(k=k): k for k in preset.draft_lengths}


def _peer_runs(
    samplers: Mapping[str, PeerSampler | str], rows: int, run: Callable[[PeerSampler], dict[str, Callable[[], object]]]
) -> PeerRuns:
    """Return the runs of every peer by row name. run: makes a sampler's runs by suffix of its row name."""
    runs: dict[str, Callable[[], object] | str] = {}
    for name, peer in samplers.items():
        if isinstance(peer, str):
            runs[name] = peer
        elif rows > peer.most_rows:
            runs[name] = f"takes {peer.most_rows} row"
        else:
            runs |= {name + suffix: run_turn for suffix, run_turn in run(peer).items()}
    return runs


def _compare(
    lengths: np.ndarray, our_timers: Mapping[str, RolloutTimer], peer_runs: PeerRuns, preset: Preset
) -> Iterator[list[Row]]:
    """Yield after each turn a row for each of our timers and each peer."""
    runs: dict[str, Callable[[], object]] = {
        name: partial(_tokens_on_host, timer, preset.peer_rate) for name, timer in our_timers.items()
    }
    first_run_s = {name: timer.compile_seconds for name, timer in our_timers.items()}
    reasons = {name: run for name, run in peer_runs.items() if isinstance(run, str)}
    for name, run in peer_runs.items():
        if not isinstance(run, str):
            try:
                # Includes whatever the first call compiles.
                first_run_s[name] = time_call(run)
            except Exception as error:
                reasons[name] = failure(error)
            else:
                runs[name] = run
    timed = {name: partial(time_call, run) for name, run in runs.items()}
    screened = interleaved({name: timed[name] for name in our_timers if name != PLAIN}, SCREENED)
    best = min(screened, key=lambda name: np.median(screened[name]))

    def row(name: str, measured: Mapping[str, list[float]]) -> Row:
        values = measured.get(name)
        return {
            "batch": len(lengths),
            "sampler": name,
            "tokens/s": None if values is None else int(lengths.sum()) / float(np.median(values)),
            "first run s": first_run_s.get(name),
            "ours / it": None if values is None else ratio(values, measured[PLAIN]),
            "ours forced / it": None if values is None else ratio(values, measured[best]),
            "note": reasons.get(name, ""),
            "turns, s": values or [],
        }

    for measured in turn_by_turn(timed, preset.repeats):
        yield [row(name, measured) for name in (*our_timers, *peer_runs)]


def _in_parts(sampler: PeerSampler, prompts: np.ndarray, lengths: np.ndarray, rows: int) -> None:
    """Generate for all prompts, `rows` at a time."""
    for start in range(0, len(prompts), rows):
        sampler.generate(prompts[start : start + rows], lengths[start : start + rows], False)


def _tokens_on_host(timer: RolloutTimer, rate: float) -> np.ndarray:
    """Generate and copy the tokens to the host, as the peers do."""
    return processes.fetch(timer.generate(0, np.float32(rate)).tokens)
