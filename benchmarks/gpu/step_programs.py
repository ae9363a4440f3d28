"""The two programs of a whole step with random weights, forced acceptance and forced lengths of completions."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.bench.models import BenchNetworks
from benchmarks.bench.presets import LongTail, Preset
from benchmarks.bench.sections.decoding import BLOCK
from benchmarks.bench.stubs import forced_rollout
from configs.schema import LoraConfig
from launch.plan.devices import OPTION_SETS
from launch.plan.programs import compile_by_any
from launch.predict.memory import ProgramName
from launch.setup.adapters import build_adapters
from launch.setup.policy import random_params
from models.decoder import init_decoder, make_policy
from models.drafts.block import init_block, make_block
from models.drafts.eagle3 import init_eagle3, make_eagle3
from specjax import kernels
from specjax.rewards import HostReward
from specjax.rollout.generate import abstract_prompts
from specjax.rollout.plan import RolloutConfig
from specjax.train.config import TrainConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.stages import Stages
from specjax.train.state import abstract_train_state, init_train_state
from specjax.train.train_step import TrainStep
from specjax.types import Params, Prompts, Reward, Rollout, TrainState

# Positions of each row whose logits exist at a time.
LOGIT_CHUNK = 256
GENERATE: ProgramName = "generate"
UPDATE: ProgramName = "update"


def policy_params(preset: Preset, rank: int, mesh: Mesh, key: jax.Array | None) -> Params:
    """Return random weights of the policy, without a draft. key None: their shapes.

    rank: of adapters in float32 on weights that are frozen in the compute dtype; 0: all weights train in float32.
    """
    decoder = preset.decoder
    if not rank:
        return Params(random_params(partial(init_decoder, decoder), key, mesh), {})
    decoder = replace(decoder, param_dtype=decoder.dtype)
    weights = random_params(partial(init_decoder, decoder), key, mesh)
    adapters, base = build_adapters(LoraConfig(rank=rank), decoder, weights, mesh, key)
    return Params(adapters, {}, base=base)


def step_networks(
    preset: Preset, draft: str, policy_params: Params, mesh: Mesh, key: jax.Array | None
) -> BenchNetworks:
    """Return the policy with a draft in float32, EAGLE-3 or the block draft. key None: with the draft's shapes."""
    block = replace(preset.block, param_dtype="float32")
    head = replace(preset.head, param_dtype="float32")
    decoder = preset.block_decoder if draft == BLOCK else preset.decoder
    policy = make_policy(decoder, "full")
    if draft == BLOCK:
        drafter, init = make_block(block, policy), partial(init_block, block)
    else:
        ids = None if preset.draft_vocab is None else np.arange(preset.draft_vocab, dtype=np.int32)
        drafter, init = make_eagle3(head, policy, ids), partial(init_eagle3, head)
    return BenchNetworks(decoder, policy, drafter, replace(policy_params, draft=random_params(init, key, mesh)), mesh)


class StepPrograms:
    """The programs of steps with one kind of draft, at any of some draft lengths and any acceptance.

    Args:
        networks: with parameters, or with their shapes.
        prompts:  all of one length.
        samples:  completions of each prompt.
        tail:     lengths of completions.
        lengths:  draft lengths, ascending.
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

    def state(self, params: Params) -> TrainState:
        """Return the state before the first step."""
        return init_train_state(params, self.config, self.networks.mesh, seconds=self._seconds)

    def lower(self) -> Iterator[tuple[ProgramName, jax.stages.Lowered]]:
        """Trace and yield both programs by name. Allocates nothing; the devices may be absent.

        generate: (state, prompts, index of the draft length int32 [1], acceptance rate float32) -> rollout.
        update:   that of `TrainStep`. It donates state and rollout.
        """
        mesh, params = self.networks.mesh, self.networks.trained
        seconds = jax.ShapeDtypeStruct(self._seconds.shape, jnp.float32)
        state = abstract_train_state(params, self.config, mesh, seconds=seconds)
        everywhere, prompts = NamedSharding(mesh, P()), abstract_prompts(self.prompts, mesh)
        chosen = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=everywhere)
        rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
        options = kernels.compiler_options(self.networks.policy.dtype)
        with jax.set_mesh(mesh):
            generate = jax.jit(self._generate, compiler_options=options).trace(state, prompts, chosen, rate)
            yield GENERATE, generate.lower()
        rollout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), generate.out_info)
        update = TrainStep(self._stages).trace_update(state, self.prompts, rollout)
        with jax.set_mesh(mesh):
            yield UPDATE, update.lower()

    def reward(self, rollout: Rollout) -> Reward:
        """Return the scores of a rollout."""
        return self._stages.reward(rollout, self.prompts)

    def _generate(self, state: TrainState, prompts: Prompts, chosen: jax.Array, rate: jax.Array) -> Rollout:
        stages = replace(self._stages, rollout_fn=partial(forced_rollout, rate=rate, tail=self._tail))
        # Always the same step: its noise decides the lengths.
        return stages.generate(stages.prepare(state.params), prompts, jnp.int32(0), chosen)


class Compiled(NamedTuple):
    """A compiled program, the seconds that XLA took, and the GiB of its arguments, results and temporaries."""

    program: jax.stages.Compiled
    seconds: float
    gib: float


def submit_all(
    programs: Mapping[str, StepPrograms], pool: ThreadPoolExecutor
) -> dict[tuple[str, str], Future[Compiled]]:
    """Compile all programs side by side in the pool, each from when it is traced. Returned by (draft, program)."""
    return {
        (draft, name): pool.submit(_compile, name, lowered, each.networks.mesh)
        for draft, each in programs.items()
        for name, lowered in each.lower()
    }


def _compile(name: ProgramName, lowered: jax.stages.Lowered, mesh: Mesh) -> Compiled:
    start, absent = time.perf_counter(), mesh.devices.flat[0] not in jax.devices()
    # The mesh that is set belongs to a thread.
    with jax.set_mesh(mesh):
        program = compile_by_any(name, lowered, OPTION_SETS)[0] if absent else lowered.compile()
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    assert memory is not None
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(program, seconds, (size - memory.alias_size_in_bytes) / 2**30)


def _score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """Score a completion by whether its length is odd, so that samples of a prompt differ."""
    value = (lengths % 2).astype(np.float32)
    return value, value
