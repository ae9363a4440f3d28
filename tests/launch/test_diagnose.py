"""launch.diagnose: a correct draft passes, and each planted fault is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.acceptance.counts
import launch.diagnose
import launch.diagnosis.alternatives
import launch.diagnosis.diagnose
from configs.override import override
from launch.acceptance.predicted import make_overlaps
from launch.cli.recipes import load_recipe
from launch.diagnosis.acceptance import rates
from launch.diagnosis.alternatives import alternatives
from launch.diagnosis.diagnose import diagnose, diagnostic_run
from launch.diagnosis.findings import Finding, alternative_findings
from launch.diagnosis.observed import Observed, observe
from launch.diagnosis.summary import Diagnosis
from launch.distillation.trainer import distill
from launch.errors import ConfigError
from launch.run.directory import record_config
from launch.setup.drafts.eagle3 import Eagle3Draft
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.networks import Networks
from models.decoder import make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.drafts.mtp import CONVENTIONS, init_mtp, make_mtp
from models.params import init_params
from specjax.drafters import DraftLoss, EitherDrafter, HeadDrafter
from specjax.types import Params
from tests.launch.programs import FEW, Options, Refusal, argv, changes, leave_run

# Distributions with enough structure that a draft can learn it, and that a wrong draft is rejected.
SETTINGS = FEW | changes(
    "--model.architecture.num-layers 3 --rollout.law.temperature 0.3 --rollout.draft-length 3",
    "--distill.steps 200 --distill.batch-size 16 --distill.answers 64 --distill.chunks 1 --mesh.data 1",
    "--draft-optimizer.learning-rate 0.02",
)
EAGLE3 = SETTINGS | changes("--draft.vocab-size 14 --draft.head.fc-norm True")
MTP = SETTINGS | changes("--draft.kind mtp --draft.mtp-convention qwen3_next")
LOOKUP = SETTINGS | changes("--draft.kind none --distill.steps 0 --draft.lookup.min-n 1")
SEEDS = range(4)
PROMPTS = 16

Trained = tuple[Experiment, Params]


def built(settings: Options) -> Experiment:
    return build_experiment(diagnostic_run(override(load_recipe("tiny"), settings)))


def distilled(settings: Options) -> Trained:
    experiment = built(settings)
    params = experiment.networks.params
    return experiment, replace(params, draft=distill(experiment, params).draft)


def test_how_a_run_divides_its_batches_does_not_hinder_a_diagnosis() -> None:
    options = {"microbatches": 6, "updates.minibatches": 2, "selection.groups": 2, "rollout.carry_over": 0.5}
    assert built(FEW | options).config.rollout.carry_over is None


@pytest.fixture(scope="module", autouse=True)
def fewer_programs():
    """Compile one other rope base instead of three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.diagnosis.alternatives, "ROPE_BASES", (1e4,))
        yield


@pytest.fixture(scope="module")
def trained() -> Trained:
    return distilled(EAGLE3)


@pytest.fixture(scope="module")
def trained_mtp() -> Trained:
    return distilled(MTP)


@pytest.fixture(scope="module")
def diagnosed(trained: Trained) -> tuple[Diagnosis, Observed]:
    """Return the diagnosis of the trained draft, and the observed completions, which do not depend on the draft."""
    seen: list[Observed] = []

    def observe_and_keep(*args: Any) -> Any:
        observed, caches = observe(*args)
        seen.append(observed)
        return observed, caches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.diagnosis.diagnose, "observe", observe_and_keep)
        return diagnose(*trained, PROMPTS), seen[0]


@pytest.fixture(scope="module")
def healthy(diagnosed: tuple[Diagnosis, Observed]) -> Diagnosis:
    return diagnosed[0]


@pytest.fixture(scope="module")
def observed(diagnosed: tuple[Diagnosis, Observed]) -> Observed:
    return diagnosed[1]


@pytest.fixture
def one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the other ways to read the draft, which are most of the compilation."""
    monkeypatch.setattr(launch.diagnosis.diagnose, "alternatives", lambda networks: ())


Reading = Callable[[Params], list[Finding]]


def reading(experiment: Experiment, observed: Observed) -> Reading:
    """Return a function from params to findings about the way the draft is read. Compiled once."""
    law, networks = experiment.config.rollout.law, experiment.networks
    own = make_overlaps(networks.policy, networks.drafter, law, 1, 0)
    others = [(a.check, a.option, make_overlaps(a.policy, a.drafter, law, 1, 0)) for a in alternatives(networks)]
    sequences = observed.sequences
    counted = np.asarray(sequences.completion) & (np.arange(sequences.tokens.shape[1]) >= 2)

    def findings(params: Params) -> list[Finding]:
        with jax.set_mesh(experiment.mesh):
            found = [(check, option, overlap(params, sequences)[0]) for check, option, overlap in others]
            return list(alternative_findings(own(params, sequences)[0], found, counted))

    return findings


@pytest.fixture(scope="module")
def right_mtp_reading(trained_mtp: Trained, observed: Observed) -> Reading:
    return reading(trained_mtp[0], observed)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.state for finding in findings}


def with_draft(experiment: Experiment, **changed: Any) -> Experiment:
    """Return the experiment with a changed draft, in both places that hold it."""
    draft = replace(experiment.networks.draft, **changed)
    return replace(experiment, networks=replace(experiment.networks, draft=draft, drafter=draft.drafter))


def as_kind(kind: type[HeadDrafter], experiment: Experiment) -> HeadDrafter:
    drafter = experiment.networks.drafter
    return kind(**{name: getattr(drafter, name) for name in drafter.__dataclass_fields__})  # pyright: ignore


# A correct draft.


def test_a_correct_draft(healthy: Diagnosis):
    assert not healthy.faults
    found = states(healthy.findings)
    assert {"acceptance by position", "acceptance by place", "draft vocabulary", "vocabulary map"} <= set(found)
    assert found["caches"] == "ok" and found["feature layers"] == "ok"
    assert [rate.name for rate in healthy.by_position] == ["position 1", "position 2", "position 3"]
    first = healthy.by_position[0]
    assert first.predicted is not None and 0.5 < first.predicted < 1


@pytest.mark.usefixtures("one_reading")
@pytest.mark.slow
def test_on_a_mesh_that_splits_the_weights_and_with_chunked_logits(trained: Trained, healthy: Diagnosis):
    _, params = trained
    experiment = built(EAGLE3 | changes("--mesh.fsdp 2 --mesh.tensor 2 --logit-chunk 8"))
    assert experiment.mesh.shape["fsdp"] == 2
    like = experiment.networks.params
    params = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), params, like)
    found = diagnose(experiment, params, PROMPTS)
    assert states(found.findings).items() <= states(healthy.findings).items()
    for one, other in zip(found.by_position, healthy.by_position, strict=True):
        assert one.count == other.count and one.predicted == pytest.approx(other.predicted, abs=1e-3)


# The way the head is read.


def test_other_feature_layers(trained: Trained, observed: Observed):
    experiment, params = trained
    draft = experiment.networks.draft
    assert isinstance(draft, Eagle3Draft) and draft.decoder.feature_layers == (0, 1)
    decoder = replace(draft.decoder, feature_layers=(1, 2))
    moved = with_draft(experiment, decoder=decoder)
    moved = replace(moved, networks=replace(moved.networks, policy=make_policy(decoder)))
    # With so few tokens, the check may stay undecided.
    found = by_check(reading(moved, observed)(params))["feature layers"]
    assert found.state in ("off", "undecided") and "(0, 1)" in found.said + found.do


def other_rope_base(networks: Networks) -> dict[str, Any]:
    head = replace(networks.draft.head, rope_theta=1.01)
    return {"head": head, "drafter": replace(networks.drafter, head=make_eagle3(head, networks.policy).head)}


def other_vocabulary_map(networks: Networks) -> dict[str, Any]:
    offsets = networks.drafter.target_ids - np.arange(14, dtype=np.int32)
    return {"drafter": replace(networks.drafter, target_ids=offsets)}


def other_convention(networks: Networks) -> dict[str, Any]:
    head = replace(networks.draft.head, convention=CONVENTIONS["mimo"])
    return {"head": head, "drafter": replace(networks.drafter, head=make_mtp(head, networks.policy).head)}


@pytest.mark.parametrize(
    ("draft", "change", "check", "do"),
    [
        ("trained", other_rope_base, "rope", "rope_theta = 10000"),
        ("trained", other_vocabulary_map, "vocabulary map", "ids read as offsets"),
        pytest.param("trained_mtp", other_convention, "MTP convention", "qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_is_read_otherwise(
    draft: str, change: Any, check: str, do: str, observed: Observed, request: pytest.FixtureRequest
):
    experiment, params = request.getfixturevalue(draft)
    found = by_check(reading(with_draft(experiment, **change(experiment.networks)), observed)(params))[check]
    assert found.state == "off" and do in found.do


@pytest.mark.slow
def test_the_right_mtp_convention(trained_mtp: Trained, right_mtp_reading: Reading):
    assert by_check(right_mtp_reading(trained_mtp[1]))["MTP convention"].state == "ok"


@pytest.mark.slow
def test_random_heads_are_undecided(
    trained: Trained, trained_mtp: Trained, observed: Observed, right_mtp_reading: Reading
):
    readings = reading(trained[0], observed), right_mtp_reading
    for (experiment, params), findings in zip((trained, trained_mtp), readings, strict=True):
        draft = experiment.networks.draft
        init = init_eagle3 if isinstance(draft, Eagle3Draft) else init_mtp
        for seed in SEEDS:
            random = init_params(partial(init, draft.head), jax.random.key(seed), experiment.mesh)  # pyright: ignore
            assert set(states(findings(replace(params, draft=random))).values()) == {"undecided"}


# Caches and acceptance.


class OneFeatureLate(HeadDrafter):
    """Faulty head whose features are one position late."""

    def observe(self, state: Any, features: Any, tokens: Any, emitted: Any) -> Any:
        return super().observe(state, jnp.roll(features, 1, axis=1), tokens, emitted)


@pytest.mark.usefixtures("one_reading")
def test_wrong_features_in_the_cache_are_reported_as_one_fault(trained: Trained):
    experiment, params = trained
    diagnosis = diagnose(with_draft(experiment, drafter=as_kind(OneFeatureLate, experiment)), params, PROMPTS)
    (fault,) = diagnosis.faults
    assert fault.check == "caches" and "features: differ by up to" in fault.said and len(fault.said) < 120


class WrongLater(HeadDrafter):
    """Faulty head that drafts wrong tokens from position 12 on."""

    def propose(self, params: Any, state: Any, gumbel: Any, law: Any) -> Any:
        proposal, state = super().propose(params, state, gumbel, law)
        late = state.length >= 12
        tokens = jnp.where(late[:, None], (proposal.tokens + 1) % self.vocab_size, proposal.tokens)
        log_q = jnp.where(late[:, None, None], jnp.roll(proposal.log_q, 1, axis=-1), proposal.log_q)
        return proposal._replace(tokens=tokens, log_q=log_q), state


@pytest.mark.usefixtures("one_reading")
def test_drafts_that_are_wrong_from_some_place_on_are_found(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch.acceptance.counts, "SHORTEST_BUCKET", 4)
    experiment, params = trained
    diagnosis = diagnose(with_draft(experiment, drafter=as_kind(WrongLater, experiment)), params, PROMPTS)
    assert [fault.check for fault in diagnosis.faults] == ["acceptance by place"]


class TellsPosition1(EitherDrafter):
    """Custom drafter whose loss predicts the acceptance at position 1."""

    def loss(self, params: Any, tokens: Any, output: Any, mask: Any, law: Any, anchors: Any = None) -> DraftLoss:
        return DraftLoss(jnp.float32(0), jnp.where(mask, 0.5, 0.0))


def test_a_custom_drafter_is_compared_only_at_position_1(trained: Trained, observed: Observed):
    experiment, params = trained
    draft = experiment.networks.drafter
    policy, law = experiment.networks.policy, experiment.config.rollout.law
    overlaps = make_overlaps(policy, TellsPosition1(draft, draft), law, 3, 0)
    by_position, _ = rates(observed, overlaps(params, observed.sequences))
    assert [rate.predicted for rate in by_position] == [0.5, None, None]


# Other kinds of drafts.


@pytest.mark.slow
def test_a_model(trained: Trained):
    assert trained[0].networks.decoder is not None
    shape = replace(trained[0].networks.decoder, num_layers=1, feature_layers=())
    experiment = built(SETTINGS | {"draft.kind": "model", "draft.architecture": shape, "draft.unroll": 3})
    diagnosis = diagnose(experiment, experiment.networks.params, 4)
    assert not diagnosis.faults and diagnosis.by_position[-1].predicted is not None


def test_ngram_is_predicted_and_history_is_not_and_no_training_is_advised(capsys: pytest.CaptureFixture[str]):
    for kind, rank in (("ngram", 2), ("history", 0)):
        experiment = built(LOOKUP | {"draft.lookup.kind": kind, "rollout.group_size": 2, "lora.rank": rank})
        assert experiment.config.rollout.group_size == (2 if kind == "history" else 1)
        diagnosis = diagnose(experiment, experiment.networks.params, 4)
        assert not diagnosis.faults and states(diagnosis.findings)["caches"] == "ok"
        assert (diagnosis.by_position[0].predicted is None) == (kind == "history")
        launch.diagnose.print_diagnosis(diagnosis, launch.diagnose.console)
        assert "training" not in capsys.readouterr().out


# The program.


@pytest.fixture
def run(trained: Trained, tmp_path: Path) -> Path:
    """Return a run with random weights that sampled with another law."""
    law = changes("--rollout.law.top-p 0.5 --rollout.verifier coupled --allow-truncated-law True")
    recorded = override(trained[0].config, law)
    leave_run(tmp_path / "run", trained[0])
    record_config(tmp_path / "run", recorded, report=lambda text: None)
    return tmp_path / "run"


@pytest.mark.usefixtures("one_reading")
def test_the_program(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Diagnose a run with random weights, whose acceptance is as low as predicted, and write JSON."""
    options = EAGLE3 | {"--checkpoint": str(run), "--prompts": "8", "--json": str(tmp_path / "out.json")}
    assert launch.diagnose.main(argv("tiny", options)) == 0
    said = capsys.readouterr().out
    assert "caches" in said and "position 1" in said and "step 1" in said and "8 held-out prompts" in said
    assert "rollout.law.top_p = 1.0 (the run: 0.5)" in said and "rollout.verifier = rejection" in said
    assert "stop_tokens" not in said and "launch.distill" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ok"] and written["by_position"][0]["count"] > 0 and "jax" in written["versions"]
    assert written["checkpoint_step"] == 1


def test_a_fault_gives_exit_code_3_and_is_found_in_full_precision(run: Path, monkeypatch: pytest.MonkeyPatch):
    precisions = []

    def find(experiment: Experiment, params: Params, count: int) -> Diagnosis:
        precisions.append(jax.config.jax_default_matmul_precision)  # pyright: ignore[reportAttributeAccessIssue]
        return Diagnosis([Finding("caches", "off", "differ")], [], [], True)

    monkeypatch.setattr(launch.diagnosis.diagnose, "_diagnose", find)
    assert launch.diagnose.main(argv("tiny", EAGLE3 | {"--checkpoint": str(run)})) == 3
    assert precisions == ["highest"]


@pytest.mark.parametrize(
    ("option", "value", "recorded"),
    [("model.feature-layers", "2", "[0, 1]"), ("seed", "5", "0"), ("draft.path", "x", "None")],
)
def test_another_value_than_the_runs_is_refused(refusal: Refusal, run: Path, option: str, value: str, recorded: str):
    options = EAGLE3 | {f"--{option}": value, "--checkpoint": str(run)}
    if option == "draft.path":
        options["draft.vocab_size"] = None
    said = refusal(launch.diagnose.main, argv("tiny", options))
    assert said.startswith(f"{option.replace('-', '_')} = ") and said.endswith(f"the run has {recorded}")


def test_a_run_without_drafts_is_refused(refusal: Refusal, tmp_path: Path):
    """Completions of one token come from the prefill, so nothing is drafted."""
    options = SETTINGS | changes("--draft.kind none --rollout.draft-length 0")
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    said = refusal(launch.diagnose.main, argv("tiny", options | {"--checkpoint": str(tmp_path)}))
    assert said.startswith("draft.kind = none:")
    one_token = changes("--draft.lookup.kind ngram --rollout.max-new-tokens 1 --rollout.draft-length 1")
    experiment = built(LOOKUP | one_token)
    with pytest.raises(ConfigError, match="first token or a lookup found no match"):
        diagnose(experiment, experiment.networks.params, 2)
