"""Faults planted in rollouts with turns: in marks, caches, draft states and returns. The proofs detect each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import Array

from specjax.drafters.head import FeatureDrafter, HeadState
from specjax.rewards import RewardFn, finite_or_failed
from specjax.rollout import append, speculative
from specjax.rollout.rounds import RoundState
from specjax.train import stages
from specjax.train.batch import join_completions
from specjax.train.stages import Stages
from specjax.types import Ending, Rollout
from tests.specjax import test_turns, test_turns_training, training
from tests.specjax.test_host_turns import RULE, check_caches, generate
from tests.specjax.test_turns import BUDGET, check, simulated_episodes


def prove_rollout() -> None:
    """Compare tokens, marks, endings and returns with the simulation."""
    check(generate(RULE, "none", "none")[0], simulated_episodes())


def prove_caches() -> None:
    """Compare the caches after each answer with a prefill."""
    check_caches("eagle3", "random", 3)


def prove_reward() -> None:
    """Compare the rewards of three made-up sequences, of which one failed, with their returns."""
    config, networks = test_turns_training.CONFIG, training.networks()
    tokens = jnp.zeros((3 * training.GROUP, training.BUDGET), jnp.int32).at[:, 1].set(5)
    lengths = jnp.full(len(tokens), 4)
    ending = jnp.full(len(tokens), Ending.STOP, jnp.int8).at[1].set(Ending.FAILED)
    returns = jnp.arange(len(tokens), dtype=jnp.float32).at[1].set(jnp.nan)
    rollout = Rollout(tokens, lengths, ending=ending, returns=returns)
    reward = Stages(*networks, training.count_fives, config, training.mesh_of()).reward(
        rollout, training.make_prompts(3)
    )
    test_turns_training.check_reward(rollout, reward)


def first_observed_tokens_count_as_sampled(patch: pytest.MonkeyPatch) -> None:
    """Mask: it is one token on where an answer begins."""
    sound = speculative.write_back

    def one_on(record: Rollout, state: RoundState, *, live: bool = False) -> Rollout:
        record = sound(record, state, live=live)
        assert record.sampled is not None
        written = jnp.arange(BUDGET)[None] < record.lengths[:, None]
        before = jnp.pad(record.sampled[:, :-1], ((0, 0), (1, 0)))
        return replace(record, sampled=record.sampled | (before & written))

    patch.setattr(speculative, "write_back", one_on)


def training_ignores_the_mask(patch: pytest.MonkeyPatch) -> None:
    """Mask: all tokens of a completion train."""

    def unmasked(prompts: Any, rollout: Rollout, reward: Array) -> Any:
        return join_completions(prompts, replace(rollout, sampled=None), reward)

    patch.setattr(test_turns, "join_completions", unmasked)


def answers_are_cached_one_position_on(patch: pytest.MonkeyPatch) -> None:
    """Cache: keys and values of an answer, and their positions, are one too far."""
    sound = append.append

    def one_on(decoding: Any, state: RoundState, tokens: Array, count: Array) -> RoundState:
        after = sound(decoding, replace(state, prompt=state.prompt + 1), tokens, count)
        return replace(after, prompt=state.prompt)

    patch.setattr(append, "append", one_on)


def features_of_answers_are_one_on(patch: pytest.MonkeyPatch) -> None:
    """Draft: each observed token goes with the features of the token after it."""
    sound = FeatureDrafter.append

    def one_on(self: Any, params: Any, state: HeadState, features: Array, *others: Array) -> HeadState:
        return sound(self, params, state, jnp.roll(features, -1, axis=1), *others)

    patch.setattr(FeatureDrafter, "append", one_on)


def idle_rows_lose_their_draft_state(patch: pytest.MonkeyPatch) -> None:
    """Draft: a round forgets what a row that waits for its environment had to cache."""
    sound = FeatureDrafter.observe

    def forgets(self: Any, state: HeadState, features: Array, tokens: Array, emitted: Array) -> HeadState:
        return sound(self, state, features, tokens, emitted)._replace(waiting=emitted)

    patch.setattr(FeatureDrafter, "observe", forgets)


def only_the_last_turn_is_rewarded(patch: pytest.MonkeyPatch) -> None:
    """Returns: the reward of a turn takes the place of the ones before."""
    sound = append.apply_answers

    def last(decoding: Any, state: RoundState, seen: Any, ready: Array) -> RoundState:
        assert state.turns is not None
        before = jnp.where(ready, 0.0, state.turns.returns)
        return sound(decoding, replace(state, turns=replace(state.turns, returns=before)), seen, ready)

    patch.setattr(append, "apply_answers", last)


def costs_end_at_observed_tokens(patch: pytest.MonkeyPatch) -> None:
    """Returns: the cost of the last of three tokens does not reach the first one through an observed one."""
    sound = test_turns_training.token_advantages

    def cut(reward: Array, cost: Array, completion: Array) -> Array:
        return sound(reward, cost.at[:, 0].add(jnp.where(completion[:, 1], 0.0, -cost[:, 2])), completion)

    patch.setattr(test_turns_training, "token_advantages", cut)


def environments_give_no_reward(patch: pytest.MonkeyPatch) -> None:
    """Returns: the reward of a step is the scorer's only."""

    def without(reward: RewardFn) -> RewardFn:
        return lambda rollout, prompts: finite_or_failed(reward(rollout, prompts))

    patch.setattr(stages, "with_returns", without)


# Proof, fault, and what the proof says of it.
PLANTS = [
    (prove_rollout, first_observed_tokens_count_as_sampled, "diff: True != False"),
    (test_turns.test_observed_tokens_are_no_completion, training_ignores_the_mask, "diff: True != False"),
    (prove_rollout, answers_are_cached_one_position_on, "At index 8 diff: "),
    (prove_caches, features_of_answers_are_one_on, "row 1, draft cache 0: k of 0 .. 1: differ"),
    (prove_caches, idle_rows_lose_their_draft_state, "the draft's 0 cached and 0 waiting positions: 3 are visible"),
    (prove_rollout, only_the_last_turn_is_rewarded, "DESIRED: 3.0"),
    (test_turns_training.test_costs_pass_through_observed_tokens, costs_end_at_observed_tokens, "Mismatched elements"),
    (prove_reward, environments_give_no_reward, "Mismatched elements"),
]


@pytest.mark.parametrize(("prove", "plant", "says"), PLANTS, ids=[plant.__name__ for _, plant, _ in PLANTS])
def test_a_planted_fault_is_detected(
    prove: Callable[[], None], plant: Callable[[pytest.MonkeyPatch], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=says):
        prove()


def test_without_a_planted_fault_the_reward_is_proved() -> None:
    """The other proofs are tests of their own."""
    prove_reward()
