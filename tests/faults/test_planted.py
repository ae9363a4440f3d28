"""Two faults for each verifier, planted in keys, queue or cache. The public assertions detect each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

from specjax.keys import Purpose, SeedStep, gumbels, sequence_keys
from specjax.rollout import admission, speculative
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import RoundState
from specjax.testing import PolicyDrafter, assert_lossless, assert_same_rollout, tiny_policy
from specjax.types import Params, Prompts
from specjax.verify import VERIFIERS, Noise, VerifierName, law

POLICY, WEIGHTS = tiny_policy(vocab_size=3)
DRAFTER, PARAMS = PolicyDrafter(POLICY), Params(WEIGHTS, {"scale": jnp.float32(0.4)})
PROMPTS = Prompts(
    tokens=jnp.array([[1, 0, 2], [2, 1, 0], [0, 2, 2]], jnp.int32),
    lengths=jnp.array([3, 1, 2], jnp.int32),
    id=jnp.array([7, 3, 5], jnp.int32),
)
DRAFTING = RolloutConfig(draft_length=2, stop_tokens=(2,))
# 2,048 sequences wait for 1,024 slots; 12 wait for 8, and then the batch shrinks to 3.
MANY = replace(DRAFTING, group_size=2048, max_new_tokens=5, phases=((1024, 6),), admit=256)
FEW = replace(DRAFTING, group_size=4, max_new_tokens=12, verifier="coupled", phases=((8, 15), (3, 15)))


def prove(verifier: VerifierName) -> None:
    """Run the proof for the verifier: of the law, or with `coupled` of the tokens."""
    if verifier == "coupled":
        assert_same_rollout(POLICY, DRAFTER, PARAMS, PROMPTS, FEW)
    else:
        assert_lossless(POLICY, DRAFTER, PARAMS, replace(MANY, verifier=verifier), draws=2**16, total_variation=0.03)


NoiseOf = Callable[[Array, Array, int, int], Noise]


def plant_noise(patch: pytest.MonkeyPatch, verifier: VerifierName, faulty: Callable[[NoiseOf], NoiseOf]) -> None:
    """Replace the function with which the verifier draws noise."""
    sound = VERIFIERS[verifier]
    patch.setitem(VERIFIERS, verifier, replace(sound, noise=faulty(sound.noise)))


def rounds_reuse_noise(patch: pytest.MonkeyPatch) -> None:
    """Keys: the noise of a round does not depend on its start position, except for the first token."""
    plant_noise(patch, "rejection", lambda noise: lambda keys, at, k, vocab: noise(keys, 0 * at if k else at, k, vocab))


def admitted_rows_take_the_keys_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """Queue: keys follow the row of a batch, not the sample."""

    def by_row(run: SeedStep, ids: Array, samples: Array) -> Array:
        return sequence_keys(run, ids, jnp.arange(len(samples)))

    patch.setattr(admission, "sequence_keys", by_row)


def caches_are_too_short(patch: pytest.MonkeyPatch) -> None:
    """Cache: no space for drafted tokens after the budget, so that their writes are clamped to earlier positions."""
    start_rows = speculative.start_rows

    def shorter(*args: Any) -> RoundState:
        *others, length = args
        return start_rows(*others, length - MANY.slack)

    patch.setattr(speculative, "start_rows", shorter)


def residual_with_draft_noise(patch: pytest.MonkeyPatch) -> None:
    """Keys: the token after a rejection uses the same noise as the rejected draft."""

    def same(keys: Array, at: Array, purpose: Purpose, count: int) -> Array:
        return gumbels(keys, at, Purpose.DRAFT if purpose == Purpose.RESIDUAL else purpose, count)

    patch.setattr(law, "gumbels", same)


def shrinking_leaves_the_caches(patch: pytest.MonkeyPatch) -> None:
    """Cache: active rows move to the first slots without their keys and values."""
    compact = speculative.compact

    def without_cache(state: RoundState, slots: int) -> RoundState:
        return replace(compact(state, slots), cache=jax.tree.map(lambda x: x[:slots], state.cache))

    patch.setattr(speculative, "compact", without_cache)


def positions_count_drafts(patch: pytest.MonkeyPatch) -> None:
    """Keys: coupled noise counts positions as if all drafted tokens were accepted."""
    plant_noise(patch, "coupled", lambda noise: lambda keys, at, k, vocab: noise(keys, at * (k + 1), k, vocab))


PLANTS = [
    ("rejection", rounds_reuse_noise),
    ("rejection", admitted_rows_take_the_keys_of_the_first),
    ("block", caches_are_too_short),
    ("block", residual_with_draft_noise),
    ("coupled", shrinking_leaves_the_caches),
    ("coupled", positions_count_drafts),
]


@pytest.mark.parametrize(("verifier", "plant"), PLANTS, ids=[f"{name}-{plant.__name__}" for name, plant in PLANTS])
def test_a_planted_fault_is_detected(
    verifier: VerifierName, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not lossless|not the same tokens|Mismatched elements"):
        prove(verifier)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_without_a_planted_fault_the_proof_holds(verifier: VerifierName) -> None:
    prove(verifier)
