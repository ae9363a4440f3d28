"""A rollout run round by round, which records each drafted token and checks the caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from launch.data.responses import Answers, answers_of, join_answers
from launch.errors import ConfigError
from launch.setup.experiment import Experiment
from specjax.drafters import Drafter
from specjax.keys import SeedStep, seed_step
from specjax.parallel import processes
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, round_once
from specjax.rollout.speculative import start_rollout
from specjax.testing.caches import CacheCheck
from specjax.train.batch import Sequences
from specjax.types import Params, Prompts, Rollout

# Allowed difference between caches, absolute and relative to an array's largest entry: far above float32 rounding, and
# far below the effect of a wrong position.
TOLERANCE, RELATIVE = 1e-5, 1e-3


class Drafted(NamedTuple):
    """Drafted tokens that were verified, that is, those whose predecessors in the draft were all accepted.

    Attributes:
        row:      int [E], index of the token's sequence.
        place:    int [E], index of the token in its completion.
        position: int [E], position of the token in its draft, 0 .. K - 1.
        accepted: bool [E], True if it was accepted.
    """

    row: np.ndarray
    place: np.ndarray
    position: np.ndarray
    accepted: np.ndarray


class Observed(NamedTuple):
    """Sequences that were generated round by round, and their drafted tokens, accepted and rejected."""

    answers: Answers
    drafted: Drafted

    @property
    def sequences(self) -> Sequences:
        """Return all rows, with a mask of the completion tokens."""
        return self.answers.batch(np.arange(len(self.answers)))


@dataclass
class CacheComparison:
    """Comparisons of the caches with the caches of a fresh prefill, up to the first difference.

    Attributes:
        check:        compares the caches of a state.
        count:        number of states whose caches agreed.
        fault:        description of the first difference; None if there was none.
        not_compared: reason why this drafter's caches cannot be compared; None if they can.
    """

    check: CacheCheck
    count: int = 0
    fault: str | None = None
    not_compared: str | None = None

    def compare(self, state: RoundState) -> None:
        """Compare the caches of a state, unless an earlier one differed."""
        if self.fault or self.not_compared:
            return
        try:
            self.check(state)
            self.count += 1
        except AssertionError as error:
            self.fault = str(error)
        except ValueError as error:
            self.not_compared = str(error)


def observe(
    experiment: Experiment, drafter: Drafter, params: Params, batches: Sequence[Prompts], config: RolloutConfig
) -> tuple[Observed, CacheComparison]:
    """Generate completions of batches of prompts at `config.draft_length`, one batch after the other, round by round.

    All rows of a batch start together. In the first batch, caches are compared after the prefill and after rounds 1, 2,
    4, 8, .. Prompts with a negative id are left out. A run's own rollout function is not used. Raises ConfigError if
    nothing was drafted.
    """
    policy = experiment.networks.policy

    @jax.jit
    def start(params: Params, prompts: Prompts, noise: SeedStep) -> RoundState:
        rows = len(prompts.lengths) * config.group_size
        state = start_rollout(Decoding(policy, drafter, params, config), prompts, noise, rows).state
        return replace(state, done=state.done | (jnp.repeat(prompts.id, config.group_size) < 0))

    @jax.jit
    def advance(params: Params, state: RoundState) -> tuple[RoundState, tuple[Array, Array]]:
        after = round_once(Decoding(policy, drafter, params, config), state, config.draft_length)
        return after, (after.drafted - state.drafted, after.accepted - state.accepted)

    def generate(prompts: Prompts, compare: Callable[[RoundState], None]) -> Observed:
        # Step -1 keys the noise of evaluation; training steps are not negative.
        placed = processes.place(prompts, NamedSharding(experiment.mesh, P()))
        state = start(params, placed, seed_step(experiment.config.seed, -1))
        compare(state)
        rounds, drafted = 0, []
        while not processes.fetch(state.done).all():
            before = processes.fetch(state.emitted)
            state, outcome = advance(params, state)
            rounds += 1
            drafted.append(_drafted(before, *processes.fetch(outcome)))
            if rounds & (rounds - 1) == 0:
                compare(state)
        # Filler rows, which answers leave out, come last and drafted nothing.
        rollout = Rollout(state.tokens[:, : config.max_new_tokens], state.emitted)
        return Observed(answers_of(prompts, rollout), _concatenate(drafted))

    caches = CacheComparison(CacheCheck(policy, drafter, params, batches[0], config, TOLERANCE, RELATIVE))
    with jax.set_mesh(experiment.mesh):
        parts = [generate(batches[0], caches.compare)]
        parts += [generate(prompts, lambda state: None) for prompts in batches[1:]]
    observed = _join(parts)
    if not len(observed.drafted.row):
        raise ConfigError(
            f"prompts = {len(observed.answers)}: nothing was drafted, because completions ended with their first token "
            "or a lookup found no match; must be more, or rollout.max_new_tokens larger"
        )
    return observed, caches


def _join(parts: Sequence[Observed]) -> Observed:
    """Return the sequences of all parts as one."""
    offsets = np.cumsum([0, *(len(part.answers) for part in parts[:-1])])
    drafted = [part.drafted._replace(row=part.drafted.row + by) for part, by in zip(parts, offsets, strict=True)]
    return Observed(join_answers([part.answers for part in parts]), _concatenate(drafted))


def _concatenate(parts: Sequence[Drafted]) -> Drafted:
    empty = np.zeros(0, int)
    nothing = Drafted(empty, empty, empty, empty > 0)
    return Drafted(*map(np.concatenate, zip(nothing, *parts, strict=True)))


def _drafted(emitted: np.ndarray, offered: np.ndarray, accepted: np.ndarray) -> Drafted:
    """Return the tokens that one round drafted and verified. offered, accepted: int [R, K], 0 or 1."""
    verified = np.pad(accepted[:, :-1], ((0, 0), (1, 0)), constant_values=1) * offered
    row, position = np.nonzero(verified)
    return Drafted(row, emitted[row] + position, position, accepted[row, position] > 0)
