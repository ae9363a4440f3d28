"""One phase of a rollout: rounds in a fixed number of slots, with waiting sequences admitted to free ones."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax import cache as kv
from specjax import kernels
from specjax.keys import SeedStep
from specjax.rollout.admission import Carry, admit
from specjax.rollout.append import answer
from specjax.rollout.plan import Phase, admission, lay_out
from specjax.rollout.rounds import Decoding, RoundState, StopCondition, rounds
from specjax.types import Prompts


@dataclass(frozen=True)
class PhaseRun:
    """Phase `number` of the rollout of `prompts`. left_over: groups that may be unfinished when the rollout ends."""

    decoding: Decoding
    prompts: Prompts
    seed_step: SeedStep
    number: int = 0
    left_over: int = 0

    @property
    def sequences(self) -> int:
        return len(self.prompts.lengths) * self.decoding.config.group_size

    @property
    def phases(self) -> tuple[Phase, ...]:
        return lay_out(self.decoding.config, self.sequences, self.prompts.tokens.shape[1])

    @property
    def phase(self) -> Phase:
        return self.phases[self.number]

    @property
    def draft_length(self) -> Int[Array, ""]:
        return self.decoding.config.draft_length_in(self.number)

    def run(self, carry: Carry) -> tuple[Carry, Int[Array, ""]]:
        """Run until the phase ends or a row outgrows its window. Return the carry and the number of rounds."""
        too_long = max(phase.window for phase in self.phases) - self.phase.window
        if not too_long:
            return self._run(carry)

        def run_in_window(carry: Carry) -> tuple[Carry, Int[Array, ""]]:
            carry, count = self._run(carry._replace(state=kv.resize(carry.state, -too_long)))
            return carry._replace(state=kv.resize(carry.state, too_long)), count

        return jax.lax.cond(self._outgrown(carry.state), lambda carry: (carry, jnp.int32(0)), run_in_window, carry)

    def _run(self, carry: Carry) -> tuple[Carry, Int[Array, ""]]:
        if carry.queue is None:
            state, count = self._decode(carry.state, lambda state, _: self._has_ended(state, 0))
            return carry._replace(state=state), count

        def fill_and_decode(loop: tuple[Carry, Array]) -> tuple[Carry, Array]:
            carry, total = loop
            carry = kernels.run_if(self._has_room(carry.state, self._waiting(carry)), self._admit, carry)
            waiting = self._waiting(carry)
            state, count = self._decode(
                carry.state, lambda state, _: self._has_ended(state, waiting) | self._has_room(state, waiting)
            )
            return carry._replace(state=state), total + count

        return jax.lax.while_loop(
            lambda loop: ~self._has_ended(loop[0].state, self._waiting(loop[0])), fill_and_decode, (carry, jnp.int32(0))
        )

    def _decode(self, state: RoundState, stop: StopCondition) -> tuple[RoundState, Array]:
        """Run rounds at the phase's draft length, and let the environment answer once enough rows wait for it."""
        if self.decoding.config.environment is None:
            return rounds_of_phase(self.decoding, self.number, state, stop)

        def rounds_and_answers(loop: tuple[RoundState, Array]) -> tuple[RoundState, Array]:
            pause = lambda state, number: stop(state, number) | self._answers(state)  # noqa: E731
            state, count = rounds_of_phase(self.decoding, self.number, loop[0], pause)
            # A row that has outgrown the window leaves no room for answers.
            answers = self._answers(state) & ~self._outgrown(state)
            return kernels.run_if(answers, partial(answer, self.decoding), state), loop[1] + count

        return jax.lax.while_loop(lambda loop: ~stop(*loop), rounds_and_answers, (state, jnp.int32(0)))

    def _answers(self, state: RoundState) -> Bool[Array, ""]:
        """Return whether the environment answers: to a whole admission of rows, or to all that are live."""
        assert state.turns is not None
        rows, waiting = admission(self.decoding.config, self.phase.slots)[0], state.turns.waiting & ~state.done
        return jnp.any(waiting) & ((jnp.sum(waiting) >= rows) | jnp.all(state.idle))

    def _admit(self, carry: Carry) -> Carry:
        rows = admission(self.decoding.config, self.phase.slots)[0]
        return admit(self.decoding, carry, self.prompts, self.seed_step, rows=rows, drafting=self.draft_length > 0)

    def _waiting(self, carry: Carry) -> Int[Array, ""]:
        assert carry.queue is not None
        return self.sequences - carry.queue.next_sequence

    def _has_room(self, state: RoundState, waiting: Int[Array, ""]) -> Bool[Array, ""]:
        rows = admission(self.decoding.config, self.phase.slots)[0]
        return (waiting > 0) & (jnp.sum(state.done) >= jnp.minimum(rows, waiting))

    def _has_ended(self, state: RoundState, waiting: Int[Array, ""] | int) -> Bool[Array, ""]:
        """Return whether the phase has ended: no sequence waits, and live rows fit a later phase's slots.

        It also ends once so few groups are unfinished that the rollout ends, or if a row has outgrown the window.
        """
        live = max((later.slots for later in self.phases if later.slots < self.phase.slots), default=0)
        ended = jnp.sum(~state.done) <= live
        if self.left_over:
            ended |= self._unfinished_groups(state) <= self.left_over
        return ((waiting == 0) & ended) | self._outgrown(state)

    def _unfinished_groups(self, state: RoundState) -> Int[Array, ""]:
        groups = state.sequence // self.decoding.config.group_size
        return jnp.sum(jnp.zeros(len(self.prompts.lengths), bool).at[groups].max(~state.done))

    def _outgrown(self, state: RoundState) -> Bool[Array, ""]:
        return jnp.any(~state.done & (state.visible > self.phase.window))


def rounds_of_phase(
    decoding: Decoding, phase: int, state: RoundState, stop: StopCondition
) -> tuple[RoundState, Int[Array, ""]]:
    """Run rounds at the phase's draft length. Where that is a traced index, each length has its branch."""
    lengths, index = decoding.config.lengths, decoding.config.length_index(phase)
    if isinstance(index, int):
        return rounds(decoding, state, lengths[index], stop)
    branches = [lambda carry, k=k: rounds(decoding, carry[0], k, stop) for k in lengths]
    return kernels.switch(index, branches, (state, jnp.int32(0)))


def plain_rounds(before: Carry, after: Carry, loop_rounds: Int[Array, ""]) -> Int[Array, ""]:
    """Return the rounds that draft length 0 would have taken for the tokens that a phase emitted.

    The tokens of the slowest live row, since later phases wait for it; of the fastest row if none is live. With a
    queue, `loop_rounds` times the mean tokens per verification.
    """
    if after.queue is None:
        tokens = after.state.drawn - before.state.drawn
        return jnp.min(jnp.where(after.state.done, jnp.max(tokens), tokens))
    tokens, row_rounds = (end - start for end, start in zip(_totals(after), _totals(before), strict=True))
    mean = tokens / jnp.maximum(row_rounds, 1)
    return jnp.rint(loop_rounds.astype(mean.dtype) * mean).astype(jnp.int32)


def _totals(carry: Carry) -> tuple[Array, Array]:
    """Return the tokens after the first, and the verifications, of all sequences so far."""
    record, state = carry.record, carry.state
    assert record.row_rounds is not None
    lengths = record.written.at[state.sequence].set(state.drawn)
    row_rounds = record.row_rounds.at[state.sequence].set(state.row_rounds)
    return jnp.sum(jnp.maximum(lengths - 1, 0)), jnp.sum(row_rounds)
