"""The section on how a rollout is laid out: phases, windows, queue, shared prefill and the training ladder."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.generation import Generation
from launch.bench.networks import Networks, compiled, random_prompts
from launch.bench.presets import Preset
from launch.bench.report import Row, Section, ratio
from launch.measure import in_turns, seconds
from launch.speedup import ANY_LENGTH, shrinking
from specjax.batch import Batch, make_batch
from specjax.gradients import accumulate
from specjax.ladder import sort_rows
from specjax.loss import LossConfig
from specjax.mesh import MeshConfig, make_mesh
from specjax.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.types import Params

GROUP, DRAFTED, MICROBATCHES = 8, 3, 4
Runs = tuple[Callable[[], object], Callable[[], object]]


def layout(networks: Networks, preset: Preset) -> Section:
    """Pairs that do the same work and differ in one thing, measured in turns."""
    pairs = _rollouts(networks, preset) | {"prefill shared by a group": _shared_prefill(networks, preset)}
    if preset.gradients:
        pairs["ladder in training"] = _ladder(networks, preset)
    rows: list[Row] = []
    for name, (without, with_it) in pairs.items():
        runs = {"off": partial(seconds, without), "on": partial(seconds, with_it)}
        measured = in_turns(runs, preset.repeats)
        off, on = (float(np.median(measured[which])) for which in runs)
        rows.append({"what": name, "off s": off, "on s": on, "speed-up": ratio(measured["off"], measured["on"])})
    tail = preset.tail
    notes = [
        f"{GROUP * preset.batch} completions, one in {tail.every} of {tail.longest} tokens, the others around "
        f"{tail.median}, at draft length {DRAFTED} and acceptance forced at {preset.peer_rate}",
        f"queue: {preset.batch} slots, each refilled as it frees up; off, {preset.batch} at a time, to their end",
        "windows: attention first reads only as much as most rows ever need; off, as much as the longest may need",
    ]
    return Section("phases, queue, shared prefill and ladder, each off and on", rows, notes)


def _rollouts(networks: Networks, preset: Preset) -> dict[str, Runs]:
    tail, rate, slots = preset.tail, preset.peer_rate, preset.batch
    sequences = GROUP * slots
    prompts = random_prompts(networks, sequences, preset.prompt)
    config = RolloutConfig(group_size=1, max_new_tokens=tail.longest, draft_length=DRAFTED)
    shrink, usual = shrinking(sequences), (sequences, preset.prompt + 3 * tail.median // 2)

    def decode(*phases: tuple[int, int]) -> Callable[[], object]:
        return partial(Generation(networks, prompts, replace(config, phases=phases), tail=tail).generate, rate)

    parts = [jax.tree.map(lambda x, at=at: x[at : at + slots], prompts) for at in range(0, sequences, slots)]
    few = Generation(networks, parts[0], config, tail=tail)
    shrunk = decode(*shrink)
    return {
        "phases": (decode(), shrunk),
        "windows": (shrunk, decode(usual, *shrink)),
        "queue": (lambda: [few.generate(rate, part) for part in parts], decode((slots, ANY_LENGTH))),
    }


def _shared_prefill(networks: Networks, preset: Preset) -> Runs:
    """Short completions of long prompts: each of a group's prefilled by itself, or once for all of them."""

    def decode(rows: int, group: int) -> Callable[[], object]:
        config = RolloutConfig(group_size=group, max_new_tokens=preset.tail.median, draft_length=DRAFTED)
        prompts = random_prompts(networks, rows, preset.contexts[0])
        return partial(Generation(networks, prompts, config).generate, preset.peer_rate)

    return decode(GROUP * preset.batch, 1), decode(preset.batch, GROUP)


def _ladder(networks: Networks, preset: Preset) -> Runs:
    """The gradient of both losses over the completions, padded to the longest, or sorted and cut to windows."""
    tail, mesh, law, loss = preset.tail, make_mesh(MeshConfig()), SamplingLaw(), LossConfig()
    prompts = random_prompts(networks, GROUP * preset.batch, preset.prompt)
    config = RolloutConfig(group_size=1, max_new_tokens=tail.longest, draft_length=0)
    rollout = Generation(networks, prompts, config, tail=tail).generate()
    # The token that ends a forced completion is none of the policy's.
    rollout = replace(rollout, tokens=jnp.maximum(rollout.tokens, 0))
    ones = jnp.ones(len(rollout.lengths))
    batch, params = replace(make_batch(prompts, rollout, ones), advantage=ones), networks.trained

    def run(ladder: tuple[int, ...]) -> Callable[[], object]:
        def gradients(params: Params, batch: Batch) -> Params:
            rows = sort_rows(batch, mesh, MICROBATCHES) if ladder else batch
            parts = networks.policy, networks.drafter, params, rows
            return accumulate(*parts, law, loss, microbatches=MICROBATCHES, ladder=ladder)[0]

        with jax.set_mesh(mesh):
            program, _ = compiled(gradients, params, batch)
        jax.block_until_ready(program(params, batch))
        return partial(program, params, batch)

    return run(()), run((preset.prompt + tail.median, preset.prompt + 3 * tail.median // 2))
