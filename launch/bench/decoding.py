"""The sections that time single rounds: against the bandwidth floor, verification, the drafter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.doubles import FreeDrafter
from launch.bench.networks import Networks
from launch.bench.presets import Preset
from launch.bench.report import Section, ratio
from launch.bench.rounds import Rounds
from launch.measure import in_turns, seconds
from models.config import DecoderConfig
from specjax.drafters import NoDrafter
from specjax.types import PyTree

COPIES = 8


def floor(networks: Networks, preset: Preset) -> Section:
    """Autoregressive decoding: tokens/s, and the share of them that the memory's bandwidth would allow."""
    copy, rows = CopyBandwidth(), []
    weights = read_bytes(networks.params.policy)
    for context in preset.contexts:
        for batch in preset.batches:
            rounds = Rounds(networks, NoDrafter(), batch, context, 0, preset.rounds)
            # In turns, so that a machine that slows down slows down both.
            measured = in_turns({"round": rounds.measure, "copy": copy.measure}, preset.repeats)
            cache = cache_bytes(networks.decoder, batch, context + preset.rounds // 2)
            least = [(weights + cache) / bandwidth for bandwidth in measured["copy"]]
            rows.append({
                "context": context,
                "batch": batch,
                "ms a round": 1e3 * float(np.median(measured["round"])),
                "tokens/s": batch / float(np.median(measured["round"])),
                "floor ms": 1e3 * float(np.median(least)),
                "share of floor": ratio(least, measured["round"]),
                "GB/s": float(np.median(measured["copy"])) / 1e9,
                "compile s": rounds.compile_seconds,
            })  # fmt: skip
    notes = [
        f"floor: bytes of the weights that a round reads ({weights / 1e6:.1f} MB) and of the visible cache, over the "
        "bandwidth of a copy",
        f"a copy of {copy.nbytes / 1e6:.0f} MB counts its bytes twice, read and written; a CPU that reads a line before"
        " it writes it moves them three times, so that reading alone may beat the floor",
    ]
    return Section("autoregressive decoding against the memory-bandwidth floor", rows, notes)


def verify(networks: Networks, preset: Preset) -> Section:
    """A verification of n tokens over one of 1: the policy's forward, the verifier and the commit, no drafter."""
    context, rows = preset.contexts[0], []
    for batch in preset.batches:
        make = partial(Rounds, networks, FreeDrafter(networks.policy.vocab_size), batch, context)
        programs = {f"T({n})": make(k=n - 1, count=preset.rounds) for n in preset.verified}
        measured = in_turns({name: rounds.measure for name, rounds in programs.items()}, preset.repeats)
        first = f"T({preset.verified[0]})"
        row: dict = {"batch": batch, f"{first} ms": 1e3 * float(np.median(measured[first]))}
        row |= {f"{name}/{first}": ratio(values, measured[first]) for name, values in list(measured.items())[1:]}
        rows.append(row | {"compile s": sum(rounds.compile_seconds for rounds in programs.values())})
    return Section(f"verification of n tokens over one, context {context}", rows)


def draft(networks: Networks, preset: Preset) -> Section:
    """What a round with the draft head costs, in plain rounds, and how much of it is the head's."""
    context, rows = preset.contexts[0], []
    free = FreeDrafter(networks.policy.vocab_size)
    for batch in preset.batches:
        plain = Rounds(networks, NoDrafter(), batch, context, 0, preset.rounds)
        for k in preset.draft_lengths:
            whole = Rounds(networks, networks.drafter, batch, context, k, preset.rounds)
            verifying = Rounds(networks, free, batch, context, k, preset.rounds)
            runs = {"plain": plain.measure, "whole": whole.measure, "verifying": verifying.measure}
            measured = in_turns(runs, preset.repeats)
            drafting = np.subtract(measured["whole"], measured["verifying"])
            rows.append({
                "batch": batch,
                "k": k,
                "plain ms": 1e3 * float(np.median(measured["plain"])),
                "propose + observe": ratio(drafting.tolist(), measured["plain"]),
                "verify + commit": ratio(measured["verifying"], measured["plain"]),
                "whole round": ratio(measured["whole"], measured["plain"]),
                "compile s": whole.compile_seconds,
            })  # fmt: skip
    note = "in plain rounds of the same batch; the drafter's is the whole round's less one with proposals for free"
    return Section(f"what drafting costs, context {context}", rows, [note])


class CopyBandwidth:
    """Bytes read and written a second by passes over an array far larger than any cache, in place."""

    def __init__(self) -> None:
        self.nbytes = 2**28 if jax.default_backend() == "cpu" else 2**32
        self._array = jnp.ones(self.nbytes // 4, jnp.float32)

        # The number of passes is data, so that they cannot be made one.
        def passes(x: jax.Array, count: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, count, lambda _, x: 0.5 * x + 0.5, x)

        self._program = jax.jit(passes, donate_argnums=0)
        self.measure()

    def measure(self) -> float:
        return 2 * self.nbytes * COPIES / seconds(self._run)

    def _run(self) -> jax.Array:
        self._array = self._program(self._array, jnp.int32(COPIES))
        return self._array


def read_bytes(params: PyTree) -> int:
    """The policy's parameters that a round reads: of an embedding that is no output layer, only a few rows."""
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    return total - params["embed"]["embedding"].nbytes if "head" in params else total


def cache_bytes(decoder: DecoderConfig, rows: int, positions: int) -> int:
    """Keys and values of so many positions in each of so many rows."""
    entry = 2 * decoder.num_kv_heads * decoder.head_dim * jnp.dtype(decoder.dtype).itemsize
    return decoder.num_layers * rows * positions * entry
