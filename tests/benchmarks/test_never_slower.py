"""The benchmark's n-gram draft is lossless and honest about itself, and its cells count what they say."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bigram import BigramDrafter
from benchmarks.networks import VOCAB, small
from benchmarks.never_slower import MESH, Job, measure
from launch.build import Networks
from specjax.drafters import NoDrafter
from specjax.keys import seed_step
from specjax.plan import ChosenConfig, RolloutConfig
from specjax.rollout import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, Prompts, Rollout
from tests.tiny import WANDERING as WORLD
from tests.tiny import light_jit

RUN, BUDGET = seed_step(3, 5), 24


def replayed(prompt: list[int], completion: list[int], k: int) -> list[int]:
    """How often position 1 .. k of a proposal is accepted in a row of these tokens."""
    accepted, at, row = [0] * k, len(prompt) + 1, prompt + completion
    while at < len(row):
        following = {token: after for token, after in zip(row[: at - 1], row[1:at], strict=True)}
        proposed, kept = row[at - 1], 0
        for i in range(k):
            proposed = following.get(proposed, proposed)
            if at + i == len(row) or proposed != row[at + i]:
                break
            kept += 1
            accepted[i] += 1
        at += kept + 1
    return accepted


def test_bigrams_change_no_token_and_are_what_followed_before():
    """Even where drafting begins late, behind a token that the draft never saw."""
    options = RolloutConfig(group_size=4, max_new_tokens=BUDGET, verifier="coupled", draft_lengths=(0, 2))
    plain = RolloutConfig(group_size=4, max_new_tokens=BUDGET, verifier="coupled", draft_length=0)
    params = WORLD.params("none")
    plainly = light_jit(partial(speculative_rollout, WORLD.policy, NoDrafter(), config=plain))
    expected = plainly(params, WORLD.batch, RUN)

    @light_jit
    def program(params: Params, prompts: Prompts, chosen: jax.Array) -> Rollout:
        config = ChosenConfig(**vars(options) | dict(phases=((24, 12), (24, 99))), chosen=chosen)
        return speculative_rollout(WORLD.policy, BigramDrafter(WORLD.vocab), params, prompts, RUN, config)

    late, whole = (program(params, WORLD.batch, jnp.array(chosen)) for chosen in ([0, 1], [1, 1]))
    for rollout in (late, whole):
        np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    assert 0 < np.asarray(late.drafted).sum() < np.asarray(whole.drafted).sum()
    rows = np.asarray(expected.tokens).tolist()
    counted = [replayed(list(WORLD.prompts[i // 4]), row, 2) for i, row in enumerate(rows)]
    assert np.sum(counted) > 10
    np.testing.assert_array_equal(whole.accepted, counted)


def test_the_overlap_is_the_probability_of_what_would_be_proposed():
    tokens = np.random.default_rng(0).integers(0, 4, (2, 12)).astype(np.int32)
    logits = np.random.default_rng(1).normal(size=(2, 12, 4)).astype(np.float32)
    mask = np.arange(12)[None] >= np.array([[3], [5]])
    probabilities = np.asarray(jax.nn.softmax(logits))
    expected = np.zeros((2, 12))
    for row in range(2):
        table = list(range(4))
        for t in range(11):
            expected[row, t + 1] = mask[row, t + 1] * probabilities[row, t, table[tokens[row, t]]]
            table[tokens[row, t]] = tokens[row, t + 1]
    none = jnp.zeros((2, 12, 1))
    output = PolicyOutput(jnp.asarray(logits), none, none, None)
    loss = BigramDrafter(4).loss(Params({}, {}), jnp.asarray(tokens), output, jnp.asarray(mask), SamplingLaw())
    np.testing.assert_allclose(loss.overlap, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_cell_has_every_step_by_every_draft_length():
    random = small(1, MESH)
    networks = Networks(random.decoder, random.policy, BigramDrafter(VOCAB), Params(random.params.policy, {}))
    cell = measure(Job(networks, slots=2, budget=4, draft_lengths=(0, 2)), networks.params, steps=3, repeats=2)
    assert {name: len(seconds) for name, seconds in cell.seconds.items()} == {"0": 3, "2": 3, "auto": 3}
    assert cell.chosen[0] == 0 and len(cell.chosen) == len(cell.alpha) == 3 and cell.best in ("0", "2")
    assert cell.over("auto") == [1.0, 1.0, 1.0]
