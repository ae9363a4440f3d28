"""Time whole steps on one device, in turns: without drafts, with EAGLE-3 and with a block draft.

Run from the repository's root: python -m benchmarks.gpu.steps [--preset qwen3-8b --rank 32]

A step is one rollout and one update, the two programs of a run whose scorer is on the host. Each kind of draft has two;
steps without drafts run EAGLE-3's programs at draft length 0. So there are four, which compile side by side
while the weights are made. All steps train one policy. Steps with drafts train the draft too.

Weights are random, and acceptance is forced: by default to the acceptance lengths published for Qwen3-8B with drafts
that are trained along (arXiv 2609.07108). Lengths of completions are forced, and the same in every step.

`--absent` compiles the programs for an H200 that is not there. That needs jax's CUDA plugin.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.bench.models import random_prompts
from benchmarks.bench.presets import PRESETS, LongTail, Preset
from benchmarks.bench.report import BenchSection, Results, Row, ratio
from benchmarks.bench.sections.decoding import BLOCK, EAGLE3
from benchmarks.gpu.step_programs import (
    GENERATE,
    UPDATE,
    Compiled,
    StepPrograms,
    policy_params,
    step_networks,
    submit_all,
)
from launch.cli.program import use_compile_cache
from launch.errors import first_line
from launch.plan.devices import absent_gpus, mesh_over
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.generate import place
from specjax.types import Prompts, TrainState

NOTES = (
    "acceptance length: tokens of a verification, forced, over rows that have not ended",
    "generation: prefill, all rounds and the copy of adapters and draft; train: forward, backward and update",
    "generation x, step x: over the steps without drafts of the same turns; with the draft trained in every step",
    "held x: step x where the update does not train the draft, as in most steps of a run once acceptance holds",
    "rows are padded to the longest and keep their slots: a run's ladder and phases shorten training and rounds",
    "medians over the turns but the first, in which programs start",
)


class Arm(NamedTuple):
    """A kind of step. rate: probability that a drafted token is accepted if those before it are."""

    draft: str
    k: int
    rate: float


def rate_of(acceptance_length: float, k: int) -> float:
    """Return the rate at which 1 + rate + .. + rate**k is the acceptance length, which must be in [1, k + 1]."""
    roots = np.roots([*(1.0,) * k, 1.0 - acceptance_length])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


class StepTime(NamedTuple):
    """Seconds of the two programs of a step, and the acceptance length."""

    generation: float
    train: float
    acceptance_length: float

    @property
    def step(self) -> float:
        return self.generation + self.train


class StepTimer:
    """Timer of steps with several kinds of drafts, which all train one policy.

    Attributes:
        states: after the last step with each draft. The policy is that of the last step of all.
    """

    def __init__(
        self,
        programs: Mapping[str, StepPrograms],
        compiled: Mapping[tuple[str, str], Compiled],
        states: Mapping[str, TrainState],
    ) -> None:
        self.states, self._programs, self._compiled = dict(states), programs, compiled
        self._newest = next(iter(self.states.values()))

    @property
    def has_policy(self) -> bool:
        """Return False after an update that failed: it had been given the policy."""
        return not any(x.is_deleted() for x in jax.tree.leaves(self._newest.params))

    def measure(self, arm: Arm) -> StepTime:
        """Take a step and time it."""
        steps = self._programs[arm.draft]
        mesh = steps.networks.mesh
        everywhere = NamedSharding(mesh, P())
        choice = np.array([steps.lengths.index(arm.k)], np.int32), np.float32(arm.rate)
        prompts, choice = place(steps.prompts, mesh), jax.device_put(choice, everywhere)
        state = with_policy_of(self._newest, self.states[arm.draft])
        # The draft is trained by the schedule of a run: now, or after one more step.
        assert state.adaptation is not None
        wait = jax.device_put((np.int32(0 if arm.k else 1), np.int32(1)), everywhere)
        state = replace(state, adaptation=replace(state.adaptation, wait=wait[0], interval=wait[1]))
        jax.block_until_ready((state, prompts, choice))
        start = time.perf_counter()
        rollout = jax.block_until_ready(self._compiled[arm.draft, GENERATE].program(state, prompts, *choice))
        generated = time.perf_counter()
        lengths, verifications = jax.device_get((rollout.lengths, rollout.verifications))
        scores = jax.device_put(steps.reward(rollout), rollout.lengths.sharding)
        scored = time.perf_counter()
        state, *rest = self._compiled[arm.draft, UPDATE].program(state, prompts, rollout, scores)
        jax.block_until_ready((state, rest))
        trained = time.perf_counter()
        self._newest = self.states[arm.draft] = state
        accepted = float(lengths.sum() - len(lengths)) / max(int(verifications.sum()), 1)
        return StepTime(generated - start, trained - scored, accepted)


def with_policy_of(newest: TrainState, state: TrainState) -> TrainState:
    """Return the state with the policy and its moments of the newest one, which a step may since have donated."""
    policy = {name: getattr(newest.params, name) for name in ("policy", "base")}
    optimizer = replace(state.optimizer, policy=newest.optimizer.policy)
    return replace(state, params=replace(state.params, **policy), optimizer=optimizer)


def table(times: Mapping[Arm, Sequence[StepTime]]) -> list[Row]:
    """Return a row for each arm that has been measured. The first arm has no drafts."""
    times = {arm: values for arm, values in times.items() if values}
    first = min(1, min(map(len, times.values())) - 1)
    plain, *_ = every = [list(values)[first:] for values in times.values()]
    rows = list[Row]()
    for arm, values in zip(times, every, strict=True):
        pairs = list(zip(plain, values, strict=False))
        rows.append({
            "draft": arm.draft if arm.k else "none",
            "k": arm.k,
            "acceptance length": values[0].acceptance_length,
            "generation s": median(each.generation for each in values),
            "train s": median(each.train for each in values),
            "step s": median(each.step for each in values),
            "generation x": ratio([a.generation for a, _ in pairs], [b.generation for _, b in pairs]),
            "step x": ratio([a.step for a, _ in pairs], [b.step for _, b in pairs]),
            "held x": ratio([a.step for a, _ in pairs], [b.generation + a.train for a, b in pairs]),
            "turns, generation s": [each.generation for each in times[arm]],
            "turns, train s": [each.train for each in times[arm]],
        })  # fmt: skip
    return rows


def turns(timer: StepTimer, arms: Sequence[Arm], count: int) -> Iterator[list[Row]]:
    """Take `count` turns of a step of each arm. Yield the table after every step.

    An arm for whose rollout the device's memory is too small is left out from then on.
    """
    times: dict[Arm, list[StepTime]] = {arm: [] for arm in arms}
    for turn in range(count):
        for arm in list(times)[:: -1 if turn % 2 else 1]:
            try:
                times[arm].append(timer.measure(arm))
            except jax.errors.JaxRuntimeError as error:
                # Without drafts there is nothing to compare with; after an update that failed, no policy is left.
                if "RESOURCE_EXHAUSTED" not in str(error) or not arm.k or not timer.has_policy:
                    raise
                print(f"{arm.draft}: {first_line(error)}", file=sys.stderr, flush=True)
                del times[arm]
                continue
            yield table(times)


def abstract_programs(
    preset: Preset, rank: int, lengths: Mapping[str, Sequence[int]], shape: argparse.Namespace, mesh: Mesh
) -> dict[str, StepPrograms]:
    """Return the programs of each kind of draft. Allocates nothing."""
    tail, shapes = LongTail(median=shape.median, factor=4), policy_params(preset, rank, mesh, None)
    programs = dict[str, StepPrograms]()
    for draft, choices in lengths.items():
        networks = step_networks(preset, draft, shapes, mesh, None)
        prompts: Prompts = random_prompts(networks, shape.prompts, shape.prompt)
        programs[draft] = StepPrograms(networks, prompts, shape.samples, tail, choices, shape.microbatches)
    return programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-8b", help="preset of benchmarks.bench")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters; 0: the whole policy trains")
    parser.add_argument("--draft-length", type=int, default=3, help="draft length of EAGLE-3")
    parser.add_argument(
        "--acceptance", type=float, nargs=2, default=[2.28, 3.45], help="acceptance lengths: EAGLE-3's, the block's"
    )
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=16, help="completions of each")
    parser.add_argument("--median", type=int, default=256, help="median length; one completion in 16 has 4 times that")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of an update")
    parser.add_argument("--turns", type=int, default=7, help="steps of each kind")
    parser.add_argument("--absent", action="store_true", help="only compile, for an H200 that is not there")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    use_compile_cache()
    preset, begin = PRESETS[options.preset], time.perf_counter()
    mesh = mesh_over(absent_gpus("h200"), MeshConfig()) if options.absent else make_mesh(MeshConfig())
    results, size = Results("benchmarks.gpu.steps", options.preset, options.json), preset.block.block_size
    lengths = {EAGLE3: (0, options.draft_length), BLOCK: (size,)}
    rates = [rate_of(*pair) for pair in zip(options.acceptance, (options.draft_length, size), strict=True)]
    arms = Arm(EAGLE3, 0, 0.0), Arm(EAGLE3, options.draft_length, rates[0]), Arm(BLOCK, size, rates[1])
    programs, states = abstract_programs(preset, options.rank, lengths, options, mesh), dict[str, TrainState]()
    with ThreadPoolExecutor() as pool:
        waiting = submit_all(programs, pool)
        print(f"traced {len(waiting)} programs in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        keys = jax.random.split(jax.random.key(0), 1 + len(programs))
        policy = None if options.absent else policy_params(preset, options.rank, mesh, keys[0])
        for key, (draft, each) in zip(keys[1:], programs.items(), strict=True):
            if policy is not None:
                states[draft] = each.state(step_networks(preset, draft, policy, mesh, key).trained)
    errors = {name: first_line(error) for name, future in waiting.items() if (error := future.exception())}
    compiled = {name: future.result() for name, future in waiting.items() if name not in errors}
    rows: list[Row] = [
        {"draft": draft, "program": name, "compile s": each.seconds, "GiB": each.gib}
        for (draft, name), each in compiled.items()
    ]
    notes = [f"side by side, with tracing and random weights: {time.perf_counter() - begin:.0f} s"]
    notes += [f"{draft}, {name}: not compiled: {error}" for (draft, name), error in errors.items()]
    results.add("programs", BenchSection("programs of whole steps", rows, notes))
    refused = {draft for draft, _ in errors}
    if options.absent or EAGLE3 in refused:
        raise SystemExit(len(errors))
    # Whatever XLA does not compile for the block draft, the other steps are timed.
    arms = [arm for arm in arms if arm.draft not in refused]
    timer, sequences = StepTimer(programs, compiled, states), options.prompts * options.samples
    title = f"whole steps, {sequences} rows of {options.prompt} + {4 * options.median} positions, rank {options.rank}"
    results.follow("steps", (BenchSection(title, rows, NOTES) for rows in turns(timer, arms, options.turns)))
    raise SystemExit(len(errors))


if __name__ == "__main__":
    main()
