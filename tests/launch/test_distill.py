"""launch.distill as a user runs it."""

import contextlib
import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch.distill
import launch.train
from launch.acceptance.held_out import AcceptanceMeter
from launch.cli.options import parse_run
from launch.distillation.trainer import DraftTrainer, distill
from launch.setup.experiment import build_experiment
from models.checkpoints.draft import load_draft_checkpoint, save_draft_checkpoint
from models.checkpoints.made_for import MadeFor, read_made_for, state_made_for
from models.decoder import init_decoder
from models.files import read_json
from models.hf.drafts.reader import load_public_draft
from models.hf.save import save_policy
from models.params import init_params
from specjax.drafters import Drafter, HeadDrafter, NoDrafter
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.types import Policy
from tests.launch.programs import DRAFT_LENGTH, ONE_LAYER, Options, Refusal, argv, flags
from tests.refusals import assert_refused

Distilled = tuple[Path, str]
VOCABULARY = 6
# Two chunks of two rollouts with 16 sequences. Answers do not depend on the draft.
SMALL = flags(
    "--rollout.verifier coupled --distill.answers 64 --distill.chunks 2 --distill.batch-size 16",
    "--distill.microbatches 2 --distill.steps 60 --draft-optimizer.learning-rate 0.02 --temperatures 0",
    f"--draft.vocab-size {VOCABULARY} --rollout.draft-lengths 0 1 {DRAFT_LENGTH}",
)


@pytest.fixture(scope="module")
def distilled(files: Path, shrunk: Options) -> Distilled:
    """Return the directory of a distilled draft, with the answers beside it, and the program's output."""
    out, kept, said = files / "distilled", files / "responses.jsonl", io.StringIO()
    options = shrunk | SMALL | {"--out": str(out), "--save-responses": str(kept)}
    # Three microbatches do not divide a step of 16 sequences, but no step is taken here.
    options |= {"--dialect": "speculators", "microbatches": 3}
    train, written = DraftTrainer.train, list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        written.append(len(kept.read_text().splitlines()))
        return train(*args, **options)

    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftTrainer, "train", counted)
        assert launch.distill.main(argv("gsm8k", options)) == 0
    assert written == [32, 64], "answers must survive a crash during training"
    return out, said.getvalue()


@pytest.fixture(scope="module")
def report(distilled: Distilled) -> dict[str, Any]:
    return json.loads((distilled[0] / "distill.json").read_text())


@pytest.fixture(scope="module")
def responses(files: Path, distilled: Distilled) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files / "responses.jsonl").read_text().splitlines()]


def test_training_raises_the_predicted_acceptance(report: dict[str, Any]):
    own, greedy = report["acceptance"]
    assert (own["temperature"], greedy["temperature"]) == (1, 0)
    assert own["untrained"] + 0.1 < own["predicted"] <= 1
    assert greedy["untrained"] is None and 0 <= greedy["predicted"] <= 1


def test_counts_are_consistent(report: dict[str, Any]):
    for each in report["acceptance"]:
        assert each["sequences"] == 3
        assert each["alpha"] * each["rounds"] == pytest.approx(each["tokens"])
        # A round emits the accepted tokens and one more, unless an accepted token ends the sequence.
        assert each["tokens"] == sum(each["accepted"]) + each["rounds"] - each["ended"]
        assert 0 <= each["ended"] <= each["sequences"]
        assert len(each["rates"]) == each["draft_length"] == DRAFT_LENGTH
        for accepted, drafted, rate in zip(each["accepted"], each["drafted"], each["rates"], strict=True):
            assert accepted <= drafted <= each["rounds"] and rate == accepted / drafted
        for name in ("sequences", "tokens", "rounds", "ended"):
            assert each[name] == sum(bucket[name] for bucket in each["by_length"])


def test_the_cost_counts_the_work_done(report: dict[str, Any], responses: list[dict[str, Any]]):
    cost = report["cost"]
    assert (cost["answers"], cost["steps"]) == (len(responses), 60) == (64, 60)
    assert cost["answer_tokens"] == sum(len(line["tokens"]) for line in responses)
    assert 60 * 16 < cost["trained_tokens"] <= 60 * 16 * 8
    assert 0 < cost["compile_s"] < cost["generation_s"] + cost["training_s"]


def test_the_vocabulary_is_of_the_first_answers(
    distilled: Distilled, report: dict[str, Any], responses: list[dict[str, Any]]
):
    """It holds the stop token and the most frequent tokens of answers that were generated without a draft."""
    counts = Counter(token for line in responses[:32] for token in line["tokens"] if token != 0)
    ranked = sorted(range(1, 9), key=lambda token: (-counts[token], token))
    expected = sorted([0, *ranked[: VOCABULARY - 1]])
    saved = load_draft_checkpoint(distilled[0] / "draft", make_mesh(MeshConfig()))
    assert saved.target_ids is not None and saved.target_ids.tolist() == expected
    assert (saved.config.draft_vocab_size, saved.feature_layers) == (VOCABULARY, (0, 1))
    tokens = [token for line in responses for token in line["tokens"]]
    inside = np.isin(tokens, expected).mean()
    assert report["vocabulary"] == {"size": VOCABULARY, "coverage": pytest.approx(inside)}


def verifier_of(out: Path) -> dict[str, Any]:
    return read_json(out / "speculators/config.json")["speculators_config"]["verifier"]


def test_the_public_dialect_holds_the_same_head(distilled: Distilled, shrunk: Options, report: dict[str, Any]):
    made_for = MadeFor(report["policy"], 16, 2, 1.0, report["acceptance"][0]["predicted"])
    assert all(read_made_for(distilled[0] / name) == made_for for name in ("draft", "speculators"))
    stated = {"name_or_path": shrunk["--model.path"], "architectures": ["Qwen3ForCausalLM"]}
    assert verifier_of(distilled[0]) == stated
    mesh = make_mesh(MeshConfig())
    ours, public = (
        load_draft_checkpoint(distilled[0] / "draft", mesh),
        load_public_draft(distilled[0] / "speculators", mesh),
    )
    assert public.feature_layers == ours.feature_layers
    np.testing.assert_array_equal(public.target_ids, ours.target_ids)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, public.params, ours.params)))


@pytest.mark.slow
@pytest.mark.parametrize("sound", [True, False])
def test_a_run_compares_its_first_step_with_the_stated_acceptance(
    distilled: Distilled, shrunk: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str], sound: bool
):
    """Loaded unchanged, it causes no warning. With other weights, its acceptance is below the stated one."""
    draft = distilled[0] / "draft"
    if not sound:
        saved, stated = load_draft_checkpoint(draft, make_mesh(MeshConfig())), read_made_for(draft)
        draft, wrong = tmp_path / "draft", jax.tree.map(lambda x: 30 * x, saved.params)
        save_draft_checkpoint(draft, wrong, saved.config, saved.target_ids, saved.feature_layers)
        state_made_for(draft, replace(stated, num_layers=3))
    options = {"--draft.path": str(draft), "--out": str(tmp_path / "run"), "--steps": "1", "--checkpoint.every": "0"}
    assert launch.train.main(argv("gsm8k", shrunk | options | {"--reward.scorer": "exact"})) == 0
    said = capsys.readouterr().out
    assert ("num_layers = 3" in said) == ("ALARM" in said) != sound


@pytest.mark.slow
def test_it_starts_from_a_saved_draft_and_a_runs(
    distilled: Distilled, files: Path, responses: list[dict[str, Any]], shrunk: Options, tmp_path: Path
):
    """It starts from the other draft's weights, with the same vocabulary. Answers of a stop token only are left out."""
    draft, before = distilled[0] / "draft", json.loads((distilled[0] / "distill.json").read_text())

    def again(out: Path, own: Options) -> dict[str, Any]:
        options = shrunk | SMALL | {"--draft.vocab-size": None, "--distill.steps": "1", "--temperatures": "1"}
        options |= {"--responses": str(files / "responses.jsonl"), "--out": str(out)}
        assert launch.distill.main(argv("gsm8k", options | own)) == 0
        return json.loads((out / "distill.json").read_text())

    after = again(tmp_path / "saved", {"--draft.path": str(draft)})
    assert after["acceptance"][0]["untrained"] == pytest.approx(before["acceptance"][0]["predicted"], abs=1e-4)
    learnt_from = sum(line["tokens"] != [0] for line in responses)
    assert after["cost"]["generation_s"] == 0 and after["cost"]["answers"] == learnt_from
    assert after["vocabulary"] == before["vocabulary"]

    # A run that hardly changes the policy and not the draft. Its draft replaces another one of the same shape.
    run = {"--draft.path": str(draft), "--out": str(tmp_path / "run"), "--steps": "1", "--reward.scorer": "exact"}
    run |= {"--policy-optimizer.learning-rate": "1e-6", "--draft-training.mode": "frozen"}
    assert launch.train.main(argv("gsm8k", shrunk | run)) == 0
    saved = load_draft_checkpoint(draft, make_mesh(MeshConfig()))
    zeros = jax.tree.map(jnp.zeros_like, saved.params)
    save_draft_checkpoint(tmp_path / "other", zeros, saved.config, saved.target_ids, saved.feature_layers)
    own = {"--draft.path": str(tmp_path / "other"), "--checkpoint": str(tmp_path / "run"), "--start": "checkpoint"}
    after = again(tmp_path / "out", own | {"--dialect": "speculators"})
    assert after["acceptance"][0]["untrained"] == pytest.approx(before["acceptance"][0]["predicted"], abs=0.05)
    assert verifier_of(tmp_path / "out")["name_or_path"] == str(tmp_path / "run")


@pytest.mark.parametrize("saved", [False, True])
def test_the_first_answers_are_drafted_where_the_draft_is_not_random(
    distilled: Distilled, shrunk: Options, monkeypatch: pytest.MonkeyPatch, saved: bool
):
    class Seen(Exception):
        pass

    def first(policy: Policy, drafter: Drafter, config: RolloutConfig, *_: object) -> None:
        raise Seen(type(drafter), config.draft_length)

    monkeypatch.setattr("launch.distillation.answers.make_generate", first)
    options = {"--draft.path": str(distilled[0] / "draft")} if saved else {}
    experiment = build_experiment(parse_run(argv("gsm8k", shrunk | options), "", ""))
    for trained in (False, True):
        with pytest.raises(Seen) as seen:
            distill(experiment, experiment.networks.params, trained=trained)
        assert seen.value.args == ((HeadDrafter, DRAFT_LENGTH) if saved or trained else (NoDrafter, 0))


@pytest.mark.slow
def test_under_a_truncated_law_nothing_is_predicted_but_greedily(files: Path, shrunk: Options):
    experiment = build_experiment(parse_run(argv("gsm8k", shrunk), "", ""))
    law = replace(experiment.config.rollout.law, top_k=2)
    train = replace(experiment.config, allow_truncated_law=True, rollout=replace(experiment.config.rollout, law=law))
    experiment = replace(experiment, config=train)
    networks = experiment.networks
    meters = [AcceptanceMeter(experiment, networks.drafter, networks.params, x) for x in (1.0, 0.0)]
    cut, greedy = (meter.measure() for meter in meters)
    assert cut.predicted is None and cut.counts.rates[0] is not None and greedy.predicted is not None


BARE = {"--rollout.function": "test_examples:bare_rollout"}
LEARNING = {"--distill.steps": "60", "--distill.batch-size": "16", "--draft-optimizer.learning-rate": "0.02"}
MTP = {"--draft.kind": "mtp", "--model.feature-layers": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "read_by"), [("model", "draft", "draft.path"), ("mtp", "policy", "model.path")]
)
def test_other_drafts_are_saved_and_started_from(
    distilled: Distilled, files: Path, shrunk: Options, tmp_path: Path, kind: str, name: str, read_by: str
):
    """A small model is saved by itself, an MTP head with its policy. Fresh adapters change nothing."""
    fresh, lora = MTP | {"--draft.mtp-convention": "mimo"}, {"--lora.rank": "2"} if kind == "model" else {}
    if kind == "model":
        small = replace(ONE_LAYER, vocab_size=9, hidden_size=12)
        random = init_params(partial(init_decoder, small), jax.random.key(2), make_mesh(MeshConfig()))
        save_policy(tmp_path / "random", random, small)
        fresh = {"--draft.kind": "model", "--draft.path": str(tmp_path / "random"), "--model.feature-layers": "0"}
    learning = LEARNING | {"--responses": str(files / "responses.jsonl"), "--temperatures": "1"}
    options = shrunk | learning | fresh | lora | {"--out": str(tmp_path / "out")}
    assert launch.distill.main(argv("gsm8k", options)) == 0
    saved, report = tmp_path / "out" / name, json.loads((tmp_path / "out/distill.json").read_text())
    own = report["acceptance"][0]
    assert own["untrained"] + 0.1 < own["predicted"] <= 1
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == [name]
    assert read_made_for(saved) == MadeFor(report["policy"], 16, 2, 1.0, own["predicted"])

    before = build_experiment(parse_run(argv("gsm8k", shrunk | fresh), "", "")).networks
    again = MTP | {"--draft.kind": kind, f"--{read_by}": str(saved)}
    experiment = build_experiment(parse_run(argv("gsm8k", shrunk | again), "", ""))
    assert experiment.networks.draft.read_from == read_by
    networks = experiment.networks
    measured = AcceptanceMeter(experiment, networks.drafter, networks.params, 1.0).measure()
    assert measured.predicted == pytest.approx(own["predicted"], abs=1e-4)
    assert jax.tree.all(jax.tree.map(np.array_equal, experiment.networks.params.policy, before.params.policy))


def test_the_output_is_readable(distilled: Distilled):
    out, said = distilled
    parts = "answers: 2 of 4 batches", *(f"distillation: {done} of 60 steps" for done in (30, 60)), "temperature"
    for part in (*parts, "6 tokens", str(out / "draft"), str(out / "speculators"), "cost: ", "draft length"):
        assert part in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--out": None}, "out = None:"),
        ({"--out": "."}, "out = .:"),
        ({"--model.path": None}, "checkpoint = None:"),
        ({"--draft.kind": "none", "--rollout.draft-length": "0"}, "draft.kind = none: "),
        (MTP | {"--draft.mtp-convention": "mimo", "--dialect": "specforge"}, "dialect = specforge:...None...mtp"),
        ({"--start": "checkpoint"}, "start = checkpoint: "),
        ({"--dialect": "specforge"}, "dialect = specforge:...feature_layers...(0, 1)"),
        ({"--verifier": "me"}, "verifier = me: "),
        ({"--rollout.draft-length": "0"}, "rollout.draft_length = 0: "),
        ({"--distill.batch-size": "9"}, "distill.batch_size = 9:"),
        ({"--distill.batch-size": "128"}, "distill.batch_size = 128:...64"),
        ({"--distill.chunks": "0"}, "distill.chunks = 0: "),
        ({"--distill.steps": "-1"}, "distill.steps = -1: "),
        ({"--data.prompts": "13"}, "data.prompts = 13:...1...12"),
        (BARE, "rollout.function = test_examples:bare_rollout: ...row_rounds...drafted...accepted"),
        ({"--temperatures": "-1"}, "temperatures = (-1.0,): "),
        ({"--responses": "nowhere.jsonl"}, "responses = nowhere.jsonl: "),
        ({"--responses": "a", "--save-responses": "b"}, "save_responses = b: "),
        ({"--save-responses": "nowhere/b"}, "save_responses = nowhere/b: "),
    ],
)
def test_distill_refuses(refusal: Refusal, shrunk: Options, tmp_path: Path, options: dict[str, Any], message: str):
    (tmp_path / "kept").touch()
    small = shrunk | SMALL | {"--out": "out"} | options
    if "--draft.kind" in options:
        small["--draft.vocab-size"] = None
    if "--rollout.draft-length" in options:
        small["--rollout.draft-lengths"] = None
    assert_refused(refusal(launch.distill.main, argv("gsm8k", small)), message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed.jsonl:1: "),
        ('{"prompt": "1 ?"}', "malformed.jsonl:1:...'response'"),
        ('{"prompt": "1 ?", "tokens": [1, 9]}', "malformed.jsonl:1:...'tokens'"),
        ('{"prompt": "1 ?", "tokens": []}', "responses = ...must hold at least one answer...empty"),
        ("", "malformed.jsonl: "),
        ('{"prompt": "1 ?", "response": "1"}', "distill.batch_size = 16:...1"),
    ],
)
def test_distill_refuses_responses(refusal: Refusal, files: Path, shrunk: Options, line: str, message: str):
    path = files / "malformed.jsonl"
    path.write_text(line)
    said = refusal(launch.distill.main, argv("gsm8k", shrunk | SMALL | {"--out": "out", "--responses": str(path)}))
    assert_refused(said, message)
