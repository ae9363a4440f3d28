"""Rollouts with an environment on the host: equal to those with the same environment in JAX, whatever comes when."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.environments import Answer, at_once
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.conversations import Conversations, Rows
from specjax.rollout.make_generate import make_generate
from specjax.testing import CacheCheck
from specjax.types import Ending, Rollout
from tests.specjax.sums import HostSums, Sums, SumsEpisode
from tests.specjax.test_turns import BASE, RUN
from tests.tiny import WANDERING

RULE = Sums(WANDERING.vocab)
FIELDS = "tokens", "lengths", "law", "full", "writer", "sampled", "ending", "turns", "stopped", "accepted", "row_rounds"


def generate(environment: Any, drafter: str, draft: str, *, shards: int = 1, **options: Any) -> tuple[Rollout, Any]:
    config = replace(BASE, environment=environment, **options)
    mesh = make_mesh(MeshConfig(data=shards))
    run = make_generate(WANDERING.policy, WANDERING.drafters[drafter], config, mesh)
    return run(WANDERING.params(draft), WANDERING.batch, RUN), run


def assert_equal(rollout: Rollout, expected: Rollout) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(rollout.returns, expected.returns)


@pytest.fixture(scope="module")
def traced() -> Rollout:
    return generate(RULE, "eagle3", "random", draft_length=3)[0]


@pytest.mark.parametrize("seed, admit, shards", [(1, 1, 1), (2, 7, 1), (3, 0, 2)])
def test_answers_in_any_order_give_the_same_rollout(traced: Rollout, seed: int, admit: int, shards: int):
    environment = HostSums(RULE, WANDERING.batch, seed)
    rollout, _ = generate(environment, "eagle3", "random", draft_length=3, admit=admit, shards=shards)
    assert_equal(rollout, traced)
    ids = WANDERING.batch.id.tolist()
    assert sorted(environment.ended) == sorted(ids * BASE.group_size)
    assert sorted(problem for problem, _ in environment.turns) == sorted(environment.ended)


def test_nothing_compiles_after_the_first_rollout():
    environment = HostSums(RULE, WANDERING.batch)
    first, run = generate(environment, "none", "none")
    with jax.log_compiles(False), jax.transfer_guard("allow"):
        before = [len(program.compiled) for program in run._programs.values()]
        traces = [program._jitted._cache_size() for program in run._programs.values()]
        again = run(WANDERING.params("none"), WANDERING.batch, RUN)
        assert [program._jitted._cache_size() for program in run._programs.values()] == traces == [1] * len(traces)
        assert [len(program.compiled) for program in run._programs.values()] == before
    assert_equal(again, first)


def test_programs_compiled_ahead_are_called():
    environment = HostSums(RULE, WANDERING.batch)
    config = replace(BASE, environment=environment)
    run = make_generate(WANDERING.policy, WANDERING.drafters["none"], config, make_mesh(MeshConfig()))
    run.start_compiling(WANDERING.params("none"), WANDERING.batch)
    rollout = run(WANDERING.params("none"), WANDERING.batch, RUN)
    assert [len(program.compiled) for program in run._programs.values()] == [1] * 4
    assert_equal(rollout, generate(RULE, "none", "none")[0])


def test_ends_add_to_the_returns_and_times_to_the_rollout():
    environment = HostSums(RULE, WANDERING.batch, last=0.5)
    rollout, run = generate(environment, "none", "none")
    expected, _ = generate(RULE, "none", "none")
    np.testing.assert_array_equal(rollout.returns, np.asarray(expected.returns) + 0.5)
    assert set(run.seconds) == {"time/tools", "time/waiting", "time/decoding"} and min(run.seconds.values()) >= 0


class OneAnswer:
    """An environment whose episodes all give one answer."""

    width = 4

    def __init__(self, answer: Answer, last: float = 0.0) -> None:
        self._answer, self._last = answer, last

    def begin(self, problem: int, seed: int) -> "OneAnswer":
        return self

    def step(self, turn: Sequence[int]) -> Future[Answer]:
        return at_once(self._answer)

    def end(self) -> Future[float]:
        return at_once(self._last)


@pytest.mark.parametrize(
    "answer", [Answer([0] * 5), Answer([7]), Answer([-1]), Answer([1], float("nan")), Answer(reward=float("inf"))]
)
def test_an_answer_that_no_sequence_can_take_is_a_failure(answer: Answer, caplog: pytest.LogCaptureFixture):
    rows = Rows(*(np.array([each]) for each in (False, True, 0, 2)), np.array([[3, 4, 0]]))
    with Conversations(OneAnswer(answer), np.array([5]), np.zeros((1, 2), np.uint32), 7, 1) as conversations:
        assert conversations.answers(rows) == {0: Answer(ending=Ending.FAILED)}
    assert "environment: an answer" in caplog.text


def test_filler_prompts_have_no_episodes():
    ids = WANDERING.batch.id
    padded = replace(WANDERING.batch, id=jnp.where(jnp.arange(len(ids)) == 1, -1, ids))
    environment = HostSums(RULE, WANDERING.batch)
    config = replace(BASE, environment=environment)
    run = make_generate(WANDERING.policy, WANDERING.drafters["none"], config, make_mesh(MeshConfig()))
    rollout = run(WANDERING.params("none"), padded, RUN)
    filler = np.repeat(np.asarray(padded.id) < 0, BASE.group_size)
    assert len(environment.ended) == np.sum(~filler)
    assert set(np.asarray(rollout.ending)[filler].tolist()) <= {Ending.STOP, Ending.LENGTH}


def test_an_exception_ends_the_episodes(monkeypatch: pytest.MonkeyPatch):
    environment = HostSums(RULE, WANDERING.batch)
    monkeypatch.setattr(SumsEpisode, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(environment, "none", "none")
    assert len(environment.ended) == len(WANDERING.batch.id) * BASE.group_size


def test_rollout_functions_and_phases_are_refused():
    config = replace(BASE, environment=HostSums(RULE, WANDERING.batch))
    with pytest.raises(ValueError, match=r"^rollout_fn: must be speculative_rollout"):
        make_generate(WANDERING.policy, WANDERING.drafters["none"], config, make_mesh(MeshConfig()), lambda *_: None)
    with pytest.raises(ValueError, match=r"^phases = .*: must be empty"):
        replace(config, phases=((4, 20),))
    with pytest.raises(ValueError, match=r"^environment: answers on the host"):
        WANDERING.rollout("none", "none", config, RUN)


@pytest.mark.parametrize(
    "drafter, draft, k",
    [
        ("eagle3", "random", 3),
        pytest.param("mtp", "random mtp", 2, marks=pytest.mark.slow),
        pytest.param("dflash", "random dflash", 3, marks=pytest.mark.slow),
        ("dspark reduced", "random dspark reduced", 2),
        ("model", "stranger", 2),
        ("either history", "random beside remembered", 3),
    ],
)
def test_caches_after_answers_are_those_of_one_prefill(drafter: str, draft: str, k: int):
    check_caches(drafter, draft, k)


def check_caches(drafter: str, draft: str, k: int) -> None:
    """Verify that after each answer the caches of all live rows are the ones of a fresh prefill."""
    config = replace(BASE, environment=HostSums(RULE, WANDERING.batch), draft_length=k)
    drafts, params = WANDERING.drafters[drafter], WANDERING.params(draft)
    run = make_generate(WANDERING.policy, drafts, config, make_mesh(MeshConfig()))
    check = CacheCheck(WANDERING.policy, drafts, params, WANDERING.batch, config)
    answer, observed = run._programs["answer"], list[int]()

    def checked(*args: Any) -> Any:
        before = int(jnp.sum(args[1].state.emitted))
        paused = answer(*args)
        observed.append(int(jnp.sum(check(paused.state).emitted)) - before)
        return paused

    run._programs["answer"] = checked
    rollout = run(params, WANDERING.batch, RUN)
    assert sum(observed) == int(jnp.sum(rollout.lengths - rollout.written)) > 20
