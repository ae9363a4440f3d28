"""A rollout taken round by round: what became of every drafted token, and whether the caches stay right."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from specjax.drafters import Drafter
from specjax.drafters.distillation import MOST_PASSES
from specjax.keys import SeedStep, seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, round_once
from specjax.rollout.speculative import start_rollout
from specjax.testing.caches import CacheCheck
from specjax.types import Params, Prompts


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens whose predecessors in the draft were all accepted, one entry for each.

    Attributes:
        row:      int [E], the sequence.
        place:    int [E], the token's index in its completion.
        position: int [E], its position in the draft, 0 .. K - 1.
        accepted: bool [E].
    """

    row: np.ndarray
    place: np.ndarray
    position: np.ndarray
    accepted: np.ndarray


@dataclass
class CacheComparison:
    """Comparisons of the caches with those of a fresh prefill, up to the first difference.

    Attributes:
        check:        compares the caches of a state.
        count:        states whose caches agreed.
        fault:        the first difference; None if there was none.
        not_compared: why this drafter's caches cannot be compared; None if they can.
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
            self.fault = " ".join(str(error).split())[:300]
        except ValueError as error:
            self.not_compared = str(error)


@dataclass(frozen=True)
class Observed:
    """Result of a rollout that was taken round by round.

    Attributes:
        tokens:         int32 [R, P + C], prompts and completions, left-aligned.
        prompt_lengths: int [R]. lengths: int [R], of the completions.
        drafted:        what became of the drafted tokens.
        rounds:         rounds taken.
        caches:         the caches against a fresh prefill, after some of the rounds.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    drafted: Drafted
    rounds: int
    caches: CacheComparison

    @property
    def completion(self) -> np.ndarray:
        """Return which tokens are completion tokens, bool [R, P + C]."""
        index, starts = np.arange(self.tokens.shape[1])[None], self.prompt_lengths[:, None]
        return (index >= starts) & (index < starts + self.lengths[:, None])


def observe(
    experiment: Experiment, drafter: Drafter, params: Params, prompts: Prompts, config: RolloutConfig
) -> Observed:
    """Generate `prompts` at `config.draft_length`, all at once, and record each round.

    Caches are compared after the prefill and after rounds 1, 2, 4, 8, .. Rounds are the library's, also in a run with a
    rollout function of its own. Raises ConfigError if nothing was drafted.
    """
    policy = experiment.networks.policy

    @jax.jit
    def start(params: Params, prompts: Prompts, noise: SeedStep) -> RoundState:
        return start_rollout(Decoding(policy, drafter, params, config), prompts, noise, len(prompts.lengths)).state

    @jax.jit
    def advance(params: Params, state: RoundState) -> tuple[RoundState, tuple[Array, Array]]:
        after = round_once(Decoding(policy, drafter, params, config), state, config.draft_length)
        return after, (after.drafted - state.drafted, after.accepted - state.accepted)

    with jax.set_mesh(experiment.mesh):
        prompts = jax.tree.map(jnp.asarray, prompts)
        # The noise of evaluation, which no training step uses.
        state = start(params, prompts, seed_step(experiment.config.seed, -1))
        caches = CacheComparison(CacheCheck(policy, drafter, params, prompts, config, _tolerance(state)))
        caches.compare(state)
        rounds, events = 0, []
        while not np.asarray(state.done).all():
            before = np.asarray(state.emitted)
            state, outcome = advance(params, state)
            rounds += 1
            events.append(_events(before, *map(np.asarray, outcome)))
            if rounds & (rounds - 1) == 0:
                caches.compare(state)
    if not any(len(rows) for rows, *_ in events):
        raise ConfigError(f"prompts = {len(prompts.lengths)}: nothing was drafted; must give longer completions")
    drafted = Drafted(*(np.concatenate(parts) for parts in zip(*events, strict=True)))
    completions = np.asarray(state.tokens)[:, : config.max_new_tokens]
    starts, lengths = np.asarray(state.prompt), np.asarray(state.emitted)
    tokens = np.pad(np.asarray(prompts.tokens), ((0, 0), (0, config.max_new_tokens)))
    for row, begins, length, completion in zip(tokens, starts, lengths, completions, strict=True):
        row[begins : begins + length] = completion[:length]
    return Observed(tokens, starts, lengths, drafted, rounds, caches)


def diagnostic_config(config: RolloutConfig) -> RolloutConfig:
    """Return the run's rollout as the diagnosis needs it: its longest drafts, under temperature alone.

    Training predicts MOST_PASSES positions at most, of `rejection`, without truncation, and not at temperature 0.
    """
    law = replace(config.law, temperature=config.law.temperature or 1.0, top_k=None, top_p=1.0, min_p=0.0)
    fixed = replace(config, draft_length=min(max(config.lengths), MOST_PASSES), draft_lengths=(), phases=())
    return replace(fixed, group_size=1, law=law, verifier="rejection")


def _events(emitted: np.ndarray, offered: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the fields of `Drafted` for one round; offered, accepted: int [R, K], 0 or 1."""
    reached = np.pad(accepted[:, :-1], ((0, 0), (1, 0)), constant_values=1) * offered
    row, position = np.nonzero(reached)
    return row, emitted[row] + position, position, accepted[row, position] > 0


def _tolerance(state: RoundState) -> float:
    """Return a difference far above float32 rounding and far below that of a wrong position."""
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(state.cache))
    return 1e-3 * max(largest, 1.0)
