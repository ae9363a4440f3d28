"""Time whole steps with LoRA on one device: random weights, forced acceptance, draft lengths 0 and others.

Run from the repository's root: python -m benchmarks.gpu.lora [--preset qwen3-8b]

A step is one rollout and one update, the two programs of a run whose scorer is on the host. All draft lengths are in
one program. With drafts the update trains the EAGLE-3 head too, without them it does not. Lengths of completions are
forced, and the same in every step.
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.bench.models import BenchNetworks, random_prompts
from benchmarks.bench.presets import PRESETS, LongTail, Preset
from benchmarks.bench.report import BenchSection, Results, Row
from benchmarks.bench.stubs import forced_rollout
from configs.schema import LoraConfig
from launch.setup.adapters import build_adapters
from launch.setup.policy import random_params
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from specjax import kernels
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rewards import HostReward
from specjax.rollout.generate import abstract_prompts, place
from specjax.rollout.plan import RolloutConfig
from specjax.train.config import TrainConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.stages import Stages
from specjax.train.state import abstract_train_state, init_train_state
from specjax.train.train_step import TrainStep
from specjax.types import Params, Prompts, Reward, Rollout, TrainState

# Positions of each row whose logits exist at a time.
LOGIT_CHUNK = 256
NOTES = (
    "acceptance length: tokens of a verification, forced by the rate, over rows that have not ended",
    "generation s: prefill, all rounds and the copy of adapters and draft; train s: forward, backward and update",
    "speed-up: seconds of the step without drafts, divided by the step's",
    "rows are padded to the longest and keep their slots: a run's ladder and phases shorten training and rounds",
)


def lora_networks(preset: Preset, rank: int, mesh: Mesh, seed: int | None = 0) -> BenchNetworks:
    """Return a policy with frozen weights in its compute dtype, adapters and a head in float32. seed None: shapes."""
    decoder = replace(preset.decoder, param_dtype=preset.decoder.dtype)
    head = replace(preset.head, param_dtype="float32")
    policy = make_policy(decoder, "full")
    ids = None if preset.draft_vocab is None else np.arange(preset.draft_vocab, dtype=np.int32)
    keys = (None,) * 3 if seed is None else jax.random.split(jax.random.key(seed), 3)
    weights = random_params(partial(init_decoder, decoder), keys[0], mesh)
    adapters, base = build_adapters(LoraConfig(rank=rank), decoder, weights, mesh, keys[1])
    params = Params(adapters, random_params(partial(init_eagle3, head), keys[2], mesh), base=base)
    return BenchNetworks(decoder, policy, make_eagle3(head, policy, ids), params, mesh)


class Lowered(NamedTuple):
    """The two programs of a step.

    generate: (state, prompts, index of the draft length int32 [1], acceptance rate float32) -> rollout.
    update:   that of `TrainStep`. It donates state and rollout.
    """

    generate: jax.stages.Lowered
    update: jax.stages.Lowered


class LoraSteps:
    """The steps of networks on prompts.

    Args:
        networks: with parameters, or with their shapes.
        prompts:  all of one length.
        samples:  completions of each prompt.
        tail:     lengths of completions.
        lengths:  draft lengths, ascending; the first is 0.
        microbatches: of an update.
    """

    def __init__(
        self,
        networks: BenchNetworks,
        prompts: Prompts,
        samples: int,
        tail: LongTail,
        lengths: Sequence[int],
        microbatches: int,
    ) -> None:
        self.networks, self.prompts, self.lengths, self._tail = networks, prompts, tuple(lengths), tail
        self.config = TrainConfig(
            rollout=RolloutConfig(group_size=samples, max_new_tokens=tail.longest, draft_lengths=self.lengths),
            policy_optimizer=OptimizerConfig(learning_rate=1e-5),
            microbatches=microbatches,
            logit_chunk=LOGIT_CHUNK,
        )
        reward = HostReward(_score)
        self._stages = Stages(networks.policy, networks.drafter, reward, self.config, networks.mesh)
        self._seconds = np.ones((1, len(self.lengths)), np.float32)

    def state(self) -> TrainState:
        """Return the state before the first step."""
        return init_train_state(self.networks.trained, self.config, self.networks.mesh, seconds=self._seconds)

    def lower(self) -> Lowered:
        """Trace both programs. Allocates nothing; the devices may be absent."""
        mesh, params = self.networks.mesh, self.networks.trained
        seconds = jax.ShapeDtypeStruct(self._seconds.shape, jnp.float32)
        state = abstract_train_state(params, self.config, mesh, seconds=seconds)
        everywhere, prompts = NamedSharding(mesh, P()), abstract_prompts(self.prompts, mesh)
        chosen = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=everywhere)
        rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
        options = kernels.compiler_options(self.networks.policy.dtype)
        with jax.set_mesh(mesh):
            generate = jax.jit(self._generate, compiler_options=options).trace(state, prompts, chosen, rate)
        rollout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), generate.out_info)
        update = TrainStep(self._stages).trace_update(state, self.prompts, rollout)
        with jax.set_mesh(mesh):
            return Lowered(generate.lower(), update.lower())

    def reward(self, rollout: Rollout) -> Reward:
        """Return the scores of a rollout."""
        return self._stages.reward(rollout, self.prompts)

    def _generate(self, state: TrainState, prompts: Prompts, chosen: jax.Array, rate: jax.Array) -> Rollout:
        stages = replace(self._stages, rollout_fn=partial(forced_rollout, rate=rate, tail=self._tail))
        # Always the same step: its noise decides the lengths.
        return stages.generate(stages.prepare(state.params), prompts, jnp.int32(0), chosen)


class StepTime(NamedTuple):
    """Seconds of the two programs of a step, and the acceptance length."""

    generation: float
    train: float
    acceptance_length: float

    @property
    def step(self) -> float:
        return self.generation + self.train


class StepTimer:
    """Timer of steps. The constructor compiles both programs and makes the state.

    Attributes:
        compile_seconds: of `generate` and `update`.
        gib:             memory that each takes, with its arguments.
        state:           after the last step.
    """

    def __init__(self, steps: LoraSteps) -> None:
        self._steps, self._programs = steps, dict[str, jax.stages.Compiled]()
        self.compile_seconds, self.gib = dict[str, float](), dict[str, float]()
        for name, lowered in steps.lower()._asdict().items():
            start = time.perf_counter()
            with jax.set_mesh(steps.networks.mesh):
                self._programs[name] = lowered.compile()
            self.compile_seconds[name] = time.perf_counter() - start
            self.gib[name] = needed_gib(self._programs[name])
        self.state, self._prompts = steps.state(), place(steps.prompts, steps.networks.mesh)

    def measure(self, k: int, rate: float) -> StepTime:
        """Take a step at a draft length, and time it."""
        everywhere = NamedSharding(self._steps.networks.mesh, P())
        choice = np.array([self._steps.lengths.index(k)], np.int32), np.float32(rate)
        # The head is trained by the schedule of a run: now, or after one more step.
        assert self.state.adaptation is not None
        wait = jax.device_put((np.int32(0 if k else 1), np.int32(1)), everywhere)
        adaptation = replace(self.state.adaptation, wait=wait[0], interval=wait[1])
        state, choice = replace(self.state, adaptation=adaptation), jax.device_put(choice, everywhere)
        start = time.perf_counter()
        rollout = jax.block_until_ready(self._programs["generate"](state, self._prompts, *choice))
        generated = time.perf_counter()
        lengths, verifications = jax.device_get((rollout.lengths, rollout.verifications))
        scores = jax.device_put(self._steps.reward(rollout), rollout.lengths.sharding)
        scored = time.perf_counter()
        self.state, *rest = self._programs["update"](state, self._prompts, rollout, scores)
        jax.block_until_ready((self.state, rest))
        trained = time.perf_counter()
        accepted = float(lengths.sum() - len(lengths)) / max(int(verifications.sum()), 1)
        return StepTime(generated - start, trained - scored, accepted)


def needed_gib(compiled: jax.stages.Compiled) -> float:
    """Return the GiB of a program's arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    assert memory is not None
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return (size - memory.alias_size_in_bytes) / 2**30


def table(times: Mapping[tuple[int, float | None], Sequence[StepTime]]) -> list[Row]:
    """Return a row of medians for each draft length and rate, of those that have been measured."""
    plain = next((values for (k, _), values in times.items() if k == 0), ())
    rows = list[Row]()
    for (k, rate), values in times.items():
        seconds = median(each.step for each in values)
        rows.append({
            "k": k,
            "rate": rate,
            "acceptance length": values[0].acceptance_length,
            "generation s": median(each.generation for each in values),
            "train s": median(each.train for each in values),
            "step s": seconds,
            "speed-up": median(each.step for each in plain) / seconds if plain else None,
            "steps": len(values),
        })  # fmt: skip
    return rows


def _score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """Score a completion by whether its length is odd, so that samples of a prompt differ."""
    value = (lengths % 2).astype(np.float32)
    return value, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-8b", help="preset of benchmarks.bench")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters")
    parser.add_argument(
        "--draft-lengths", type=int, nargs="+", default=[3, 5], help="draft lengths beside 0, ascending"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 0.6], help="forced acceptance")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=16, help="completions of each")
    parser.add_argument("--median", type=int, default=128, help="median length; one completion in 16 has 4 times that")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of an update")
    parser.add_argument("--repeats", type=int, default=2, help="steps of each kind, in turns")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    preset, tail = PRESETS[options.preset], LongTail(median=options.median, factor=4)
    results, mesh = Results("benchmarks.gpu.lora", options.preset, options.json), make_mesh(MeshConfig())
    networks = lora_networks(preset, options.rank, mesh)
    prompts, lengths = random_prompts(networks, options.prompts, preset.prompt), (0, *options.draft_lengths)
    timer = StepTimer(LoraSteps(networks, prompts, options.samples, tail, lengths, options.microbatches))
    compiled = ", ".join(f"{name} in {seconds:.0f} s" for name, seconds in timer.compile_seconds.items())
    notes = (*NOTES, f"compiled {compiled}; rank {options.rank}, {preset.prompt} + {tail.longest} positions")
    timer.measure(lengths[-1], options.rates[0])
    kinds = [(0, None), *itertools.product(options.draft_lengths, options.rates)]
    kinds.sort(key=lambda kind: options.rates.index(kind[1]) if kind[1] is not None else 0)
    times, rows = defaultdict[tuple[int, float | None], list[StepTime]](list), options.prompts * options.samples
    for _ in range(options.repeats):
        for k, rate in kinds:
            times[k, rate].append(timer.measure(k, rate or 0.0))
            # Written after each step, for the case that the next does not end.
            results.add("lora", BenchSection(f"whole steps with LoRA, {rows} rows", table(times), notes))


if __name__ == "__main__":
    main()
