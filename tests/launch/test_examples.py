"""Each example runs in launch.train with the command in its header."""

import ast
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import launch.compare
import launch.evaluate
import launch.export
import launch.generate
import launch.train
from configs.schema import ModelConfig
from examples.bigram_drafter import Bigram
from examples.new_family import gated_unit
from examples.plain_rollout import rollout as plain_rollout
from examples.tool_user import AskAgain, calculate
from launch.cli.options import parse_run
from launch.environments.answers import Step
from launch.environments.tools import Tools
from launch.setup.drafts.base import Draft, DraftContext
from launch.setup.experiment import build_experiment
from specjax import (
    MeshConfig,
    NGramDrafter,
    NoDrafter,
    Params,
    Prompts,
    Rollout,
    RolloutConfig,
    SamplingLaw,
    make_mesh,
    speculative_rollout,
)
from specjax.checkpoint import Checkpointer
from specjax.testing import assert_cache_consistent, assert_lossless, assert_same_rollout, tiny_policy
from specjax.train.loss import LossConfig, LossInputs, LossOutput
from tests.launch.programs import LEAST, ONE_LAYER, Refusal, argv, metrics
from tests.refusals import assert_refused

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py") if path.stem != "one_file")
PROMPTS = Prompts(jnp.array([[0, 1, 0], [2, 1, 0]]), jnp.array([3, 2]), id=jnp.array([0, 1]))


def command(example: str) -> list[str]:
    """Return the options of the first command in the example's header."""
    header = ast.get_docstring(ast.parse((FOLDER / f"{example}.py").read_text())) or ""
    line = next(line for line in header.replace("\\\n", " ").splitlines() if "python -m launch.train tiny" in line)
    return shlex.split(line)[4:]


def run(example: str | None, out: Path, *options: str) -> list[dict[str, Any]]:
    """Run the example's command with few steps and small sizes. Return its metrics."""
    small = argv("tiny", LEAST | {"--steps": "2", "--rollout.verifier": "coupled", "--out": str(out)})
    own = [] if example is None else command(example)
    assert launch.train.main([*small, "--speedup.steps", "0", *own, *options]) == 0
    return metrics(out)


def test_examples_are_short():
    assert all(len((FOLDER / f"{name}.py").read_text().splitlines()) < 60 for name in NAMES)


def test_a_forked_rollout_generates_the_same_tokens_and_a_reward_gives_partial_credit(tmp_path: Path):
    reward = command("custom_reward")
    forked, builtin = run("fork_rollout", tmp_path / "fork", *reward), run("custom_reward", tmp_path / "builtin")
    for name in ("rollout/tokens", "rollout/length_max", "reward/mean"):
        assert [step[name] for step in forked] == [step[name] for step in builtin], name
    assert all(one["rollout/rounds"] > other["rollout/rounds"] for one, other in zip(forked, builtin, strict=True))
    assert all(0 <= step["reward/mean"] < 1 and step["reward/failed"] == 0 for step in builtin)


@pytest.mark.parametrize("law", [SamplingLaw(0.8), SamplingLaw(1.3, top_k=2)], ids=str)
def test_row_58_a_rollout_from_scratch_generates_the_tokens_of_the_library(law: SamplingLaw):
    """With the same lengths and log-probs, where rows end at a stop token and where they end at the budget."""
    policy, weights = tiny_policy(vocab_size=4)
    config = RolloutConfig(
        group_size=4, max_new_tokens=6, draft_length=0, verifier="coupled", law=law, stop_tokens=(3,)
    )
    rollout = assert_same_rollout(policy, NoDrafter(), Params(weights, {}), PROMPTS, config, rollout_fn=plain_rollout)
    assert rollout.stopped is not None and rollout.law is not None and rollout.full is not None
    assert 0 < rollout.stopped.sum() < len(rollout.lengths)


def assert_resumes(example: str, directory: Path, names: tuple[str, ...], *options: str) -> list[dict[str, Any]]:
    """Verify that a run that goes on from step 2 has these metrics of an unbroken one. Return the metrics."""
    options = ("--checkpoint.every", "2", "--steps", "4", *options)
    whole = run(example, directory / "whole", *options)
    shutil.copytree(directory / "whole", directory / "part")
    shutil.rmtree(directory / "part/checkpoints/4")
    resumed = run(example, directory / "part", *options, "--resume")
    assert (directory / "part/checkpoints/4").is_dir()
    assert [[step[name] for name in names] for step in resumed] == [[step[name] for name in names] for step in whole]
    return whole


@pytest.mark.slow
def test_a_drafter_learns_and_is_resumed_and_reported(tmp_path: Path):
    same = ("loss/draft", "loss/policy", "rollout/tokens", "draft/predicted_acceptance", "draft/measured_acceptance")
    whole = assert_resumes("bigram_drafter", tmp_path, same, "--draft-optimizer.learning-rate", "0.1")
    assert whole[-1]["loss/draft"] < whole[0]["loss/draft"]
    assert "examples.bigram_drafter:build" in (tmp_path / "part/report.html").read_text()


@pytest.mark.usefixtures("steps_once")
def test_a_loss_logs_its_own_metric_resumes_and_names_the_best_save(tmp_path: Path):
    same = ("loss/ratio_deviation", "loss/policy", "rollout/tokens")
    options = ("--updates.minibatches", "2", "--checkpoint.best", "loss/ratio_deviation")
    whole = assert_resumes("custom_loss", tmp_path, same, *options)
    assert whole[0]["loss/ratio_deviation"] > 0
    assert "loss/ratio_deviation" in (tmp_path / "whole/report.html").read_text()
    with Checkpointer(tmp_path / "part/checkpoints", best="loss/ratio_deviation") as saves:
        assert saves.best_step() == max((2, 4), key=lambda step: (whole[step - 1]["loss/ratio_deviation"], step))


def test_a_tool_calculates_and_an_environment_asks_again():
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "3 * (4 - -5) / %s"}}</tool_call>'
    answered, refused = (Tools([calculate], "hermes").step(call % divisor).observation[0] for divisor in ("2", "f()"))
    assert isinstance(answered, dict) and answered["content"] == "13.5"
    assert isinstance(refused, dict) and "f(): must be numbers" in refused["content"]
    environment = AskAgain()
    environment.begin({"prompt": "1+2=", "answer": "3", "columns": {}}, seed=0)
    assert environment.step("#4") == Step("\n1+2=") and environment.step("1+2=3\n#3") == Step(reward=0.5, done=True)


@pytest.mark.slow
def test_an_environment_trains(tmp_path: Path):
    logged = run("tool_user", tmp_path)
    assert all(step["rollout/turns"] > 0 and step["rollout/failed"] == 0 for step in logged)
    assert any(step["rollout/observed_tokens"] > 0 for step in logged)


@pytest.mark.slow
def test_a_custom_rollout_and_loss_can_be_compared(tmp_path: Path):
    options = {"--draft.kind": "none", "--draft.lookup.kind": "ngram", "--steps": "1", "--draft-lengths": "2"}
    options |= {"--loss.function": "examples.custom_loss:loss", "--rollout.function": "examples.fork_rollout:rollout"}
    found = tmp_path / "found.json"
    assert launch.compare.main(argv("tiny", LEAST | options | {"--json": str(found)})) == 0
    assert list(json.loads(found.read_text())["arms"]) == ["autoregressive", "2", "automatic"]


@pytest.mark.slow
def test_a_family_trains_and_is_evaluated(tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]):
    logged = run("new_family", tmp_path / "run", "--reward.scorer", "examples.custom_reward:near")
    assert all(step["grad_norm/policy"] > 0 and step["rollout/acceptance_length"] >= 1 for step in logged)
    # Without distill.steps, which these programs do not read.
    networks = command("new_family")[:6]
    least = [*argv("tiny", LEAST), *networks, "--checkpoint", str(tmp_path / "run")]
    scores = tmp_path / "scores.json"
    assert launch.evaluate.main([*least, "--json", str(scores)]) == 0
    assert json.loads(scores.read_text())["sets"]
    capsys.readouterr()
    line = refusal(launch.export.main, [*least, "--out", str(tmp_path / "out")])
    assert "model.family = examples.new_family:gated_unit" in line


def bare_rollout(*arguments: Any) -> Rollout:
    """Custom rollout that returns only the required fields."""
    rollout = speculative_rollout(*arguments)
    return Rollout(rollout.tokens, rollout.lengths)


def short_rollout(*arguments: Any) -> Rollout:
    """Faulty rollout with one column too few."""
    rollout = bare_rollout(*arguments)
    return replace(rollout, tokens=rollout.tokens[:, 1:])


def mean_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Faulty loss that is not per token."""
    return LossOutput(jnp.mean(inputs.theta), {})


REFUSED_LATE = {"rollout.function": f"{__name__}:short_rollout", "loss.function": f"{__name__}:mean_loss"}
REFUSED = [
    ("no_such.module:it", "No module named 'no_such'...package.module:name"),
    ("specjax.keys:no_such", "no attribute 'no_such'...package.module:name"),
    ("launch.run.directory:METRICS_FILE", "METRICS_FILE is not a function...package.module:name"),
]


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        *((option, name, "") for option, name in REFUSED_LATE.items()),
        *((option, *REFUSED[0]) for option in (*REFUSED_LATE, "model.family", "draft.kind")),
        *(("draft.kind", *each) for each in REFUSED[1:]),
    ],
)
def test_a_function_that_is_not_there_or_does_not_fit_is_refused_before_the_run(
    option: str, name: str, reason: str, refusal: Refusal, tmp_path: Path
):
    words = [*argv("tiny", LEAST), f"--{option}", name, "--out", str(tmp_path / "run"), "--speedup.steps", "0"]
    assert_refused(refusal(launch.train.main, words), f"{option} = {name}: ...{reason}")
    assert not (tmp_path / "run").exists()


def test_unknown_kernels_are_refused(refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECJAX_KERNELS", "fast")
    line = refusal(launch.train.main, [*argv("tiny", LEAST), "--out", str(tmp_path / "run")])
    assert line.startswith("SPECJAX_KERNELS = fast: ")


def by_problems(context: DraftContext) -> Draft:
    """Draft builder whose parameters have the shape of the problems."""
    return Draft(Bigram(), {"table": jnp.zeros((len(context.problems), context.policy.vocab_size))})


@pytest.mark.slow
def test_a_rollout_of_tokens_and_lengths_alone_trains_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare = ("--rollout.function", f"{__name__}:bare_rollout")
    logged = run(None, tmp_path / "run", *bare, "--rollout.draft-lengths", "0", "2", "--checkpoint.every", "1")
    assert len(logged) == 2 and logged[1]["rollout/acceptance_length"] is None
    assert "checkpoint.best = rollout/acceptance_length" in (tmp_path / "run/diary.jsonl").read_text()
    least = [*argv("tiny", LEAST), *bare, "--checkpoint", str(tmp_path / "run")]
    assert launch.evaluate.main(least) == 0
    assert launch.generate.main([*least, "--prompt", "1+1="]) == 0
    assert "tokens" in capsys.readouterr().out


def test_a_custom_builder_gets_the_problems_without_training():
    config = parse_run(argv("tiny", LEAST | {"--draft.kind": f"{__name__}:by_problems"}), "", "")
    tables = [build_experiment(config, training).networks.params.draft["table"] for training in (True, False)]
    assert tables[0].shape == tables[1].shape and len(tables[0]) > 0


def test_the_bigram_drafter_is_lossless():
    policy, weights = tiny_policy(vocab_size=4)
    config = RolloutConfig(group_size=20_000, max_new_tokens=4, draft_length=2, stop_tokens=(3,))
    assert_lossless(policy, Bigram(), Params(weights, {"table": jnp.eye(4)}), config, prompt=(0, 1, 0))


def test_a_custom_family_rolls_back_rejected_tokens():
    """Its states equal those of a prefill of the committed tokens, and its tokens those of plain decoding."""
    model = ModelConfig(architecture=replace(ONE_LAYER, vocab_size=4), dtype="float32")
    policy, weights = gated_unit(model, make_mesh(MeshConfig()), jax.random.key(0))
    config = RolloutConfig(group_size=4, max_new_tokens=12, draft_length=2, verifier="coupled", stop_tokens=(3,))
    drafter, params = NGramDrafter(4, min_n=1, max_n=2), Params(weights, {})
    assert_cache_consistent(policy, drafter, params, PROMPTS, config)
    assert_same_rollout(policy, drafter, params, PROMPTS, config)
