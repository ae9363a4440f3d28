"""Timer of single rounds: several run as one compiled program, whose start-up time is subtracted."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from launch.timing import minus_startup, time_call
from specjax import cache as kv
from specjax import kernels
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.parallel.mesh import BATCH_AXES
from specjax.rollout.generate import place
from specjax.rollout.plan import Phase, RolloutConfig, lay_out
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.rollout.speculative import start_rollout
from specjax.types import Params, Policy, Prompts

Name = TypeVar("Name")
# Runs with no rounds. The fastest gives the start-up time.
STARTS = 5


class TimedRounds(NamedTuple):
    """Rounds to time, on every data shard.

    phase:        rows and cache positions.
    draft_length: tokens proposed in each round.
    drafter:      proposes them; None is the timer's drafter. Another one must leave that drafter's state alone.
    """

    phase: Phase
    draft_length: int
    drafter: Drafter | None = None


class RoundTimer(Generic[Name]):
    """Times rounds of the given kinds, each kind with one program, compiled by the first `start`.

    Every measurement runs `count` rounds from the first token of each row. Kinds with the same phase share one state,
    which is donated from one measurement to the next: the caches exist once and are equally long.

    compile_seconds: by kind, once compiled; the programs compile side by side.
    """

    def __init__(
        self,
        policy: Policy,
        drafter: Drafter,
        config: RolloutConfig,
        prompts: Prompts,
        mesh: Mesh,
        kinds: Mapping[Name, TimedRounds],
        count: int,
        *,
        blank: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        """blank: as in `first_rows`. options: XLA's, which override those of decoding."""
        # Fix the draft length at the longest, so that every state has room for it.
        config = replace(config, draft_lengths=(), draft_length=max(config.lengths))
        self._kinds, self._count, self._prompts, self._mesh = kinds, count, place(prompts, mesh), mesh
        # The mesh says which platform the options are for.
        with jax.set_mesh(mesh):
            decoding_options = kernels.compiler_options(policy.dtype)

        def jit_first_rows(phase: Phase) -> Callable[[Params, Prompts], RoundState]:
            def run(params: Params, prompts: Prompts) -> RoundState:
                return first_rows(Decoding(policy, drafter, params, config), prompts, phase, blank=blank)

            return jax.jit(_per_shard(run, mesh, P(BATCH_AXES)), compiler_options=decoding_options)

        def jit_rounds(kind: TimedRounds) -> jax.stages.Wrapped:
            def run(params: Params, state: RoundState, count: Int[Array, ""]) -> RoundState:
                decoding = Decoding(policy, kind.drafter or drafter, params, config)
                return run_rounds(decoding, kind.draft_length, state, count)

            sharded = _per_shard(run, mesh, P(BATCH_AXES), P())
            return jax.jit(sharded, donate_argnums=1, compiler_options=decoding_options | (options or {}))

        self._start_rows = {phase: jit_first_rows(phase) for phase in {kind.phase for kind in kinds.values()}}
        self._rounds = {name: jit_rounds(kind) for name, kind in kinds.items()}
        self._compiled: dict[Name, jax.stages.Compiled] = {}
        self.compile_seconds: dict[Name, float] = {}

    def start(self, params: Params) -> dict[Name, Callable[[], float]]:
        """Return, by kind, a function that measures the seconds of one round. params: prepared.

        The states live as long as these functions.
        """
        with jax.set_mesh(self._mesh):
            states = {phase: start_rows(params, self._prompts) for phase, start_rows in self._start_rows.items()}
            if not self._compiled:
                self._compile(params, states)
        return {
            name: _Measurement(self._compiled[name], params, states, kind.phase, self._count).seconds
            for name, kind in self._kinds.items()
        }

    def _compile(self, params: Params, states: Mapping[Phase, RoundState]) -> None:
        """Compile all programs in parallel: each compilation mostly uses one core."""

        def compile_one(name: Name, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
            start = time.perf_counter()
            return lowered.compile(), time.perf_counter() - start

        lowered = {
            name: run.lower(params, states[self._kinds[name].phase], jnp.int32(0)) for name, run in self._rounds.items()
        }
        with ThreadPoolExecutor() as pool:
            done = dict(zip(lowered, pool.map(compile_one, lowered, lowered.values()), strict=True))
        self._compiled = {name: program for name, (program, _) in done.items()}
        self.compile_seconds = {name: seconds for name, (_, seconds) in done.items()}


@dataclass
class _Measurement:
    """The program of one kind, and the states by phase, which kinds of the same phase share."""

    program: jax.stages.Compiled
    params: Params
    states: dict[Phase, RoundState]
    phase: Phase
    count: int

    def __post_init__(self) -> None:
        # Warm up: the first run is slower than the others.
        self._run(jnp.int32(self.count))
        self.startup = min(time_call(partial(self._run, jnp.int32(0))) for _ in range(STARTS))

    def seconds(self) -> float:
        return minus_startup(time_call(partial(self._run, jnp.int32(self.count))), self.startup) / self.count

    def _run(self, count: Array) -> RoundState:
        self.states[self.phase] = self.program(self.params, self.states[self.phase], count)
        return jax.block_until_ready(self.states[self.phase])


def first_rows(decoding: Decoding, prompts: Prompts, phase: Phase, *, blank: bool) -> RoundState:
    """Return a shard's first rows at their first token, with the rows and cache positions of `phase`.

    blank: skip the prefill and leave everything zero but the prompts' length. The cost of a round is the same, but
    caches are not sharded over tensor.
    """
    config, (count, width) = decoding.config, prompts.tokens.shape
    sequences = count * config.group_size
    leaving = lay_out(config, sequences, width)[-1].slots < sequences

    def make() -> RoundState:
        rows = start_rollout(decoding, prompts, seed_step(0, -3), phase.slots, leaving=leaving).state
        return kv.resize(rows, phase.window - width - config.max_new_tokens)

    if not blank:
        return make()
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))
    return replace(zeros, prompt=jnp.full_like(zeros.prompt, width))


def run_rounds(decoding: Decoding, draft_length: int, state: RoundState, count: Int[Array, ""]) -> RoundState:
    """Run `count` rounds from the first token of each row, whatever the state has emitted before."""
    one = jnp.ones_like(state.emitted)
    state = replace(state, emitted=one, done=one == 0)
    return rounds(decoding, state, draft_length, lambda _, done: done == count)[0]


def _per_shard(run: Callable[..., RoundState], mesh: Mesh, *specs: P) -> Callable[..., RoundState]:
    rows, axes = P(BATCH_AXES), set(BATCH_AXES)
    return jax.shard_map(run, mesh=mesh, in_specs=(P(), *specs), out_specs=rows, axis_names=axes, check_vma=False)
