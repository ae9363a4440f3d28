"""A rollout run round by round, which records each drafted token and checks the caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from launch.errors import ConfigError
from launch.setup.experiment import Experiment
from specjax.drafters import Drafter
from specjax.keys import SeedStep, seed_step
from specjax.parallel import processes
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, round_once
from specjax.rollout.speculative import start_rollout
from specjax.testing.caches import CacheCheck
from specjax.types import Params, Prompts

# Allowed difference between caches, absolute and relative to an array's largest entry: far above float32 rounding, and
# far below the effect of a wrong position.
TOLERANCE, RELATIVE = 1e-5, 1e-3


@dataclass(frozen=True)
class Drafted:
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


@dataclass(frozen=True)
class Observed:
    """Sequences that were generated round by round.

    Attributes:
        tokens:         int32 [R, P + C], prompts and completions, left-aligned.
        prompt_lengths: int [R], number of prompt tokens.
        lengths:        int [R], number of completion tokens.
        drafted:        the drafted tokens, accepted and rejected.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    drafted: Drafted

    @property
    def completion(self) -> np.ndarray:
        """Return a mask of the completion tokens, bool [R, P + C]."""
        index, starts = np.arange(self.tokens.shape[1])[None], self.prompt_lengths[:, None]
        return (index >= starts) & (index < starts + self.lengths[:, None])


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
        return _without_padding(prompts, state, _concatenate(drafted), config)

    caches = CacheComparison(CacheCheck(policy, drafter, params, batches[0], config, TOLERANCE, RELATIVE))
    with jax.set_mesh(experiment.mesh):
        parts = [generate(batches[0], caches.compare)]
        parts += [generate(prompts, lambda state: None) for prompts in batches[1:]]
    observed = _join(parts)
    if not len(observed.drafted.row):
        raise ConfigError(
            f"prompts = {len(observed.lengths)}: nothing was drafted, because completions ended with their first token "
            "or a lookup found no match; must be more, or rollout.max_new_tokens larger"
        )
    return observed, caches


def _without_padding(prompts: Prompts, state: RoundState, drafted: Drafted, config: RolloutConfig) -> Observed:
    """Return the sequences of a batch without its filler rows, which come last and drafted nothing."""
    prompts, starts, emitted, completions = processes.fetch((prompts, state.prompt, state.emitted, state.tokens))
    rows = int((prompts.id >= 0).sum()) * config.group_size
    tokens = np.repeat(prompts.tokens, config.group_size, axis=0)
    tokens = np.pad(tokens, ((0, 0), (0, config.max_new_tokens)))[:rows]
    starts, lengths = starts[:rows], emitted[:rows]
    for row, begins, length, completion in zip(tokens, starts, lengths, completions, strict=False):
        row[begins : begins + length] = completion[:length]
    return Observed(tokens, starts, lengths, drafted)


def _join(parts: Sequence[Observed]) -> Observed:
    """Return the sequences of all parts as one."""
    offsets = np.cumsum([0, *(len(part.lengths) for part in parts[:-1])])
    drafted = [replace(part.drafted, row=part.drafted.row + by) for part, by in zip(parts, offsets, strict=True)]
    return Observed(
        tokens=np.concatenate([part.tokens for part in parts]),
        prompt_lengths=np.concatenate([part.prompt_lengths for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        drafted=_concatenate(drafted),
    )


def _concatenate(parts: Sequence[Drafted]) -> Drafted:
    empty = np.zeros(0, int)
    return Drafted(
        row=np.concatenate([empty, *(part.row for part in parts)]),
        place=np.concatenate([empty, *(part.place for part in parts)]),
        position=np.concatenate([empty, *(part.position for part in parts)]),
        accepted=np.concatenate([empty > 0, *(part.accepted for part in parts)]),
    )


def _drafted(emitted: np.ndarray, offered: np.ndarray, accepted: np.ndarray) -> Drafted:
    """Return the tokens that one round drafted and verified. offered, accepted: int [R, K], 0 or 1."""
    verified = np.pad(accepted[:, :-1], ((0, 0), (1, 0)), constant_values=1) * offered
    row, position = np.nonzero(verified)
    return Drafted(row, emitted[row] + position, position, accepted[row, position] > 0)
