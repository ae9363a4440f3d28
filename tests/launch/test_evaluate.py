"""launch.evaluate as a user runs it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import launch.evaluate
import launch.evaluation.sampler
from launch.cli.options import parse_run
from launch.data.batches import prompts_per_batch
from launch.evaluation.options import EvaluateArgs
from launch.evaluation.sampler import Evaluate, Sampler
from launch.evaluation.statistics import over_prompts, pass_at_k
from launch.setup.experiment import build_experiment
from specjax.drafters import Drafter, NGramDrafter, NoDrafter
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.types import Policy
from tests.launch.checkpoints import write_problems
from tests.launch.programs import DRAFT_LENGTH, Options, Refusal, argv, leave_run
from tests.refusals import assert_refused
from tests.specjax.training import networks as small_networks

HERE = Path(__file__).parent
POLICY, _ = small_networks()


@pytest.fixture(scope="module")
def asked(shrunk: Options) -> Options:
    return shrunk | {"--rollout.verifier": "coupled", "--samples": "4", "--reward.scorer": "exact"}


@pytest.fixture(scope="module")
def run(files: Path, asked: Options) -> Path:
    leave_run(files / "run", build_experiment(parse_run(argv("gsm8k", asked | {"--samples": None}), "", "")))
    return files / "run"


def evaluated(tmp_path: Path, options: Options) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run an evaluation. Return the results and the completions."""
    out = {"--json": str(tmp_path / "numbers.json"), "--save": str(tmp_path / "completions.jsonl")}
    assert launch.evaluate.main(argv("gsm8k", options | out)) == 0
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    return json.loads((tmp_path / "numbers.json").read_text()), [json.loads(line) for line in lines]


def test_completions_do_not_depend_on_the_draft_and_numbers_follow_from_them(
    files: Path, run: Path, asked: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Evaluate with the draft of a run, and with the recipe's random one."""
    paths = files / "test.jsonl", tmp_path / "more.jsonl"
    write_problems(paths[1], ["1", "2", "3", "1", "2"])
    asked = asked | {"--files": " ".join(map(str, paths)), "--k": "4 2"}
    drafted, completions = evaluated(tmp_path, asked | {"--checkpoint": str(run)})
    said = capsys.readouterr().out
    assert "tokens/s" in said and f"at draft length {DRAFT_LENGTH}" in said and "random weights" not in said
    assert "final_answer" not in said
    assert evaluated(tmp_path, asked)[1] == completions
    assert "without the draft: it has random weights" in capsys.readouterr().out
    # At its newest step the run did not draft.
    (run / "metrics.jsonl").write_text('{"step": 1, "rollout/draft_length": 0.0}\n')
    options = {"--checkpoint": str(run), "--rollout.draft-lengths": f"0 {DRAFT_LENGTH}"}
    undrafted, same = evaluated(tmp_path, asked | options)
    assert (undrafted["draft_length"], same) == (0, completions)
    assert "without the draft: the run did not use it in step" in capsys.readouterr().out
    assert (drafted["recipe"], drafted["checkpoint"], drafted["draft_length"]) == ("gsm8k", str(run), DRAFT_LENGTH)
    assert drafted["versions"].startswith("Python 3") and drafted["device"]
    for path, found, prompts in zip(paths, drafted["sets"], (3, 5), strict=True):
        rewards = [line["reward"] for line in completions if line["set"] == found["name"] == str(path)]
        assert [line["id"] for line in completions if line["set"] == str(path)] == sorted([*range(prompts)] * 4)
        right = np.array(rewards).reshape(prompts, 4) > 0.5
        assert list(found["measures"]) == ["accuracy", "pass@2", "pass@4", "majority@2", "majority@4"]
        for name, values in {"accuracy": right.mean(axis=1), "pass@2": pass_at_k(right, 2)}.items():
            assert tuple(found["measures"][name].values()) == pytest.approx(over_prompts(values))
        assert found["acceptance_length"] >= 1 and found["tokens_per_s"] > 0 and found["unscored"] == 0


@pytest.mark.parametrize("drafter, length", [(NGramDrafter(15), 2), (NoDrafter(), 0)], ids=["ngram", "none"])
def test_evaluation_uses_the_fixed_draft_length(drafter: Drafter, length: int, monkeypatch: pytest.MonkeyPatch):
    """Validation does the same. Without a draft the length is 0. Neither uses an 8-bit copy of the policy."""
    taken: list[tuple[Policy, RolloutConfig]] = []
    monkeypatch.setattr(launch.evaluation.sampler, "make_generate", lambda *parts: taken.append((parts[0], parts[2])))
    config = SimpleNamespace(rollout=RolloutConfig(draft_length=2, draft_lengths=(0, 1, 5)), seed=0)
    config.eval = SimpleNamespace(samples=4)
    networks = SimpleNamespace(policy=replace(POLICY, eight_bit="int8"), drafter=drafter)
    tokenizer = SimpleNamespace(stop_tokens=(0,))
    experiment: Any = SimpleNamespace(config=config, networks=networks, mesh=None, rollout_fn=None, tokenizer=tokenizer)
    experiment.problems, experiment.rollout_on = SimpleNamespace(held_out=[]), lambda problems: config.rollout
    assert Sampler(experiment, drafter, 4).draft_length == length
    Evaluate(experiment, lambda rollout, prompts: None, [])  # pyright: ignore[reportArgumentType]
    plain = POLICY, RolloutConfig(group_size=4, draft_length=0)
    assert taken == [(POLICY, RolloutConfig(group_size=4, draft_length=length))] * 2 + [plain]


def test_unscored_completions_are_reported_and_count_as_wrong(
    asked: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Evaluate greedily on two prompts. A completion is correct or not scored, depending on the answer alone."""
    monkeypatch.syspath_prepend(HERE)
    write_problems(tmp_path / "test.jsonl", ["value 1", "raise an error", "value 0"])
    own = {"--data.held-out": str(tmp_path / "test.jsonl"), "--reward.scorer": "sample_scorers:by_answer"}
    own |= {"--rollout.law.temperature": "0", "--prompts": "2"}
    numbers, completions = evaluated(tmp_path, asked | own)
    said = capsys.readouterr().out
    assert "4 of 8" in said and "reward.scorer = sample_scorers:by_answer" in said
    # The scorer's module has no final answers, so that there are no majorities.
    assert "final_answer" in said
    (found,) = numbers["sets"]
    assert (found["name"], found["prompts"], found["unscored"]) == ("held-out", 2, 4)
    assert list(found["measures"]) == ["accuracy", "pass@2", "pass@4"]
    assert found["measures"]["accuracy"]["value"] == 0.5
    assert [line["reward"] for line in completions] == [1.0] * 4 + [None] * 4
    # All samples of a prompt are the same greedy completion.
    assert len({(line["id"], line["completion"]) for line in completions}) == 2


@pytest.mark.parametrize(
    "sequences, samples, prompts, size", [(8, 2, 100, 4), (8, 3, 100, 2), (8, 16, 100, 2), (512, 1, 5, 6)]
)
def test_a_batch_has_about_the_requested_number_of_sequences(sequences: int, samples: int, prompts: int, size: int):
    """The batch is padded to a multiple of the two data shards."""
    assert prompts_per_batch(sequences, samples, prompts, make_mesh(MeshConfig(data=2))) == size


def test_k_is_the_powers_of_two_by_default():
    assert EvaluateArgs(samples=1).larger_k == ()
    assert EvaluateArgs(samples=12).larger_k == (2, 4, 8)
    assert EvaluateArgs(samples=12, k=(12, 3, 1, 3)).larger_k == (3, 12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"--model.path": None}, "checkpoint = None: "),
        ({"--samples": "0"}, "samples = 0: "),
        ({"--prompts": "0"}, "prompts = 0: "),
        ({"--k": "2 5"}, "k = (2, 5): "),
        ({"--save": "nowhere/x.jsonl"}, "save = nowhere/x.jsonl: "),
        ({"--json": "."}, "json = .: "),
        ({"--files": "nowhere.jsonl"}, "files = nowhere.jsonl: "),
        ({"--data.max-prompt-tokens": "2"}, "held-out:...1...2"),
        ({"--rollout.law.top-p": "2"}, "rollout.law.top_p = 2.0: "),
    ],
)
def test_it_refuses(refusal: Refusal, asked: Options, options: dict[str, Any], message: str):
    assert_refused(refusal(launch.evaluate.main, argv("gsm8k", asked | options)), message)
