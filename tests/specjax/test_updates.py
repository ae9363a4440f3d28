"""Several updates per rollout, with gradients in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.train.batch import Sequences, TrainBatch
from specjax.train.draft.loss import DraftSums
from specjax.train.loss_sums import PolicySums, Sums
from specjax.train.optimizer import OptimizerConfig, make_optimizers
from specjax.train.updates import Report, UpdateConfig, run_updates
from specjax.types import Params

ROWS, RATE = 6, 0.1
OPTIMIZERS = Params(optax.sgd(RATE), optax.sgd(RATE))
REPLAY = Sequences(jnp.arange(2 * ROWS, dtype=jnp.int32).reshape(2, ROWS, 1), jnp.ones((2, ROWS, 1), bool))


def gradients(params: Params, batch: TrainBatch, replay: Sequences | None) -> tuple[Params, Sums]:
    """Return gradients: the policy's towards the minibatch's mean reward, the draft's from the number of tokens.

    Without a reward, the policy's is 0.
    """
    policy = jnp.where(jnp.any(batch.reward != 0), params.policy - jnp.mean(batch.reward), 0.0)
    taught = jnp.sum(batch.tokens) + (0 if replay is None else jnp.sum(replay.tokens))
    one = jnp.float32(1)
    policy_sums = PolicySums(
        **dict.fromkeys(PolicySums._fields, one) | dict(gap_max=params.policy, metrics={"mine": one}, router=None)
    )
    draft_sums = DraftSums(*[one] * 5, expected=jnp.mean(batch.reward), accepted=one)
    return Params(policy, taught.astype(jnp.float32)), Sums(policy_sums, draft_sums)


def batch_of(rewards: list[float]) -> TrainBatch:
    tokens = jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    reward, ones = jnp.array(rewards), jnp.ones((ROWS, 1), bool)
    return TrainBatch(tokens, ones, reward=reward, counted=ones[:, 0], advantage=reward[:, None])


def run(
    config: UpdateConfig, batch: TrainBatch, replay: Sequences | None = None, optimizers: Params = OPTIMIZERS
) -> tuple[Params, Params, Report]:
    start = Params(jnp.float32(1), jnp.float32(0))
    states = Params(optimizers.policy.init(start.policy), optimizers.draft.init(start.draft))
    return jax.jit(lambda *given: run_updates(gradients, optimizers, *given, True, config))(
        start, states, batch, replay
    )


REWARDS = [0.0, 1.0, 2.0, 5.0, -1.0, 3.0]


@pytest.mark.parametrize("minibatches, epochs", [(1, 1), (2, 1), (3, 2), (1, 3)])
def test_every_update_starts_where_the_one_before_ended(minibatches: int, epochs: int) -> None:
    params, _, seen = run(UpdateConfig(minibatches, epochs), batch_of(REWARDS))
    policy, draft, norms, before = 1.0, 0.0, [], []
    for _ in range(epochs):
        for first in range(minibatches):
            gradient, taught = policy - np.mean(REWARDS[first::minibatches]), np.arange(ROWS)[first::minibatches].sum()
            norms.append((abs(gradient), taught))
            before.append(policy)
            policy, draft = policy - RATE * gradient, draft - RATE * taught
    np.testing.assert_allclose([params.policy, params.draft], [policy, draft], rtol=1e-5)
    np.testing.assert_allclose([seen.norms.policy, seen.norms.draft], np.mean(norms, axis=0), rtol=1e-5)
    assert seen.updates == seen.sums.policy.tokens == seen.sums.policy.metrics["mine"] == minibatches * epochs
    np.testing.assert_allclose(seen.sums.policy.gap_max, max(before), rtol=1e-6)
    assert seen.first_update.policy.gap_max == 1
    np.testing.assert_allclose(seen.first_update.draft.expected, np.mean(REWARDS[::minibatches]), rtol=1e-6)
    assert (seen.skipped.policy, seen.skipped.draft) == (0, 0)


def test_each_minibatch_has_its_share_of_the_replay() -> None:
    params, _, _ = run(UpdateConfig(minibatches=3), batch_of(REWARDS), REPLAY)
    np.testing.assert_allclose(params.draft, -RATE * (np.arange(2 * ROWS).sum() + np.arange(ROWS).sum()), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_an_update_that_is_not_finite_or_has_no_gradient_changes_nothing_and_is_counted(bad: float) -> None:
    """It is the second of three minibatches. Parameters and moments are those after the other two."""
    optimizers = make_optimizers(OptimizerConfig(learning_rate=RATE), OptimizerConfig(learning_rate=RATE))
    spoilt = [0.0, bad, 2.0, 5.0, bad, 3.0]
    params, states, seen = jax.jit(lambda batch: run(UpdateConfig(3), batch, optimizers=optimizers))(batch_of(spoilt))
    kept = jax.tree.map(lambda x: jnp.delete(x, jnp.array([1, 4]), axis=0), batch_of(REWARDS))
    expected, moments, _ = run(UpdateConfig(2), kept, optimizers=optimizers)
    np.testing.assert_allclose(params.policy, expected.policy, rtol=1e-6)
    for got, wanted in zip(jax.tree.leaves(states.policy), jax.tree.leaves(moments.policy), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert (seen.skipped.policy, seen.skipped.draft, seen.empty) == ((1, 0, 0) if bad else (0, 0, 1))
    assert np.isfinite(seen.norms.policy) == (not bad) and np.isfinite(seen.norms.draft)


def test_a_loss_that_is_not_finite_skips_only_its_network() -> None:
    def infinite(params: Params, batch: TrainBatch, replay: Sequences | None) -> tuple[Params, Sums]:
        found, sums = gradients(params, batch, replay)
        return found, sums._replace(draft=sums.draft._replace(loss=jnp.float32(jnp.inf)))

    start = Params(jnp.float32(1), jnp.float32(0))
    states = Params(OPTIMIZERS.policy.init(start.policy), OPTIMIZERS.draft.init(start.draft))
    given = start, states, batch_of(REWARDS), None, True, UpdateConfig()
    params, _, seen = run_updates(infinite, OPTIMIZERS, *given)
    assert params.draft == 0 and params.policy != 1
    assert (seen.skipped.policy, seen.skipped.draft) == (0, 1)
    *given, _, config = given
    for resting in (False, jnp.bool(False)):
        assert run_updates(infinite, OPTIMIZERS, *given, resting, config)[2].skipped.draft == 0


def test_options_of_several_updates_are_off_with_one() -> None:
    assert not UpdateConfig().several and UpdateConfig(epochs=2).several and UpdateConfig(minibatches=2).several
