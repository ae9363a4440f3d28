"""examples/one_file.py and the library give the same tokens, log-probs, rounds, gradients and updates."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import one_file
from specjax.keys import seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.train.batch import TrainBatch
from specjax.train.config import TrainConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.train.optimizer import OptimizerConfig
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Params, Prompts, PyTree, Reward, Rollout
from tests.specjax.training import is_adam, make_prompts, mesh_of, networks, params_on

FILE = Path(one_file.__file__)
GROUP, BUDGET, STOPS, TEMPERATURE = 3, 10, (3, 7), 0.9
PROMPTS = make_prompts(6)
LAW = SamplingLaw(TEMPERATURE)


@pytest.fixture(autouse=True)
def default_promotion() -> Iterator[None]:
    """Use jax's default promotion, for which the file is written."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@cache
def params() -> Params:
    return params_on(mesh_of())


def renamed(tree: PyTree) -> PyTree:
    """Return the library's parameters in the file's structure."""
    if not isinstance(tree, dict):
        return tree
    if tree.keys() <= {"kernel", "scale", "embedding"}:
        return next(iter(tree.values()))
    layers = [renamed(tree[name]) for name in sorted(tree) if name.startswith("layer_")]
    others = {name: renamed(part) for name, part in tree.items() if not name.startswith("layer_")}
    return others | ({"layers": layers} if layers else {})


def both(networks: Params) -> dict[str, PyTree]:
    return {"policy": renamed(networks.policy), "draft": renamed(networks.draft)}


def config(draft_length: int, coupled: bool) -> one_file.Config:
    return one_file.Config(draft_length, coupled, TEMPERATURE, BUDGET, STOPS, GROUP)


def step_key() -> jax.Array:
    """Return the file's key for seed 3 and step 5."""
    return jax.random.fold_in(jax.random.key(3), 5)


def samples() -> tuple[jax.Array, ...]:
    """Return the prompts in the file's format, repeated for each sample."""
    repeated = [jnp.repeat(x, GROUP, axis=0) for x in (PROMPTS.tokens, PROMPTS.lengths, PROMPTS.id)]
    return *repeated, jnp.tile(jnp.arange(GROUP), len(PROMPTS.id))


@cache
def rows(draft_length: int, coupled: bool) -> one_file.Row:
    """Return the rows that the file generates with seed 3 at step 5."""
    generate = jax.jit(one_file.generate, static_argnums=0)
    return generate(config(draft_length, coupled), step_key(), both(params()), samples())


def options(draft_length: int, coupled: bool) -> RolloutConfig:
    return RolloutConfig(
        group_size=GROUP,
        max_new_tokens=BUDGET,
        draft_length=draft_length,
        verifier="coupled" if coupled else "rejection",
        law=LAW,
        stop_tokens=STOPS,
    )


@cache
def rollout(draft_length: int, coupled: bool) -> Rollout:
    """Return the library's rollout with the same seed at the same step."""
    generate = partial(speculative_rollout, *networks(), config=options(draft_length, coupled))
    return jax.jit(generate)(params(), PROMPTS, seed_step(3, 5))


def completions(values: jax.Array, rows: one_file.Row) -> np.ndarray:
    """Return the values at the completion tokens, [R, C], and 0 after them."""
    column = np.arange(BUDGET)
    found = np.take_along_axis(np.asarray(values), np.asarray(rows.prompt)[:, None] + column, axis=1)
    return np.where(column < np.asarray(rows.length - rows.prompt)[:, None], found, 0)


def assert_same(ours: one_file.Row, theirs: Rollout) -> None:
    np.testing.assert_array_equal(ours.length - ours.prompt, theirs.lengths)
    np.testing.assert_array_equal(completions(ours.tokens, ours), theirs.tokens)
    np.testing.assert_allclose(completions(ours.log_probs, ours), np.asarray(theirs.full), atol=1e-5)


def test_it_stands_alone_and_is_short():
    source = FILE.read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {name for node in imports for name in ([getattr(node, "module", None)] + [x.name for x in node.names])}
    assert not any(str(name).split(".")[0] in ("specjax", "models", "launch", "configs") for name in modules)
    assert len(source.splitlines()) <= 300


@pytest.mark.parametrize("draft_length", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_coupled_tokens_and_rounds_equal_the_librarys(draft_length: int):
    ours, theirs = rows(draft_length, True), rollout(draft_length, True)
    assert_same(ours, theirs)
    np.testing.assert_array_equal(ours.rounds, theirs.row_rounds)
    accepted, drafted = (np.asarray(x).sum() for x in (theirs.accepted, theirs.drafted))
    assert {1, BUDGET} < set(np.asarray(theirs.lengths).tolist()) and 0 < accepted < drafted


def test_coupled_tokens_equal_those_of_plain_decoding():
    assert_same(rows(0, True), rollout(3, True))


def test_rejection_tokens_and_rounds_equal_the_librarys():
    """This implies equal drafts, uniforms and residuals: otherwise tokens would differ soon."""
    ours, theirs = rows(2, False), rollout(2, False)
    assert_same(ours, theirs)
    np.testing.assert_array_equal(ours.rounds, theirs.row_rounds)


@pytest.mark.slow
def test_gradients_are_the_librarys():
    generated, rng = rows(3, True), np.random.default_rng(0)
    # As if an older policy had generated the tokens, so that ratios lie on both sides of the clip.
    old = generated.log_probs + jnp.asarray(rng.normal(scale=0.3, size=generated.tokens.shape), jnp.float32)
    advantage = jnp.asarray(rng.normal(size=len(generated.tokens)), jnp.float32)
    gradient = jax.jit(jax.grad(one_file.loss, argnums=1), static_argnums=0)
    ours = gradient(config(3, True), both(params()), generated._replace(log_probs=old), advantage)

    completion = jax.vmap(one_file.Row.counts, (0, None))(generated, jnp.arange(generated.tokens.shape[1]))
    batch = TrainBatch(
        tokens=generated.tokens,
        completion=completion,
        reward=jnp.zeros_like(advantage),
        counted=jnp.ones_like(advantage, bool),
        mu=old,
        old=old,
        advantage=jnp.where(completion, advantage[:, None], 0.0),
    )
    policy, drafter = networks(unroll=3)
    theirs, sums = jax.jit(partial(accumulate, LossContext(policy, drafter, LAW)))(params(), batch)
    assert 0.1 < sums.policy.metrics["clip_fraction"] / sums.policy.tokens < 0.9
    jax.tree.map_with_path(assert_close, ours, both(theirs))


def score(values: jax.Array) -> jax.Array:
    """Return a reward that depends on the completion length and is equal within some groups."""
    return jnp.minimum(values, 3) * (3 / 7)


def test_a_step_equals_the_librarys(monkeypatch: pytest.MonkeyPatch):
    """Compare rollout, reward, advantages, gradients and optimiser states."""
    monkeypatch.setattr(one_file, "count_upwards", lambda row: score(row.length - row.prompt))
    before, step = both(params()), jax.jit(one_file.train_step.__wrapped__, static_argnums=0)
    after, moments, results = step(config(2, False), step_key(), before, one_file.OPTIMIZER.init(before), samples())

    mesh, adam = mesh_of(), OptimizerConfig(learning_rate=1e-3, clip_norm=1e9)
    train = TrainConfig(seed=3, rollout=options(2, False), policy_optimizer=adam, draft_optimizer=adam)
    train = replace(train, draft_training=DraftTrainingConfig(anchors=0))
    state = replace(init_train_state(params_on(mesh), train, mesh), step=jnp.int32(5))

    def reward_fn(rollout: Rollout, prompts: Prompts) -> Reward:
        return Reward(score(rollout.lengths), score(rollout.lengths))

    state, _, metrics = make_train_step(*networks(unroll=3), reward_fn, train, mesh)(state, PROMPTS)
    assert 0 < metrics["groups/zero_variance"] < len(PROMPTS.id)
    expected = [metrics[name] for name in ("reward/mean", "rollout/acceptance_length")]
    np.testing.assert_allclose(results, expected, rtol=1e-6)
    for name in ("mu", "nu"):
        theirs = both(Params(*(moment(x, name) for x in (state.optimizer.policy, state.optimizer.draft))))
        jax.tree.map_with_path(partial(assert_close, limit=1e-4), getattr(moments[0], name), theirs)
    # Adam divides a gradient by its size, so rounding decides the update where the gradient is almost zero.
    jax.tree.map_with_path(partial(assert_close, limit=1e-3), after, both(state.params))


def moment(optimizer: PyTree, name: str) -> PyTree:
    (adam,) = [x for x in jax.tree.leaves(optimizer, is_leaf=is_adam) if is_adam(x)]
    return getattr(adam, name)


def assert_close(path: tuple, ours: jax.Array, theirs: jax.Array, limit: float = 1e-5) -> None:
    gap = np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) / np.linalg.norm(theirs)
    assert gap < limit, (jax.tree_util.keystr(path), gap)


def test_rejection_follows_the_policy():
    """The first tokens of a million rounds follow the policy's law, within five standard deviations."""
    rounds, k, vocab, rng = 1_000_000, 2, 5, np.random.default_rng(0)
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(k + 1, vocab)), jnp.float32))
    log_q = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(k, vocab)), jnp.float32))

    def first_token(key: jax.Array) -> jax.Array:
        noise = one_file.gumbels(key, 0, one_file.DRAFT, k * vocab).reshape(k, vocab)
        draft = jnp.argmax(log_q + noise, axis=1)
        accepted, token = one_file.verify_rejection(key, 0, log_p, log_q, draft)
        return jnp.where(accepted > 0, draft[0], token)

    keys = jnp.asarray(rng.integers(2**32, size=(rounds, 2), dtype=np.uint32))
    counts = np.bincount(jax.jit(jax.vmap(first_token))(keys), minlength=vocab)
    p = np.exp(np.asarray(log_p[0], np.float64))
    assert np.all(np.abs(counts - rounds * p) < 5 * np.sqrt(rounds * p * (1 - p)))


@pytest.mark.slow
def test_it_learns_and_checks_itself():
    # As a user runs it, without the flags of tests/conftest.py.
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run([sys.executable, FILE], env=own, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "all checks passed" in ended.stdout
