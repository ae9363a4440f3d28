"""Timer of single speculative rounds. One compiled program runs several; its start-up time is subtracted."""

from collections.abc import Callable, Mapping
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
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.parallel.mesh import BATCH_AXES
from specjax.program import Program
from specjax.rollout.generate import place
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.rollout.speculative import start_rollout
from specjax.types import Params, Policy, Prompts

Name = TypeVar("Name")
# The start-up time is the minimum over this many runs of zero rounds.
STARTUP_RUNS = 5


class TimedRounds(NamedTuple):
    """Kind of rounds to time, on every data shard.

    Attributes:
        phase:        slots and cache positions.
        draft_length: tokens proposed in each round.
        drafter:      proposes them. Default: the timer's drafter. Another one must not change that drafter's state.
    """

    phase: Phase
    draft_length: int
    drafter: Drafter | None = None


class RoundTimer(Generic[Name]):
    """Timer of rounds of several kinds. Each kind has a program of its own; the first `start` compiles all.

    Every measurement runs `count` rounds, starting at the first token of each row. Kinds with the same phase share one
    state, which each measurement donates to the next. So there is one set of caches per phase, and all kinds see caches
    of the same length.
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
        """Create the programs without compiling them.

        Args:
            kinds:   rounds to time, by name.
            count:   rounds in one measurement.
            blank:   see `first_rows`.
            options: XLA compiler options for the rounds; they override the options of decoding.
        """
        # Every state needs room for the longest draft, because kinds share states.
        config = replace(config, draft_lengths=(), draft_length=max(config.lengths))
        self._kinds, self._count, self._prompts, self._mesh = kinds, count, place(prompts, mesh), mesh

        def program_of_first_rows(phase: Phase) -> Program[RoundState]:
            def run(params: Params, prompts: Prompts) -> RoundState:
                return first_rows(Decoding(policy, drafter, params, config), prompts, phase, blank=blank)

            return Program(_per_shard(run, mesh, P(BATCH_AXES)), mesh, compute_dtype=policy.dtype)

        def program_of_rounds(kind: TimedRounds) -> Program[RoundState]:
            def run(params: Params, state: RoundState, count: Int[Array, ""]) -> RoundState:
                decoding = Decoding(policy, kind.drafter or drafter, params, config)
                return run_rounds(decoding, kind.draft_length, state, count)

            sharded = _per_shard(run, mesh, P(BATCH_AXES), P())
            return Program(sharded, mesh, compute_dtype=policy.dtype, donate_argnums=1, compiler_options=options or {})

        self._first_rows = {phase: program_of_first_rows(phase) for phase in {kind.phase for kind in kinds.values()}}
        self._rounds = {name: program_of_rounds(kind) for name, kind in kinds.items()}

    def start(self, params: Params) -> dict[Name, Callable[[], float]]:
        """Return for each kind a function that measures the seconds of one round.

        params: prepared parameters. The states, with their caches, live as long as the returned functions.
        """
        if not self.compile_seconds:
            for first_rows in self._first_rows.values():
                first_rows.start_compiling(params, self._prompts)
        states = {phase: first_rows(params, self._prompts) for phase, first_rows in self._first_rows.items()}
        if not self.compile_seconds:
            for name, kind in self._kinds.items():
                self._rounds[name].start_compiling(params, states[kind.phase], jnp.int32(0))
            for name, kind in self._kinds.items():
                self._rounds[name].wait(params, states[kind.phase], jnp.int32(0))
        return {
            name: _Measurement(self._rounds[name], params, states, kind.phase, self._count).seconds
            for name, kind in self._kinds.items()
        }

    @property
    def compile_seconds(self) -> dict[Name, float]:
        """Return the seconds to compile the rounds of each kind, which compile side by side; {} before `start`."""
        return {name: rounds.compiled[0].seconds for name, rounds in self._rounds.items() if rounds.compiled}

    def program_text(self, name: Name) -> str:
        """Return the HLO of a kind's compiled program. Call it after `start`."""
        return str(self._rounds[name].compiled[0].program.as_text())


@dataclass
class _Measurement:
    """Measurement of one kind. The constructor warms the program up and measures its start-up time.

    Attributes:
        program: compiled program of the kind: (params, state, rounds) -> state.
        states:  states by phase. All kinds share this dict, since a run donates its state.
        phase:   phase of the kind.
        count:   rounds in one measurement.
    """

    program: Program[RoundState]
    params: Params
    states: dict[Phase, RoundState]
    phase: Phase
    count: int

    def __post_init__(self) -> None:
        # Warm-up: the first run is slower than the others.
        self._run(jnp.int32(self.count))
        self.startup = min(time_call(partial(self._run, jnp.int32(0))) for _ in range(STARTUP_RUNS))

    def seconds(self) -> float:
        """Measure the seconds of one round."""
        return minus_startup(time_call(partial(self._run, jnp.int32(self.count))), self.startup) / self.count

    def _run(self, count: Array) -> RoundState:
        """Run `count` rounds and replace the donated state."""
        self.states[self.phase] = self.program(self.params, self.states[self.phase], count)
        return jax.block_until_ready(self.states[self.phase])


def first_rows(decoding: Decoding, prompts: Prompts, phase: Phase, *, blank: bool) -> RoundState:
    """Return the state of a data shard's first rows at their first token, in the shape of `phase`.

    blank: skip the prefill; everything is zero except the prompt length. Rounds cost the same, but the caches are not
    sharded over the tensor axis.
    """
    width = prompts.tokens.shape[1]

    def start() -> RoundState:
        rows = start_rollout(decoding, prompts, seed_step(0, -3), phase.slots).state
        return kv.resize(rows, phase.window - width - decoding.config.max_new_tokens)

    if not blank:
        return start()
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(start))
    return replace(zeros, prompt=jnp.full_like(zeros.prompt, width))


def run_rounds(decoding: Decoding, draft_length: int, state: RoundState, count: Int[Array, ""]) -> RoundState:
    """Run `count` rounds. All rows start at their first token, whatever the state has emitted already."""
    state = replace(state, emitted=jnp.ones_like(state.emitted), done=jnp.zeros_like(state.done))
    return rounds(decoding, state, draft_length, lambda _, rounds_so_far: rounds_so_far == count)[0]


def _per_shard(run: Callable[..., RoundState], mesh: Mesh, *specs: P) -> Callable[..., RoundState]:
    """Return `run` mapped over the data shards: parameters are replicated, the other arguments sharded by `specs`."""
    rows, axes = P(BATCH_AXES), set(BATCH_AXES)
    return jax.shard_map(run, mesh=mesh, in_specs=(P(), *specs), out_specs=rows, axis_names=axes, check_vma=False)
