"""The same weights, prompts and number of tokens through other samplers, where they are installed."""

import importlib
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from launch.bench.generation import Generation
from launch.bench.networks import Networks, random_prompts
from launch.bench.peers.protocol import Checkpoint, Peer, Sampler, Unsupported
from launch.bench.presets import Preset
from launch.bench.report import Row, Section, ratio
from launch.measure import in_turns, seconds
from models.hf_export import save_policy
from specjax.plan import RolloutConfig

PEERS = ("tunix", "huggingface", "vllm")
PLAIN, FORCED = "specjax, autoregressive", "specjax, k = {k}, forced"


class Present(NamedTuple):
    sampler: Sampler


class Absent(NamedTuple):
    reason: str


def peers(networks: Networks, preset: Preset) -> Section:
    """Tokens/s of whole completions, and how many times those of each peer ours are, measured in turns."""
    with tempfile.TemporaryDirectory() as directory:
        found = load_peers(networks, Path(directory) / "policy")
        rows = [row for batch in preset.peer_batches for row in _rows(networks, preset, found, batch)]
    notes = [
        f"prompts of {preset.prompt} tokens and {preset.new} new ones each, at temperature 1; nothing ends early, and "
        "the prefill counts",
        f"forced: a drafted token is kept with chance {preset.peer_rate}; peers that draft have that of random weights",
        "ours / it: tokens/s of our autoregressive decoding over the sampler's; ours forced: at our best draft length",
        "first run s: ours is compiling, that of the others the first call with whatever it compiles",
    ]
    return Section("against other samplers on the same weights", rows, notes)


def load_peers(networks: Networks, directory: Path) -> dict[str, Present | Absent]:
    """Every sampler by name, the policy's weights written to `directory` for them."""
    found: dict[str, Present | Absent] = {}
    try:
        save_policy(directory, networks.trained.policy, networks.decoder)
    except ImportError as error:
        return {name: Absent(str(error)) for peer in PEERS for name in _peer(peer).NAMES}
    for peer in map(_peer, PEERS):
        try:
            samplers = peer.load(Checkpoint(networks.decoder, directory))
            found |= {name: Present(sampler) for name, sampler in zip(peer.NAMES, samplers, strict=True)}
        except ImportError as error:
            found |= dict.fromkeys(peer.NAMES, Absent(f"not installed ({error.name or error})"))
        except Unsupported as error:
            found |= dict.fromkeys(peer.NAMES, Absent(str(error)))
    return found


def _peer(name: str) -> Peer:
    return cast(Peer, importlib.import_module(f"launch.bench.peers.{name}"))


def _rows(networks: Networks, preset: Preset, found: Mapping[str, Present | Absent], batch: int) -> list[Row]:
    prompts, count = random_prompts(networks, batch, preset.prompt), preset.new
    runs: dict[str, Callable[[], object]] = {}
    # Of the peers, the first call: with whatever it compiles.
    start: dict[str, float] = {}
    for k in (0, *preset.draft_lengths):
        config = RolloutConfig(group_size=1, max_new_tokens=count, draft_length=k)
        generation = Generation(networks, prompts, config, forced=k > 0)
        name = FORCED.format(k=k) if k else PLAIN
        runs[name] = partial(_handed_over, generation, preset.peer_rate)
        start[name] = generation.compile_seconds
    own, refused = list(runs), {}
    for name, peer in found.items():
        if isinstance(peer, Absent):
            refused[name] = peer.reason
        elif batch > peer.sampler.most_rows:
            refused[name] = f"takes {peer.sampler.most_rows} row"
        else:
            runs[name] = partial(peer.sampler.generate, np.asarray(prompts.tokens), count, False)
            start[name] = seconds(runs[name])
    measured = in_turns({name: partial(seconds, run) for name, run in runs.items()}, preset.repeats)
    best = min(own[1:], key=lambda name: np.median(measured[name]))

    def row(name: str) -> Row:
        values = measured.get(name)
        return {
            "batch": batch,
            "sampler": name,
            "tokens/s": None if values is None else batch * count / float(np.median(values)),
            "first run s": start.get(name),
            "ours / it": None if values is None else ratio(values, measured[PLAIN]),
            "ours forced / it": None if values is None else ratio(values, measured[best]),
            "note": refused.get(name, ""),
        }

    return [row(name) for name in (*own, *found)]


def _handed_over(generation: Generation, rate: float) -> np.ndarray:
    """The tokens on the host, where the peers leave theirs."""
    return np.asarray(generation.generate(rate).tokens)
