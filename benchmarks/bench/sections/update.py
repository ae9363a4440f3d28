"""Section on training: forward and backward of the policy and of the draft, against the device's peak."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench.model_flops import device_sheet, draft_flops, policy_flops
from benchmarks.bench.models import BenchNetworks, random_prompts
from benchmarks.bench.presets import Preset
from benchmarks.bench.report import NO_ROOM, BenchSection, Row, cell_by_cell, where_it_fits
from launch.timing import interval, time_call
from models.config import Remat
from models.decoder import make_policy
from specjax import kernels
from specjax.drafters import HeadDrafter
from specjax.keys import seed_step
from specjax.parallel.memory import device_memory
from specjax.sampling import SamplingLaw
from specjax.train.batch import TrainBatch
from specjax.train.draft.anchors import with_keys
from specjax.train.draft.loss import draft_gradient
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.types import Params, PolicyOutput, PyTree, Unembedding

# Microbatches of a batch. One holds at least one row, so a batch of long rows has fewer.
MICROBATCHES = 4
# Positions of each row whose logits exist at a time.
LOGIT_CHUNK = 512
# Tokens of each row at which a training step teaches the draft.
ANCHORS = DraftTrainingConfig.anchors


class Gradient(NamedTuple):
    """A gradient to measure.

    run:          function of args, traceable.
    args:         parameters, batch, and what else it takes.
    flops:        its model FLOPs (benchmarks.bench.model_flops).
    microbatches: parts of the batch that run one after the other.
    """

    run: Callable[..., PyTree]
    args: tuple[Any, ...]
    flops: int
    microbatches: int = 1


def update(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure gradients as a training step computes them: tokens/s, and model FLOPs per second as a share of the peak.

    Model FLOPs (benchmarks.bench.model_flops) leave out what is computed again: layers by remat, logits by chunks.
    The kinds of gradients come in the order of their value, so that a section that is killed leaves the first ones.
    """
    first, *other_remats = preset.remats
    kinds: dict[str, Callable[[int], Gradient]] = {
        f"policy, remat {first}": partial(policy_gradient, networks, preset, first),
        f"draft, {ANCHORS} anchors": partial(head_gradient, networks, preset, ANCHORS),
        "draft, all tokens": partial(head_gradient, networks, preset, 0),
    } | {f"policy, remat {remat}": partial(policy_gradient, networks, preset, remat) for remat in other_remats}
    device = networks.mesh.devices.flat[0]
    hardware = device_sheet(device.platform, device.device_kind)
    peak = None if hardware is None else hardware.peak(networks.policy.dtype.itemsize)

    def measured(kind: str, context: int) -> Iterator[list[Row]]:
        measure = partial(_measure, networks, preset, partial(kinds[kind], context), peak)
        return where_it_fits({"gradient": kind, "context": context}, measure)

    notes = [
        "MFU: model FLOPs per second over the peak of specjax.cost.hardware, "
        + (f"{peak / 1e12:.3g} TFLOP/s" if peak else "which has no sheet of this device"),
        "model FLOPs of the policy: 6 x matrix parameters x tokens + 12 x layers x width of the query heads x causal "
        "pairs; the vocabulary head counts, embedding lookups and recomputation do not",
        "model FLOPs of the draft: the same over its passes; 4 for the projection of the features, which have no "
        "gradient, and 2 for the policy's vocabulary head",
        f"a batch has {preset.trained} tokens in {MICROBATCHES} microbatches, or one row; the draft gets a microbatch",
        NO_ROOM,
    ]
    for rows in cell_by_cell(itertools.starmap(measured, itertools.product(kinds, preset.contexts))):
        yield BenchSection("forward and backward of training", rows, notes)


def policy_gradient(networks: BenchNetworks, preset: Preset, remat: Remat, context: int) -> Gradient:
    """Return the gradient of the policy's loss, accumulated over the microbatches of a batch."""
    rows = _microbatch_rows(preset, context)
    microbatches = max(1, preset.trained // (rows * context))
    policy, params = make_policy(networks.decoder, remat), replace(networks.trained, draft={})
    batch = _batch(networks, rows * microbatches, context, 1)
    losses = LossContext(
        *(policy, networks.drafter, SamplingLaw()),
        microbatches=microbatches,
        budget=context - 1,
        logit_chunk=min(LOGIT_CHUNK, context),
    )

    def run(params: Params, batch: TrainBatch) -> PyTree:
        return accumulate(losses, params, batch)[0].policy

    flops = policy_flops(networks.decoder, params, rows * microbatches, context)
    return Gradient(run, (params, batch), flops, microbatches)


def head_gradient(networks: BenchNetworks, preset: Preset, anchors: int, context: int) -> Gradient:
    """Return the gradient of the draft's loss over one microbatch. Random values stand in for the policy's output."""
    assert isinstance(networks.drafter, HeadDrafter)
    rows, decoder, chunk = _microbatch_rows(preset, context), networks.decoder, min(LOGIT_CHUNK, context)
    losses = LossContext(
        networks.policy, networks.drafter, SamplingLaw(), logit_chunk=chunk, anchors=anchors, budget=context - 2
    )
    keys, dtype = jax.random.split(jax.random.key(0)), networks.policy.dtype
    width = len(decoder.feature_layers) * decoder.hidden_size
    output = PolicyOutput(
        logits=jnp.zeros((rows, 0, decoder.vocab_size), dtype),
        features=jax.random.normal(keys[0], (rows, context, width), dtype),
        hidden=jax.random.normal(keys[1], (rows, context, decoder.hidden_size), dtype),
        cache=None,
        unembedding=Unembedding(networks.policy.unembed, decoder.vocab_size, chunk),
    )

    def run(params: Params, batch: TrainBatch, output: PolicyOutput) -> PyTree:
        tokens = jnp.float32(batch.tokens.size)
        return draft_gradient(losses, params, tokens, batch, output, losses.anchors_of(batch))[0]

    flops = draft_flops(decoder, networks.trained, rows, context, networks.drafter.unroll, anchors)
    return Gradient(run, (networks.trained, _batch(networks, rows, context, 2), output), flops)


def _measure(
    networks: BenchNetworks, preset: Preset, make: Callable[[], Gradient], peak: float | None
) -> Iterator[list[Row]]:
    """Compile a gradient, and yield its row after each run; an empty one if the device's memory is too small."""
    with kernels.quick_draws(networks.mesh):
        gradient = make()
    options, started = kernels.compiler_options(networks.policy.dtype), time.perf_counter()
    with jax.set_mesh(networks.mesh):
        program = jax.jit(gradient.run, compiler_options=options).lower(*gradient.args).compile()
    compile_s, memory = time.perf_counter() - started, program.memory_analysis()
    assert memory is not None
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    # Tried, it would end the process where memory is promised before it is there, as on a CPU.
    if needed > device_memory(networks.mesh):
        yield [{}]
        return
    run, times, tokens = partial(program, *gradient.args), list[float](), gradient.args[1].tokens
    time_call(run)
    for _ in range(preset.repeats):
        times.append(time_call(run))
        seconds = float(np.median(times))
        row: Row = {
            "rows": len(tokens),
            "microbatches": gradient.microbatches,
            "ms": 1e3 * seconds,
            "tokens/s": tokens.size / seconds,
            "model TFLOP/s": interval([gradient.flops / each / 1e12 for each in times]),
            "MFU": None if peak is None else gradient.flops / seconds / peak,
            "temporary GB": memory.temp_size_in_bytes / 1e9,
            "compile s": compile_s,
            "turns, s": times,
        }
        yield [row]


def _microbatch_rows(preset: Preset, context: int) -> int:
    return max(1, preset.trained // MICROBATCHES // context)


def _batch(networks: BenchNetworks, rows: int, context: int, prompt: int) -> TrainBatch:
    """Return rows of random tokens. All but the first `prompt` are completion tokens."""
    tokens = random_prompts(networks, rows, context).tokens
    completion = jnp.broadcast_to(jnp.arange(context)[None] >= prompt, tokens.shape)
    advantage = jax.random.normal(jax.random.key(1), tokens.shape)
    batch = TrainBatch(tokens, completion, reward=advantage[:, 0], counted=jnp.ones(rows, bool), advantage=advantage)
    return with_keys(batch, seed_step(0, 0), 0)
