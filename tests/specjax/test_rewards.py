import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.rewards import HostReward, HostScore, finite_or_failed, host_reward
from specjax.train.advantage import zero_variance
from specjax.train.metrics import reward_metrics
from specjax.types import Prompts, Reward, Rollout
from tests.specjax.training import mesh_of

PROMPTS, GROUP, BUDGET = 16, 2, 5
MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (2, 1, 2, 2)]


class Recorder:
    """A scorer that records its requests. Its score identifies row, length and prompt."""

    def __init__(self, pause: float = 0.0) -> None:
        self.calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.pause, self.inside, self.most_inside = pause, 0, 0
        self._lock = threading.Lock()

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            self.calls.append((tokens, lengths, ids))
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        time.sleep(self.pause)
        with self._lock:
            self.inside -= 1
        value = (tokens.sum(axis=1) + 1000 * lengths + 100_000 * ids).astype(np.float32)
        return value, (ids % 2).astype(np.float32)


def job(mesh: Mesh, budget: int = BUDGET) -> tuple[Rollout, Prompts]:
    rng = np.random.default_rng(0)
    rows = PROMPTS * GROUP
    rollout = Rollout(
        tokens=jnp.array(rng.integers(0, 50, (rows, budget)), jnp.int32),
        lengths=jnp.array(rng.integers(0, 6, rows), jnp.int32),
    )
    prompts = Prompts(
        tokens=jnp.zeros((PROMPTS, 3), jnp.int32),
        lengths=jnp.ones(PROMPTS, jnp.int32),
        id=jnp.array(rng.permutation(PROMPTS), jnp.int32),
    )
    return jax.device_put((rollout, prompts), NamedSharding(mesh, P(BATCH_AXES)))


def ask(score: HostScore, mesh: Mesh, budget: int = BUDGET) -> tuple[Reward, Rollout, Prompts]:
    rollout, prompts = job(mesh, budget)
    with jax.set_mesh(mesh):
        reward = jax.jit(host_reward(score, mesh))(rollout, prompts)
    return jax.block_until_ready(reward), rollout, prompts


def expected(rollout: Rollout, prompts: Prompts) -> np.ndarray:
    ids = np.repeat(np.asarray(prompts.id), GROUP)
    return np.asarray(rollout.tokens).sum(axis=1) + 1000 * np.asarray(rollout.lengths) + 100_000 * ids


@pytest.mark.parametrize("shape", MESHES)
def test_every_sample_is_scored_once_and_its_score_comes_back_to_it(shape: tuple[int, int, int]) -> None:
    mesh, score = mesh_of(*shape), Recorder()
    reward, rollout, prompts = ask(score, mesh)
    np.testing.assert_array_equal(reward.value, expected(rollout, prompts))
    np.testing.assert_array_equal(reward.correct, np.repeat(np.asarray(prompts.id), GROUP) % 2)
    shards = batch_shards(mesh)
    assert len(score.calls) == shards
    assert all(len(ids) == PROMPTS * GROUP // shards for _, _, ids in score.calls)
    assert all(type(x) is np.ndarray and x.dtype == np.int32 for call in score.calls for x in call)
    asked = np.concatenate([np.column_stack([ids, tokens]) for tokens, _, ids in score.calls])
    wanted = np.column_stack([np.repeat(np.asarray(prompts.id), GROUP), np.asarray(rollout.tokens)])
    np.testing.assert_array_equal(np.unique(asked, axis=0), np.unique(wanted, axis=0))
    # A host reward scores finished rollouts in the same way, at once.
    score = Recorder()
    by_host = HostReward(score)(rollout, prompts)
    np.testing.assert_array_equal(by_host.value, reward.value)
    np.testing.assert_array_equal(by_host.correct, reward.correct)
    assert [len(x) for call in score.calls for x in call] == [PROMPTS * GROUP] * 3
    both = HostReward(lambda *arrays: (*score(*arrays), np.zeros((len(arrays[1]), 2), np.float32)), ("once", "twice"))
    assert (both(rollout, prompts).parts or {}).keys() == {"once", "twice"}
    failed = HostReward(lambda *_: 1 / 0)(rollout, prompts)  # pyright: ignore[reportArgumentType]
    assert np.isnan(failed.value).all() and not np.any(failed.correct)


@pytest.mark.parametrize("value", [1e39, -1e39, np.inf, np.nan])
def test_row_73_a_reward_that_float32_cannot_hold_is_failed_and_not_correct(value: float) -> None:
    rollout, prompts = job(mesh_of(1, 1, 1))

    def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(ids == 3, value, 1.0), np.ones(len(ids))

    host = HostReward(score)(rollout, prompts)
    traced = finite_or_failed(Reward(jnp.where(prompts.id == 3, jnp.inf, 1.0), jnp.ones(PROMPTS)))
    for reward, ids in ((host, np.repeat(np.asarray(prompts.id), GROUP)), (traced, np.asarray(prompts.id))):
        np.testing.assert_array_equal(np.isnan(reward.value), ids == 3)
        np.testing.assert_array_equal(reward.correct, ids != 3)
        assert reward.value.dtype == reward.correct.dtype == np.float32


def test_every_device_gets_the_same_scores() -> None:
    def fickle(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.random.default_rng().random(len(ids), np.float32), np.zeros(len(ids), np.float32)

    reward, *_ = ask(fickle, mesh_of(2, 2, 2))
    heard: dict[str, set[bytes]] = {}
    for shard in reward.value.addressable_shards:
        heard.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert len(heard) == 4 and all(len(answers) == 1 for answers in heard.values())


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_failures_are_counted_and_components_are_returned_by_name(shape: tuple[int, int, int]) -> None:
    def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        value = np.where(np.isin(ids, (3, 11)), np.nan, ids).astype(np.float32)
        return value, (ids > 0).astype(np.float32), np.stack([value, 2 * value], axis=1)

    mesh = mesh_of(*shape)
    rollout, prompts = job(mesh)
    with jax.set_mesh(mesh):
        reward = jax.jit(host_reward(score, mesh, ("once", "twice")))(rollout, prompts)
    np.testing.assert_array_equal(np.isnan(reward.value), np.isin(np.repeat(np.asarray(prompts.id), GROUP), (3, 11)))
    assert reward.parts is not None and list(reward.parts) == ["once", "twice"]
    for name, factor in (("once", 1), ("twice", 2)):
        np.testing.assert_array_equal(reward.parts[name], factor * np.asarray(reward.value))
    here = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), reward)
    told = zero_variance(here.value, GROUP), jnp.isfinite(here.value), jnp.zeros(len(here.value))
    metrics = reward_metrics(here, *told)
    assert metrics["reward/failed"] == 4 and np.isfinite(metrics["reward/mean"])
    assert metrics["reward/once"] == metrics["reward/mean"] and metrics["reward/twice"] == 2 * metrics["reward/mean"]


def raises(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    raise RuntimeError("no answer today")


def misshapen(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(ids) + 1, np.float32), np.zeros(len(ids), np.float32)


@pytest.mark.parametrize(("score", "shape"), [(raises, (1, 1, 1)), (misshapen, (1, 1, 1)), (raises, (2, 2, 2))])
def test_a_broken_scorer_loses_only_its_samples_and_is_logged(score, shape, caplog: pytest.LogCaptureFixture) -> None:
    reward, *_ = ask(score, mesh_of(*shape))
    assert np.isnan(reward.value).all() and not np.asarray(reward.correct).any()
    assert caplog.text.count("the scorer failed") == batch_shards(mesh_of(*shape))


def test_shards_may_ask_at_once_of_long_completions() -> None:
    score = Recorder(pause=0.3)
    reward, rollout, prompts = ask(score, mesh_of(8, 1, 1), budget=100_000)
    np.testing.assert_array_equal(reward.value, expected(rollout, prompts).astype(np.float32))
    assert score.most_inside > 1
