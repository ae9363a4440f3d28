"""Faults met in a notebook, with what `launch.trainer.train` returns."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.evaluation.one_prompt as one_prompt
import launch.train
from configs.override import override
from launch.comparison.closing import without_moments
from launch.setup.experiment import Experiment, build_experiment
from launch.trainer import TrainedRun
from specjax.short_repr import brief
from specjax.types import Params, TrainState
from tests.launch.programs import ONE_LAYER, SMALLEST

CONFIG = override(
    SMALLEST,
    {
        **{"lora.rank": 2, "draft.kind": "model", "draft.architecture": ONE_LAYER, "rollout.draft_length": 1},
        **{"reward.scorer": "exact_traced", "data.max_prompt_tokens": 60},
    },
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainedRun:
    """Return a run whose only step copied what a step trains, and deleted what it donates."""

    def train(experiment: Experiment, *_: object) -> tuple[TrainState, None]:
        old = experiment.networks.params
        params = dataclasses.replace(jax.tree.map(jnp.copy, old), base=old.base)
        for x in jax.tree.leaves(dataclasses.replace(old, base=())):
            x.delete()
        return TrainState(jnp.int32(1), params, Params({"m": jnp.ones(3)}, {}), None), None

    monkeypatch.setattr(launch.train, "train", train)
    result = launch.train.run(dataclasses.replace(CONFIG, out=str(tmp_path / "run")))
    assert "deleted" not in repr(result) and "\n" not in repr(result)
    return TrainedRun(result.directory, result.experiment, result.state, None, 0.541)


def test_row_94_what_a_user_holds_is_a_line(run: TrainedRun) -> None:
    assert str(run) == f"TrainedRun({run.directory}, 1 steps, held-out accuracy 54.1%)"
    experiment = run.experiment
    donated = build_experiment(CONFIG, training=False).networks
    for x in jax.tree.leaves(donated.params.policy):
        x.delete()
    networks, memory = experiment.networks, experiment.train_prompts
    for held in (experiment, experiment.problems, networks, networks.draft, networks.drafter, run.state, memory):
        assert len(repr(held)) < 400 and "\n" not in repr(held) and "deleted" not in repr(held)
    assert "params=Params(45 arrays of 1,655 numbers, 14 deleted)" in repr(donated)
    assert repr(run.state).startswith("TrainState(step=1, params=Params(45 arrays of 1,655 numbers), optimizer=Params(")


def test_row_94_a_dict_that_jax_cannot_flatten_is_shown() -> None:
    assert brief({1: 2, "a": 3}) == "{1: 2, 'a': 3}" and brief({1: np.ones(3), "a": 3}) == "dict of 2"


def test_row_108_a_run_holds_the_trained_arrays(run: TrainedRun) -> None:
    networks = run.experiment.networks
    assert networks.params is run.state.params and networks.draft.params is run.state.params.draft
    assert dataclasses.asdict(run)["accuracy"] == 0.541
    assert {run: run.experiment, run.experiment: run.state}[run] is run.experiment


def test_row_108_a_comparison_leaves_a_state_that_can_be_read(run: TrainedRun) -> None:
    moments = run.state.optimizer.policy["m"]
    state = without_moments(run.state)
    assert moments.is_deleted() and state.params is run.state.params
    np.testing.assert_array_equal(jax.tree.leaves(state)[0], 1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_row_111_answers_differ_from_call_to_call_and_have_few_shapes(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers, noises, widths = list[int](), list[tuple[int, int]](), set[int]()

    class Sampler:
        def __init__(self, experiment: Experiment, drafter: object, samples: int) -> None:
            samplers.append(samples)
            self.rollout = dataclasses.replace(experiment.config.rollout, group_size=samples)

        def answer_on(self, problems: object) -> None: ...

        def generate(self, params: Params, prompts: Any, noise: Any) -> Any:
            noises.append((int(noise[0]), int(noise[1])))
            widths.add(prompts.tokens.shape[1])
            rows = self.rollout.group_size
            tokens, lengths = np.zeros((rows, 3), int), np.arange(1, rows + 1) % 3
            return SimpleNamespace(tokens=tokens, lengths=lengths, sampled=tokens == 0), 0.0

    monkeypatch.setattr(one_prompt, "Sampler", Sampler)
    for samples in (1, 1, 2, 3, 3, 4, 5, 8):
        assert len(run.generate("1" * 7 * samples, samples)) == samples
    assert samplers == [1, 2, 4, 8] and widths == {16, 32, 60} and len(set(noises)) == len(noises)
    run.generate("1", seed=np.int64(7))
    run.generate("1", seed=7)
    assert noises[-1] == noises[-2] == (7, -2)
    # Neither another call nor a training step has the noise of the run's own seed.
    run.generate("1", seed=run.experiment.config.seed)
    assert noises[-1] not in noises[:-1] and all(step < -1 for _, step in noises)
