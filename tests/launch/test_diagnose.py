"""launch.diagnose: a healthy draft passes, and each planted fault is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import launch.diagnose
import launch.diagnosis.alternatives
from configs.override import override
from launch.build.drafts.eagle3 import Eagle3Draft
from launch.build.experiment import Experiment, build_experiment
from launch.cli.recipes import load_recipe
from launch.cli.unfinished import Unfinished
from launch.diagnosis.diagnose import diagnose, diagnostic_run
from launch.diagnosis.findings import Diagnosis, alternative_findings
from launch.distillation.trainer import distill
from models.decoder import make_policy
from specjax.drafters import HeadDrafter
from specjax.types import Params
from tests.launch.programs import FEW, Refusal, argv, changes, leave_run

# Peaked enough that a draft has something to learn, and that a wrong one is refused.
SETTINGS = FEW | changes(
    "--model.architecture.num-layers 3 --rollout.law.temperature 0.3 --rollout.draft-length 3 --draft.vocab-size 14",
    "--distill.steps 200 --distill.batch-size 16 --distill.answers 64 --distill.chunks 1 --mesh.data 1",
    "--draft-optimizer.learning-rate 0.02 --draft.head.fc-norm True",
)


@pytest.fixture(scope="module")
def trained() -> tuple[Experiment, Params]:
    experiment = build_experiment(diagnostic_run(override(load_recipe("tiny"), SETTINGS)))
    params = experiment.networks.params
    return experiment, replace(params, draft=distill(experiment, params, Unfinished()).draft)


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch):
    """Compile one other rope base instead of three."""
    monkeypatch.setattr(launch.diagnosis.alternatives, "ROPE_BASES", (5e5,))


def with_draft(experiment: Experiment, **changed: Any) -> Experiment:
    """The experiment with another draft in both places that hold it."""
    draft = replace(experiment.networks.draft, **changed)
    return replace(experiment, networks=replace(experiment.networks, draft=draft, drafter=draft.drafter))


def faults(experiment: Experiment, params: Params) -> tuple[set[str], Diagnosis]:
    diagnosis = diagnose(experiment, params, 16)
    return {finding.check for finding in diagnosis.faults}, diagnosis


def test_a_healthy_draft(trained: tuple[Experiment, Params]):
    found, diagnosis = faults(*trained)
    assert found == set()
    checks = {finding.check for finding in diagnosis.findings}
    assert {"caches", "acceptance by position", "feature layers", "rope", "vocabulary map"} <= checks
    assert [rate.name for rate in diagnosis.by_position] == ["position 1", "position 2", "position 3"]
    first = diagnosis.by_position[0]
    assert first.predicted is not None and 0.3 < first.predicted < 1


def test_other_feature_layers(trained: tuple[Experiment, Params]):
    experiment, params = trained
    draft = experiment.networks.draft
    assert isinstance(draft, Eagle3Draft) and draft.decoder.feature_layers == (0, 1)
    decoder = replace(draft.decoder, feature_layers=(1, 2))
    moved = with_draft(experiment, decoder=decoder)
    moved = replace(moved, networks=replace(moved.networks, policy=make_policy(decoder)))
    found, diagnosis = faults(moved, params)
    assert found == {"feature layers"}
    assert "(0, 1)" in diagnosis.faults[0].do


def test_another_vocabulary_map(trained: tuple[Experiment, Params]):
    experiment, params = trained
    drafter = experiment.networks.drafter
    assert isinstance(drafter, HeadDrafter) and drafter.target_ids is not None
    broken = replace(drafter, target_ids=np.arange(14, dtype=np.int32)[::-1].copy())
    found, _ = faults(with_draft(experiment, drafter=broken), params)
    assert "vocabulary map" in found


class OneFeatureLate(HeadDrafter):
    """A head whose features are one position late."""

    def observe(self, state: Any, features: Any, tokens: Any, emitted: Any) -> Any:
        return super().observe(state, jnp.roll(features, 1, axis=1), tokens, emitted)


def test_a_cache_of_other_features(trained: tuple[Experiment, Params]):
    experiment, params = trained
    drafter = experiment.networks.drafter
    late = OneFeatureLate(**{name: getattr(drafter, name) for name in drafter.__dataclass_fields__})  # pyright: ignore
    found, diagnosis = faults(with_draft(experiment, drafter=late), params)
    assert "caches" in found
    assert "features" in diagnosis.faults[0].said


def test_a_small_gain_of_another_reading_is_no_fault():
    rng = np.random.default_rng(0)
    own, counted = rng.uniform(size=(50, 20)), np.ones((50, 20), bool)
    noisy = own + rng.normal(0.01, 0.2, own.shape)
    better = own + 0.1
    assert [finding.ok for finding in alternative_findings(own, [("rope", "10000", noisy)], counted)] == [True]
    (finding,) = alternative_findings(own, [("rope", "10000", noisy), ("rope", "500000", better)], counted)
    assert not finding.ok and "500000" in finding.do


def test_the_program(trained: tuple[Experiment, Params], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Random weights are accepted as little as predicted; of a run, and written as JSON."""
    experiment, _ = trained
    leave_run(tmp_path / "run", experiment)
    options = SETTINGS | {"--checkpoint": str(tmp_path / "run"), "--prompts": "8", "--json": str(tmp_path / "out.json")}
    assert launch.diagnose.main(argv("tiny", options)) == 0
    said = capsys.readouterr().out
    assert "caches" in said and "position 1" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ok"] and written["by_position"][0]["count"] > 0 and "jax" in written["versions"]


def test_a_run_without_a_draft_is_refused(refusal: Refusal, tmp_path: Path):
    options = SETTINGS | changes("--draft.kind none --rollout.draft-length 0") | {"draft.vocab_size": None}
    said = refusal(launch.diagnose.main, argv("tiny", options | {"--checkpoint": str(tmp_path)}))
    assert said.startswith("draft.kind = none:")
