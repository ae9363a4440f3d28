"""Steps from which nothing can be learnt, and metrics without values."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.train
from configs.schema import RolloutOptions, RunConfig
from launch.cli.options import parse_run
from launch.errors import ConfigError
from launch.evaluation.one_prompt import answer_prompt
from launch.run.console import logprob_alarm
from launch.run.learning_checks import ADVANTAGES, LEAST_GROUPS, PATIENCE, CutCompletions, LearningSignal
from launch.run.step_checks import RouterLoad
from launch.run.step_timer import DispatchedStep
from launch.setup.experiment import build_experiment
from specjax.drafters import NoDrafter
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.testing import tiny_policy
from specjax.train.advantage import AdvantageConfig
from specjax.train.config import TrainConfig
from specjax.train.loss import LossConfig
from specjax.train.metrics import rollout_metrics
from specjax.train.selection import SelectionConfig
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Mixture, Params, Prompts, Reward, Rollout, TrainState
from tests.launch.programs import LEAST, argv, flags, metrics
from tests.refusals import assert_refused, refuses

POLICY, WEIGHTS = tiny_policy()
MESH = make_mesh(MeshConfig(1, 1, 1))
PROMPTS = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.arange(2, dtype=jnp.int32))
ROLLOUT = RolloutConfig(group_size=2, max_new_tokens=6, draft_length=0)
CONFIG = TrainConfig(rollout=ROLLOUT, loss=LossConfig(kl_coefficient=0.1))
# Metrics that are computed over trained tokens.
OF_TRAINED = ("loss/policy", "loss/clip_fraction", "entropy", "ratio/mean", "ratio/max", "kl/reference")
OF_TRAINED = (*OF_TRAINED, "rollout/logprob_gap_mean", "rollout/logprob_gap_max")


# Scores of the four rows, by the first prompt's id.
SCORES = {
    "by row": [0, 1, 2, 3],
    "equal": [0, 0, 1, 1],
    "one group": [0, 1, 1, 1],
    "all equal": [0] * 4,
    "not scored": [math.nan] * 4,
}


@functools.cache
def step_of(config: TrainConfig) -> Callable[..., Any]:
    def scored(rollout: Rollout, prompts: Prompts) -> Reward:
        values = jnp.array([*SCORES.values()], jnp.float32)[prompts.id[0], : len(rollout.lengths)]
        return Reward(values, values)

    return make_train_step(POLICY, NoDrafter(), scored, config, MESH)


def take(config: TrainConfig, scores: str, state: TrainState | None = None) -> tuple[TrainState, dict[str, float]]:
    """Take a step from this state; None: from the first one."""
    if state is None:
        state = init_train_state(Params(jax.tree.map(jnp.copy, WEIGHTS), {}), config, MESH, with_reference=True)
    prompts = replace(PROMPTS, id=jnp.array([[*SCORES].index(scores), 99], jnp.int32))
    after, _, metrics = step_of(config)(state, prompts)
    return after, {name: float(value) for name, value in metrics.items()}


def step_metrics(config: TrainConfig, scores: str) -> dict[str, float]:
    return take(config, scores)[1]


@pytest.mark.parametrize(
    ("config", "scores"),
    [
        (CONFIG, "not scored"),
        # Without a stop token, every completion is truncated.
        (replace(CONFIG, selection=SelectionConfig(drop_truncated=True)), "by row"),
        (replace(CONFIG, selection=SelectionConfig(groups=2)), "all equal"),
    ],
    ids=["not scored", "dropped", "not selected"],
)
def test_row_08_a_step_without_a_trained_token_has_no_metrics_and_moves_nothing(
    config: TrainConfig, scores: str
) -> None:
    """Moments of the step before would move the policy."""
    state, metrics = take(CONFIG, "by row")
    assert metrics["update/empty"] == 0
    before = jax.tree.map(np.array, (state.params, state.optimizer))
    state, metrics = take(config, scores, state)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.optimizer), before)
    assert metrics["update/empty"] == 1 and int(state.step) == 2
    assert [name for name in OF_TRAINED if not math.isnan(metrics[name])] == []
    assert metrics["groups/sequences_trained"] == metrics[ADVANTAGES] == metrics["grad_norm/policy"] == 0
    assert metrics["rollout/logprob_alarm"] == metrics["update/skipped"] == 0


def test_row_08_metrics_with_trained_tokens_have_values() -> None:
    """Also with groups of one, whose baseline is the batch's."""
    equal = step_metrics(CONFIG, "equal")
    assert all(math.isfinite(equal[name]) for name in OF_TRAINED)
    assert equal["groups/sequences_trained"] == 4 and equal[ADVANTAGES] == 0
    assert step_metrics(CONFIG, "one group")[ADVANTAGES] == 2 and step_metrics(CONFIG, "by row")[ADVANTAGES] == 4
    ones = replace(CONFIG.rollout, group_size=1)
    batch = replace(CONFIG, rollout=ones, advantage=AdvantageConfig("batch", "batch"))
    assert step_metrics(batch, "by row")[ADVANTAGES] == 2


def test_row_08_means_of_no_round_have_no_value() -> None:
    counts, rounds = jnp.zeros((2, 3), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    rollout = Rollout(jnp.zeros((2, 5), jnp.int32), jnp.ones(2, jnp.int32), drafted=counts, accepted=counts)
    rollout = replace(rollout, row_rounds=jnp.zeros(2, jnp.int32), loop_rounds=rounds, draft_length=rounds)
    metrics = rollout_metrics(rollout)
    names = ["rollout/draft_length", "rollout/acceptance_length", "rollout/acceptance_rate_pos_1"]
    assert np.isnan([metrics[name] for name in names]).all() and metrics["rollout/rounds"] == 0


def test_routers_that_collapse_are_said_once() -> None:
    said, share = list[tuple[int, str]](), 128 / 8
    signal = RouterLoad(Mixture(2, 128, 8), lambda number, text: said.append((number, text)))
    loads = (2.0, 0.1), (0.95 * share, 0.1), (math.nan, math.nan), (0.95 * share, 0.1), (2.0, 0.1), (1.5, 0.75)
    for number, (load, unused) in enumerate(loads, start=1):
        metrics: Any = {"router/load_max": load, "router/unused": unused}
        signal(DispatchedStep(number, 0.0, metrics, None, None))  # pyright: ignore[reportArgumentType]
    assert [number for number, _ in said] == [2, 6]
    assert "an expert sees 95% of the tokens of its layer (an equal share is 6.2%)" in said[0][1]
    assert "75% of all experts see none" in said[1][1]


@pytest.mark.parametrize("baseline", ["group", "others"])
def test_row_08_a_group_of_one_is_refused_where_its_group_is_its_baseline(baseline: str) -> None:
    one, said = replace(CONFIG.rollout, group_size=1), f"rollout.group_size = 1: ...2...advantage.baseline = {baseline}"
    ungrouped = replace(CONFIG, rollout=one, advantage=AdvantageConfig(baseline, "none"))  # pyright: ignore[reportArgumentType]
    with refuses(said):
        step_metrics(ungrouped, "by row")
    words = {"--rollout.group-size": "1", "--advantage.baseline": baseline, "--advantage.scale": "none"}
    with refuses(said, ConfigError):
        launch.train.main(argv("tiny", words))


RUN = RunConfig(name="a", steps=9, rollout=RolloutOptions(group_size=4, max_new_tokens=32, draft_length=0))
RUN = replace(RUN, data=replace(RUN.data, prompts=2))
EQUAL = {"groups/zero_variance": 2}
DROPPING = replace(RUN, selection=SelectionConfig(drop_truncated=True))


def warned(
    config: RunConfig, *metrics: dict[str, float], by: type[LearningSignal | CutCompletions] = LearningSignal
) -> list[tuple[int, str]]:
    """Return the warnings about steps with these metrics."""
    said = list[tuple[int, str]]()
    signal = by(config, lambda number, text: said.append((number, text)))
    for number, values in enumerate(metrics, start=1):
        step = {ADVANTAGES: 0, "update/empty": 1, **values}
        signal(DispatchedStep(number, 0.0, step, None, None))  # pyright: ignore[reportArgumentType]
    return said


@pytest.mark.parametrize(
    ("config", "metrics", "expected"),
    [
        (RUN, {"reward/failed": 8, "reward/mean": math.nan} | EQUAL, "100%...scored...reward.scorer"),
        (DROPPING, {"rollout/truncated": 1}, "100%...max_new_tokens = 32...dropped...selection.drop_truncated"),
        (RUN, {"rollout/truncated": 1, "reward/mean": 0} | EQUAL, "100%...max_new_tokens = 32...100%"),
        (RUN, EQUAL | {"reward/mean": 1}, "100% of the groups...mean reward 1...rollout.group_size"),
        (DROPPING, EQUAL | {"rollout/truncated": 0.5}, "100% of the groups...50%...dropped"),
        (RUN, {}, "no sequence had an advantage"),
    ],
    ids=["failed", "dropped", "budget", "equal", "two causes", "unknown"],
)
def test_row_08_steps_without_an_advantage_have_a_cause(
    config: RunConfig, metrics: dict[str, float], expected: str
) -> None:
    assert warned(config, *[metrics] * (PATIENCE - 1)) == []
    ((number, text),) = warned(config, *[metrics] * (PATIENCE + 1))
    assert number == PATIENCE
    assert_refused(text, f"...{expected}")
    assert ("scored" in text) == bool(metrics.get("reward/failed"))
    # Another step whose update was empty does not hide it.
    ((_, text),) = warned(config, *[metrics] * (PATIENCE - 1), {ADVANTAGES: 1, "reward/mean": 1})
    assert_refused(text, f"...last 5 steps, in 4 of which...{expected}")


def test_row_08_warnings_of_nothing_learnt_become_rare_and_end() -> None:
    nothing, something = {}, {ADVANTAGES: 1, "update/empty": 0}
    assert [number for number, _ in warned(RUN, *[nothing] * 40)] == [PATIENCE, 3 * PATIENCE, 7 * PATIENCE]
    assert warned(RUN, *[*[nothing] * (PATIENCE - 1), something] * 3) == []
    assert [number for number, _ in warned(replace(RUN, steps=3), *[nothing] * 3)] == [3]
    # After a step that taught something, the two groups of a step are equal by chance.
    steps = LEAST_GROUPS // 2
    assert warned(RUN, something, *[nothing] * (steps - 1), something) == []
    assert [number for number, _ in warned(RUN, something, *[nothing] * steps)] == [1 + steps]


def test_row_96_a_loss_of_ones_own_learns_where_its_updates_have_a_gradient() -> None:
    own = replace(RUN, loss=replace(RUN.loss, function="a.module:loss"))
    constant_reward = EQUAL | {"update/empty": 0}
    assert warned(own, *[constant_reward] * 40) == []
    # The built-in loss learns nothing from the rewards then: what moves the policy is KL.
    assert "100% of the groups had equal rewards" in warned(RUN, *[constant_reward] * PATIENCE)[0][1]
    ((_, text),) = warned(own, *[{ADVANTAGES: 8}] * PATIENCE)
    assert text.endswith("in which no update had a gradient: loss.function = a.module:loss does not depend on theta")
    twice = replace(own, updates=replace(own.updates, minibatches=2))
    assert warned(twice, *[{ADVANTAGES: 8}] * 40) == []


def test_row_96_the_alarm_of_log_probs_can_be_told_that_a_rollout_fills_in_others() -> None:
    RunConfig(name="a", steps=1, gap_alarm=None)
    assert "gap_alarm" not in logprob_alarm(3, 0.5, 1.0, None)
    own = logprob_alarm(3, 0.5, 1.0, "a.module:rollout")
    assert own.endswith(
        "If rollout.function = a.module:rollout is meant to fill `full` with others, set gap_alarm = None"
    )


@pytest.mark.parametrize(
    ("shares", "warnings"),
    [
        ([1.0] * 12, [5]),
        ([1.0] * 15, [5, 15]),
        ([1.0, 0.75, 1.0, 1.0, 1.0], [5]),
        ([0.875] * 12, []),
        ([1.0, math.nan, 1.0, 1.0, 1.0, 1.0], [6]),
    ],
)
def test_row_76_completions_that_the_budget_cuts_are_said(shares: list[float], warnings: list[int]) -> None:
    """Step by step: shares that are cut, and the steps after which the run warns."""
    config = replace(RUN, steps=99)
    said = warned(config, *({"rollout/truncated": share} for share in shares), by=CutCompletions)
    assert [number for number, _ in said] == warnings
    assert all(
        "of the last 5 steps were cut by the budget, rollout.max_new_tokens = 32: raise it" in text
        for _, text in said[:1]
    )
    assert warned(config, *[{}] * 9, by=CutCompletions) == []


def test_row_76_short_runs_and_evaluations_warn_too() -> None:
    ((number, text),) = warned(replace(DROPPING, steps=2), *[{"rollout/truncated": 1.0}] * 2, by=CutCompletions)
    assert number == 2 and "of the last 2 steps" in text and text.endswith("selection.drop_truncated = False")
    said = list[tuple[int, str]]()
    cut = CutCompletions(RUN, lambda number, text: said.append((number, text)))
    for step, share in enumerate((math.nan, 1.0, 0.95, 0.5, 0.9)):
        cut.evaluated(step, share)
    assert [step for step, _ in said] == [1, 4]
    assert (
        said[0][1]
        == "WARNING: 100% of the held-out completions were cut by the budget, rollout.max_new_tokens = 32: raise it"
    )


def test_row_08_a_run_warns_and_writes_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = LEAST | flags(
        f"--steps {PATIENCE} --out run --rollout.max-new-tokens 2 --rollout.draft-length 0 --rollout.stop-tokens 0",
        "--rollout.replace-stop-tokens True",
        "--rollout.law.temperature 0.01 --selection.drop-truncated True --draft.kind none",
    )
    words |= {"draft.lookup.kind": "none", "checkpoint.best": None, "speedup.steps": 0}
    assert launch.train.main(argv("tiny", words)) == 0
    assert [line["ratio/mean"] for line in metrics(Path("run"))] == [None] * PATIENCE
    assert "dropped" in Path("run/diary.jsonl").read_text()


def test_row_08_an_answer_of_one_token_states_no_acceptance_length() -> None:
    config = parse_run(argv("tiny", LEAST | {"--draft.kind": "none", "--rollout.draft-length": "0"}), "", "")
    config = replace(config, rollout=replace(config.rollout, max_new_tokens=1))
    experiment = build_experiment(config, training=False)
    summary = answer_prompt(experiment, experiment.networks.params, "1+2", 1, print)
    assert summary.startswith("1 tokens in ") and "nan" not in summary and "acceptance" not in summary
