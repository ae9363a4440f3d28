"""Rollouts with an environment: tokens, marks and endings against a simulation without caches, and exact laws."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.keys import Purpose, gumbels, seed_step, sequence_keys
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.testing.exact import completion_law, count_completions, fit
from specjax.train.batch import join_completions
from specjax.types import Ending, Rollout, Writer
from tests.specjax.sums import Sums
from tests.tiny import ENUMERABLE, WANDERING, World, assert_same

GROUP, BUDGET, RUN = 4, 16, seed_step(3, 5)
CUT = Ending.LENGTH, Ending.FULL


class Episode(NamedTuple):
    """Result of a simulation of one sequence."""

    tokens: list[int]
    sampled: list[bool]
    ending: Ending
    returns: float


def simulate(world: World, config: RolloutConfig, prompt: int, noise: np.ndarray) -> Episode:
    """Return a sequence, drawn token by token with whole forwards. noise: [C, V], of each position."""
    environment: Any = config.environment
    tokens, sampled, returns, began, turn = list[int](), list[bool](), 0.0, 0, 0
    while True:
        padded = np.array([*tokens, *[0] * (config.max_new_tokens - len(tokens))])
        logits = world.completion_logits(prompt, padded)[len(tokens)]
        tokens.append(int((logits / config.law.temperature + noise[len(tokens)]).argmax()))
        sampled.append(True)
        if tokens[-1] not in config.stop_tokens and not world.ends(tokens[began:]):
            if len(tokens) == config.max_new_tokens or len(tokens) - began == config.turn_tokens:
                return Episode(tokens, sampled, Ending.LENGTH, returns)
            continue
        total = sum(tokens[began:]) + turn + len(world.prompts[prompt])
        turn += 1
        if total % 11 == 1:
            return Episode(tokens, sampled, Ending.FAILED, float("nan"))
        returns += total % 4
        if environment.ends or total % 5 == 0:
            return Episode(tokens, sampled, Ending.STOP, returns)
        answer = [(total * (i + 1) + i) % environment.vocab for i in range(environment.width)]
        answer = answer[: total % (environment.width + 1)]
        if turn == config.turns or len(tokens) + len(answer) >= config.max_new_tokens:
            return Episode(tokens, sampled, Ending.TURNS if turn == config.turns else Ending.FULL, returns)
        tokens, sampled = tokens + answer, sampled + [False] * len(answer)
        began = len(tokens)


BASE = RolloutConfig(
    group_size=GROUP,
    max_new_tokens=BUDGET,
    draft_length=0,
    stop_tokens=(3, 10, 17, 1, 5, 8),
    stop_strings=WANDERING.stop_strings,
    verifier="coupled",
    law=SamplingLaw(0.8),
    environment=Sums(WANDERING.vocab),
    turns=5,
    turn_tokens=9,
)


@cache
def simulated_episodes(config: RolloutConfig | None = None) -> list[Episode]:
    """Return the sequences of a rollout; None: with BASE."""
    config = BASE if config is None else config
    ids, starts = (jnp.repeat(x, GROUP) for x in (WANDERING.batch.id, WANDERING.batch.lengths))
    keys = sequence_keys(RUN, ids, jnp.tile(jnp.arange(GROUP), len(WANDERING.batch.id)))
    positions = starts[:, None] + jnp.arange(BUDGET)[None]
    noise = np.asarray(gumbels(keys, positions, Purpose.COUPLED, WANDERING.vocab))
    return [simulate(WANDERING, config, row // GROUP, noise[row]) for row in range(len(ids))]


@pytest.fixture
def episodes() -> list[Episode]:
    return simulated_episodes()


def check(rollout: Rollout, episodes: list[Episode]) -> None:
    """Verify that the rollout has the tokens, marks, endings and returns of the simulation."""
    assert rollout.sampled is not None and rollout.ending is not None and rollout.writer is not None
    for row, episode in enumerate(episodes):
        length = len(episode.tokens)
        assert rollout.lengths[row] == length
        assert rollout.tokens[row].tolist() == episode.tokens + [0] * (BUDGET - length)
        assert rollout.sampled[row].tolist() == episode.sampled + [False] * (BUDGET - length)
        assert Ending(int(rollout.ending[row])) == episode.ending
        np.testing.assert_equal(float(np.asarray(rollout.returns)[row]), episode.returns)
        assert rollout.stopped is not None and rollout.stopped[row] == (episode.ending not in CUT)
    observed = np.asarray(rollout.writer) == Writer.ENVIRONMENT
    real = np.arange(BUDGET)[None] < np.asarray(rollout.lengths)[:, None]
    np.testing.assert_array_equal(observed, real & ~np.asarray(rollout.sampled))
    assert not np.asarray(rollout.full)[observed].any() and not np.asarray(rollout.law)[observed].any()


def test_the_episodes_have_something_to_compare(episodes: list[Episode]):
    assert {episode.ending for episode in episodes} == {
        *(Ending.STOP, Ending.LENGTH, Ending.TURNS, Ending.FAILED, Ending.FULL)
    }
    observed = [len(episode.sampled) - sum(episode.sampled) for episode in episodes]
    assert sum(observed) > 20 and max(observed) > 4
    # Some turns are ended by a string without a stop token.
    pairs = [(each, at) for each in episodes for at in range(1, len(each.tokens))]
    last = [each.tokens[at - 1] for each, at in pairs if each.sampled[at - 1] and not each.sampled[at]]
    assert not set(last) <= set(BASE.stop_tokens)


@pytest.mark.parametrize(
    "drafter, draft, k",
    [
        ("none", "none", 0),
        ("eagle3", "random", 4),
        ("dspark reduced", "random dspark reduced", 3),
        ("either history", "random beside remembered", 2),
        ("model", "twin", 1),
        pytest.param("ngram", "none", 4, marks=pytest.mark.slow),
        pytest.param("dflash", "random dflash", 2, marks=pytest.mark.slow),
        pytest.param("mtp", "random mtp", 3, marks=pytest.mark.slow),
    ],
)
def test_rollouts_are_the_simulated_episodes(episodes: list[Episode], drafter: str, draft: str, k: int):
    rollout = WANDERING.rollout(drafter, draft, replace(BASE, draft_length=k), RUN)
    check(rollout, episodes)
    assert not k or np.sum(rollout.accepted) > 0


def test_answers_in_other_slots_and_phases_change_no_token():
    # An answer is wider than what a window has room for when a row outgrows it.
    environment, phases = Sums(WANDERING.vocab, width=6), ((7, 14),)
    config = replace(BASE, draft_length=0, draft_lengths=(0, 3), phases=phases, environment=environment)
    program, episodes = WANDERING.program("eagle3", config), simulated_episodes(config)
    for chosen in ([1, 0], [0, 1]):
        check(program(WANDERING.params("random"), WANDERING.batch, RUN, jnp.array(chosen)), episodes)


def test_an_environment_that_ends_all_at_once_is_none():
    config = replace(BASE, draft_length=3, turn_tokens=None, environment=Sums(WANDERING.vocab, ends=True))
    rollout = WANDERING.rollout("eagle3", "random", config, RUN)
    alone = WANDERING.rollout("eagle3", "random", replace(config, environment=None), RUN)
    for name in ("tokens", "lengths", "law", "full", "writer", "accepted", "row_rounds"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name), err_msg=name)
    assert_same(rollout, alone)


@pytest.mark.parametrize(
    "drafter, draft, k, verifier",
    [
        ("eagle3", "trained", 2, "rejection"),
        ("dspark", "trained dspark", 3, "block"),
        ("ngram", "none", 2, "coupled"),
    ],
)
def test_two_turns_follow_their_exact_law(drafter: str, draft: str, k: int, verifier: Any):
    world, budget = ENUMERABLE, 5
    environment = Sums(world.vocab, width=2)
    config = RolloutConfig(
        group_size=2**16,
        max_new_tokens=budget,
        draft_length=k,
        stop_tokens=(2, 4),
        verifier=verifier,
        environment=environment,
        turns=2,
    )

    def answer(completion: tuple[int, ...], began: int, turn: int) -> tuple[int, ...] | None:
        total = sum(completion[began:]) + turn + len(world.prompts[0])
        seen = tuple((total * (i + 1) + i) % world.vocab for i in range(2))[: total % 3]
        ends = total % 11 == 1 or total % 5 == 0 or turn + 1 == config.turns
        return None if ends or len(completion) + len(seen) >= budget else seen

    prompt = world.prompts[0]
    cells = completion_law(world.logits, prompt, world.vocab, config.stop_tokens, budget, config.law, answer=answer)
    counts: dict[tuple[int, ...], int] = {}
    for step in range(4):
        rollout = world.rollout(drafter, draft, config, seed_step(1, step))
        for completion, number in count_completions(rollout).items():
            counts[completion] = counts.get(completion, 0) + number
    found = fit(counts, cells)
    assert found.passes and found.power > 0.99, str(found)


def test_observed_tokens_are_no_completion():
    rollout = WANDERING.rollout("none", "none", BASE, RUN)
    sequences = join_completions(WANDERING.batch, rollout, jnp.zeros(len(rollout.lengths)))
    assert rollout.sampled is not None
    for row, mask in enumerate(np.asarray(sequences.completion)):
        start = int(WANDERING.batch.lengths[row // GROUP])
        assert mask[start : start + BUDGET].tolist() == rollout.sampled[row].tolist()
        assert not mask[:start].any() and not mask[start + BUDGET :].any()
    np.testing.assert_array_equal(rollout.written, np.sum(rollout.sampled, axis=1))
