"""Refusals of the programs: exit code 2, one line that says why, and nothing done."""

from pathlib import Path

import pytest

import launch.generate
import launch.train
from launch.build.experiment import build_experiment
from launch.cli.options import parse_run
from specjax.checkpoint import Checkpointer
from specjax.train.train_step import init_train_state
from tests.launch.programs import Options, Refusal, argv

KL, BEST = {"--loss.kl-coefficient": "0.1"}, {"--checkpoint.best": "eval/accuracy"}
PLAIN = {"--draft.kind": "none", "--rollout.draft-length": "0"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--data.train": "nowhere.jsonl"}, "nowhere.jsonl: cannot read it: No such file or directory"),
        ({"--data.answer-field": "solution"}, "train.jsonl:1: no field 'solution'; it has 'question', 'answer'"),
        ({"--model.path": "nowhere"}, "model.path = nowhere: no such directory"),
        ({"--model.path": "nowhere", "--data.tokenizer": "bytes"}, "model.path = nowhere: no config.json there"),
        ({"--model.feature-layers": "0 1 7"}, "feature_layers = (0, 1, 7): must be distinct, ascending and within"),
        ({"--mesh.data": "9"}, "mesh = (9, 1, 1): needs 9 devices, 8 present"),
        ({"--mesh.data": "0"}, "mesh.data = 0: must be at least 1"),
        ({"--mesh.data": "3"}, "data.prompts = 4: must be a multiple of mesh.data x mesh.fsdp = 3"),
        ({"--microbatches": "3"}, "microbatches = 3: must divide the 16 sequences of a data shard that train"),
        ({"--updates.minibatches": "3", "--microbatches": "2"}, "updates.minibatches x microbatches = 3 x 2: must"),
        ({"--selection.groups": "5"}, "selection.groups = 5: must be a multiple of mesh.data x mesh.fsdp = 1, and at"),
        ({"--selection.overlong-buffer": "999"}, "overlong_buffer = 999: must be at most the length budget"),
        ({"--reference-every": "2"}, "reference_every = 2: must be 0 without a kl_coefficient"),
        ({"--updates.recompute-old": "True"}, "recompute_old = True: must be False with one update"),
        ({"--updates.epochs": "2", "--loss.importance": "icepop"}, "importance = icepop: with several updates "),
        ({"--loss.kl-in": "reward"}, "kl_in = reward: must be loss without a kl_coefficient"),
        (KL | {"--loss.kl-in": "reward"}, "kl_in = reward: must go with advantage.scale = batch or none"),
        (KL | {"--loss.kl-in": "token", "--advantage.scale": "batch"}, "kl_in = token: must go with advantage."),
        ({"--loss.importance": "icepop", "--loss.importance-floor": "3"}, "importance_floor = 3.0: must be at most "),
        ({"--data.prompts": "100"}, "data.prompts = 100: must be between 1 and 12"),
        ({"--data.max-prompt-tokens": "2"}, "usable prompts"),
        ({"--rollout.law.top-p": "0.9"}, "allowed only with allow_truncated_law"),
        ({"--reward.scorer": "nowhere:score"}, "reward.scorer = nowhere:score: ModuleNotFoundError"),
        ({"--reward.time-limit-s": "0"}, "reward.time_limit_s = 0.0: must be above 0 and finite"),
        ({"--draft.vocab-size": "100"}, "vocab_size = 100"),
        ({"--draft.kind": "none"}, "rollout.draft_length = 2: must be 0 with draft.kind none"),
        ({"--draft.kind": "none", "--rollout.draft-lengths": "0 2"}, "rollout.draft_lengths = (0, 2): must be (0,)"),
        ({"--rollout.stop-tokens": "0 9"}, "rollout.stop_tokens = (0, 9): must be within 0 .. 8"),
        ({"--rollout.phases": "4 40 4 39"}, "rollout.phases = ((4, 40), (4, 39)): a window of 39 holds no prompt"),
        ({"--eval.every": "1", "--eval.samples": "0"}, "eval.samples = 0: must be at least 1"),
        ({"--eval.every": "1", "--eval.prompts": "0"}, "eval.prompts = 0: must be at least 1"),
        ({"--steps": "-1"}, "steps = -1: must be at least 1"),
        ({"--checkpoint.keep": "0"}, "checkpoint.keep = 0: must be at least 1"),
        (BEST, "must be a multiple of eval.every = 0 for checkpoint.best = eval/accuracy"),
        (BEST | {"--checkpoint.every": "4", "--eval.every": "3"}, "checkpoint.every = 4: must be a multiple of "),
        ({"--seed": "-1"}, "seed = -1: must be between 0 and"),
        ({"--profile-step": "9", "--steps": "8"}, "profile_step = 9: must be between 0 and steps = 8"),
        ({"--log.samples": "-1"}, "log.samples = -1: must be at least 0"),
        ({"--warmup.steps": "1", "--warmup.batch-size": "2"}, "has no solution to learn from"),
        (PLAIN | {"--distill.steps": "1"}, "draft.kind = none: has no parameters to distil"),
        ({"--distill.steps": "1", "--distill.batch-size": "5000"}, "must be at most 1024, the answers of the first"),
        ({"--speedup.slots": "4", "speedup.prompts": 4}, "speedup.prompts = 4: must be at most 3, the usable"),
        ({"--speedup.slots": "2", "speedup.prompts": 3, "--mesh.data": "2"}, "speedup.prompts = 3: must be a mult"),
        ({"--rollout.draft-lengths": "0 2", "--cost-table": "none.json"}, "cost_table = none.json: no table of costs"),
        ({"--cost-table": "t.json"}, "cost_table = t.json: must be none without rollout.draft_lengths"),
        ({"--speedup.slots": "0"}, "speedup.slots = (0,): each must be at least 1"),
        (PLAIN | {"--speedup.slots": "1"}, "(1,): must be empty"),
    ],
)
def test_training_refuses(refusal: Refusal, shrunk: Options, options: Options, message: str):
    assert message in refusal(launch.train.main, argv("gsm8k", shrunk | options))


def test_training_refuses_what_names_no_run(refusal: Refusal, shrunk: Options, tmp_path: Path):
    assert "CONFIG = gms8k: must be one of gsm8k, " in refusal(launch.train.main, argv("gms8k", shrunk))
    unknown = refusal(launch.train.main, ["gsm8k", "--data.promts", "4"])
    assert "--data.promts" in unknown and "did you mean --data.prompts?" in unknown
    assert refusal(launch.train.main, ["gsm8k"]).startswith("model.path = None: must be ")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    taken = refusal(launch.train.main, argv("gsm8k", shrunk | {"--out": str(tmp_path)}))
    assert taken.startswith(f"out = {tmp_path}: holds a run already")


def test_a_line_without_the_field_is_named(refusal: Refusal, shrunk: Options, files: Path):
    path = files / "incomplete.jsonl"
    path.write_text('{"question": "1 ?", "answer": "#### 1"}\n\n{"question": "2 ?", "anser": "#### 2"}\n')
    said = refusal(launch.train.main, argv("gsm8k", shrunk | {"--data.train": str(path)}))
    assert said == f"{path}:3: no field 'answer'; it has 'question', 'anser'"


def save_as_it_starts(run: Path, options: Options, draft_vocabulary: list[int] | None) -> None:
    """A checkpoint of networks that nobody has trained."""
    experiment = build_experiment(parse_run(argv("gsm8k", options), "", ""))
    state = init_train_state(experiment.networks.params, experiment.config, experiment.mesh)
    with Checkpointer(run / "checkpoints", keep=1) as saves:
        saves.save(1, state, {}, {"draft_vocabulary": draft_vocabulary})


def test_generate_refuses(refusal: Refusal, shrunk: Options, tmp_path: Path):
    def said(prompt: str, options: Options) -> str:
        return refusal(launch.generate.main, [*argv("gsm8k", shrunk | options), "--prompt", prompt])

    assert said("1 ?", {"--checkpoint": str(tmp_path)}) == f"checkpoint = {tmp_path}: no checkpoints there"
    (tmp_path / "checkpoints").mkdir()
    assert said("1 ?", {"--checkpoint": str(tmp_path)}) == f"checkpoint: {tmp_path}/checkpoints: no save"
    save_as_it_starts(tmp_path, shrunk, None)
    wider = {"--checkpoint": str(tmp_path), "draft.intermediate_size": 24}
    assert "expected float32[24, 16]" in said("1 ?", wider)
    assert said("1 " * 50, {}) == "prompt: must take 1 .. 40 tokens (data.max_prompt_tokens)"
    assert said("1 ?", {"--samples": "0"}) == "samples = 0: must be at least 1"


def test_generate_refuses_a_draft_of_another_vocabulary(refusal: Refusal, shrunk: Options, tmp_path: Path):
    """The vocabulary has the same size, and other tokens than the problems would have chosen."""
    options = shrunk | {"--draft.vocab-size": "4"}
    save_as_it_starts(tmp_path, options, [0, 1, 2, 3])
    said = refusal(launch.generate.main, [*argv("gsm8k", options | {"--checkpoint": str(tmp_path)}), "--prompt", "1 ?"])
    assert said == f"checkpoint = {tmp_path}: the problems are others, and with them the draft's vocabulary"
