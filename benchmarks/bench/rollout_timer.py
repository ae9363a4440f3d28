"""Timer of complete rollouts. One compiled program generates all completions of a batch of prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from specjax import kernels
from specjax.keys import seed_step
from specjax.parallel import processes
from specjax.rollout.generate import place
from specjax.types import Params, Policy, Prompts, PyTree, Rollout

# Window of a phase for rows of any length.
ANY_LENGTH = 2**30


def shrinking(slots: int) -> tuple[tuple[int, int], ...]:
    """Return phases (slots, window) that halve the slots until at most four are left, for rows of any length."""
    slot_counts = [slots]
    while slot_counts[-1] > 4:
        slot_counts.append(slot_counts[-1] // 2)
    return tuple((count, ANY_LENGTH) for count in slot_counts)


@dataclass(frozen=True)
class RolloutTime:
    """Measurement of one rollout.

    Attributes:
        lengths:           int [sequences], tokens of each completion.
        acceptance_length: tokens emitted per verification, over rows still active.
        seconds:           wall time of the program, compilation excluded.
        rounds:            speculative rounds; the maximum over data shards.
    """

    lengths: Int[np.ndarray, "sequences"]
    acceptance_length: float
    seconds: float
    rounds: int

    @property
    def tokens_per_s(self) -> float:
        return float(self.lengths.sum()) / self.seconds

    @property
    def seconds_per_round(self) -> float:
        return self.seconds / max(self.rounds, 1)


class RolloutTimer:
    """Timer of rollouts. The constructor compiles the program and runs it once.

    Args:
        generate: (params, prompts, seed_step, *data) -> Rollout, traceable.
        policy:   its dtype selects compiler options.
        prepared: returns the parameters for `generate`. It is called before every rollout, outside the measured time:
                  otherwise what the previous program left in the CPU's cache favours some programs over others.
        turns:    batches of prompts, all of one shape. Turn i uses turns[i % len(turns)], and noise of its own.
        mesh:     devices of the rollout.
        data:     example values of the other arguments.
        seed:     of the noise.

    Attributes:
        compile_seconds: time to trace and compile the program.
    """

    def __init__(
        self,
        generate: Callable[..., Rollout],
        policy: Policy,
        prepared: Callable[[], Params],
        turns: Sequence[Prompts],
        mesh: Mesh,
        *data: PyTree,
        seed: int = 0,
    ) -> None:
        self._prepared, self._turns, self._mesh, self._seed = prepared, turns, mesh, seed
        args, start = self._arguments(0, data), time.perf_counter()
        with jax.set_mesh(mesh):
            jitted = jax.jit(generate, compiler_options=kernels.compiler_options(policy.dtype))
            self._program = jitted.lower(*args).compile()
        self.compile_seconds = time.perf_counter() - start
        self.measure(0, *data)

    def generate(self, turn: int = 0, *data: PyTree) -> Rollout:
        """Return the rollout of a turn."""
        return jax.block_until_ready(self._program(*self._arguments(turn, data)))

    def measure(self, turn: int = 0, *data: PyTree) -> RolloutTime:
        """Time the rollout of a turn."""
        args, start = self._arguments(turn, data), time.perf_counter()
        rollout = jax.block_until_ready(self._program(*args))
        seconds = time.perf_counter() - start
        counted = rollout.lengths, rollout.loop_rounds, rollout.verifications
        lengths, loop_rounds, verifications = processes.fetch(counted)
        rounds = int(np.max(lengths if loop_rounds is None else loop_rounds.sum(axis=-1)))
        # The prefill emits the first token of each completion, without a verification.
        acceptance_length = float(lengths.sum() - len(lengths)) / max(int(verifications.sum()), 1)
        return RolloutTime(lengths, acceptance_length, seconds, rounds)

    def _arguments(self, turn: int, data: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Return the arguments of `generate`, all ready on the mesh."""
        prompts = place(self._turns[turn % len(self._turns)], self._mesh)
        # Negative steps have noise that no training step uses.
        replicated = processes.place((seed_step(self._seed, -2 - turn), *data), NamedSharding(self._mesh, P()))
        with jax.set_mesh(self._mesh):
            return jax.block_until_ready((self._prepared(), prompts, *replicated))
