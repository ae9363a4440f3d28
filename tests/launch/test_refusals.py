"""Bad input to the programs: exit code 2, a one-line reason, and no other effect."""

from pathlib import Path

import pytest

import launch.generate
import launch.train
from launch.cli.options import parse_run
from launch.setup.experiment import build_experiment
from tests.launch.programs import Options, Refusal, argv, leave_run
from tests.refusals import assert_refused

KL, BEST = {"--loss.kl-coefficient": "0.1"}, {"--checkpoint.best": "eval/accuracy"}
PLAIN = {"--draft.kind": "none", "--rollout.draft-length": "0"}
LAG, AHEAD = {"--asynchronous.lag": "1"}, "--asynchronous.rollout-mesh"
CARRY = {"--rollout.carry-over": "0.5"}
MESH = "asynchronous.rollout_mesh"
BITS, UNCORRECTED = {"--model.rollout-dtype": "fp8"}, {"--loss.importance-cap": "None"}
BYTES = {"--data.tokenizer": "bytes", "--data.chat-template-kwargs": "{}"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--data.train": "nowhere.jsonl"}, "data.train = nowhere.jsonl:"),
        ({"--data.answer-field": "solution"}, "data.answer_field = solution: ...train.jsonl:1...'question'...'answer'"),
        ({"--model.path": "nowhere"}, "model.path = nowhere:"),
        (BYTES | {"--model.path": "nowhere"}, "model.path = nowhere:...config.json"),
        ({"--model.feature-layers": "0 1 7"}, "feature_layers = (0, 1, 7):"),
        ({"--mesh.data": "9"}, "mesh = (9, 1, 1, 1):...9...8"),
        ({"--mesh.data": "0"}, "mesh.data = 0:...1"),
        ({"--mesh.data": "3"}, "data.prompts = 4:...mesh.data...mesh.fsdp...3"),
        ({"--microbatches": "3"}, "microbatches = 3:...16"),
        ({"--updates.minibatches": "3", "--microbatches": "2"}, "updates.minibatches x microbatches = 3 x 2:"),
        ({"--selection.groups": "5"}, "selection.groups = 5:...mesh.data...mesh.fsdp...1"),
        ({"--selection.overlong-buffer": "999"}, "overlong_buffer = 999:"),
        ({"--reference-every": "2"}, "reference_every = 2:...0...kl_coefficient"),
        ({"--updates.recompute-old": "True"}, "recompute_old = True:...False"),
        ({"--updates.epochs": "2", "--loss.importance": "icepop"}, "importance = icepop:"),
        ({"--loss.kl-in": "reward"}, "loss.kl_in = reward:...loss...kl_coefficient"),
        (KL | {"--loss.kl-in": "reward"}, "kl_in = reward:...advantage.scale...batch...none"),
        (KL | {"--loss.kl-in": "token", "--advantage.scale": "batch"}, "kl_in = token:...advantage.scale"),
        ({"--loss.importance": "icepop", "--loss.importance-floor": "3"}, "loss.importance_floor = 3.0:"),
        ({"--data.prompts": "100"}, "data.prompts = 100:...1...12"),
        ({"--data.max-prompt-tokens": "2"}, "data.max_prompt_tokens = 2: all...must be at least"),
        ({"--reward.scorer": "nowhere:score"}, "reward.scorer = nowhere:score: ModuleNotFoundError"),
        ({"--reward.time-limit-s": "0"}, "reward.time_limit_s = 0.0:...0"),
        ({"--model.rollout-dtype": "int4"}, "model.rollout_dtype = int4:...int8"),
        (BITS | UNCORRECTED, "model.rollout_dtype = fp8:...importance_cap"),
        (BITS | {"--updates.epochs": "2"}, "model.rollout_dtype = fp8:...recompute_old"),
        (LAG | UNCORRECTED, "asynchronous.lag = 1:...0...importance_cap"),
        (LAG | {"--updates.epochs": "2"}, "asynchronous.lag = 1:...0...recompute_old"),
        (LAG | {"--mesh.data": "2", f"{AHEAD}.data": "3"}, f"{MESH} = (3, 1, 1, 1):...3...2...mesh = (2, 1, 1, 1)"),
        (LAG | {f"{AHEAD}.tensor": "2"}, f"{MESH} = (1, 1, 1, 2):...2...data x fsdp"),
        (LAG | {f"{AHEAD}.tensor": "2", "--mesh.data": "2"}, f"vocab_size = 9: ...multiple of {MESH}.tensor = 2"),
        ({f"{AHEAD}.data": "2"}, f"{MESH} = (2, 1, 1, 1):...asynchronous.lag"),
        ({"--asynchronous.lag": "8", "--steps": "8"}, "asynchronous.lag = 8:...steps = 8"),
        (CARRY | UNCORRECTED, "rollout.carry_over = 0.5:...None...importance_cap"),
        (CARRY | {"--draft.lookup.kind": "history"}, "rollout.carry_over = 0.5:...history"),
        (CARRY | {"--rollout.phases": "4 40"}, "rollout.phases = ((4, 40),):...16"),
        ({"--rollout.carry-over": "0.2"}, "rollout.carry_over = 0.2: finishes 0 of data.prompts = 4...below 4"),
        (CARRY | {"--mesh.data": "4"}, "rollout.carry_over = 0.5: finishes 2 of...multiple of the 4 data shards"),
        ({"--rollout.max-age": "2"}, "rollout.max_age = 2:...carry_over"),
        (PLAIN | {"--draft.rollout-dtype": "int8"}, "draft.rollout_dtype = int8:...None...none"),
        ({"--draft.vocab-size": "100"}, "draft_vocab_size = 100:...9"),
        ({"--draft.kind": "none", "--rollout.draft-length": "2"}, "rollout.draft_length = 2:...0...draft.kind"),
        ({"--draft.kind": "none", "--rollout.draft-lengths": "0 2"}, "rollout.draft_lengths = (0, 2):...(0,)"),
        ({"--rollout.stop-tokens": "0 9"}, "rollout.stop_tokens = (0, 9):...0...8"),
        ({"--rollout.phases": "4 40 4 39"}, "rollout.phases = ((4, 40), (4, 39)):...window...39"),
        ({"--eval.every": "1", "--eval.samples": "0"}, "eval.samples = 0:...1"),
        ({"--eval.every": "1", "--eval.prompts": "0"}, "eval.prompts = 0:...1"),
        ({"--steps": "-1"}, "steps = -1:...1"),
        ({"--checkpoint.keep": "0"}, "checkpoint.keep = 0:...1"),
        (BEST, "checkpoint.every = 50: ...eval.every = 0...checkpoint.best = eval/accuracy"),
        (BEST | {"--checkpoint.every": "4", "--eval.every": "3"}, "checkpoint.every = 4:"),
        ({"--seed": "-1"}, "seed = -1:...0"),
        ({"--profile-step": "9", "--steps": "8"}, "profile_step = 9:...8"),
        ({"--log.samples": "-1"}, "log.samples = -1:...0"),
        ({"--warmup.steps": "1", "--warmup.batch-size": "2"}, "warmup.steps: ...problem 0...solution"),
        (PLAIN | {"--distill.steps": "1"}, "draft.kind = none:"),
        ({"--distill.steps": "1", "--distill.batch-size": "5000"}, "distill.batch_size = 5000: ...4096"),
        ({"--rollout.draft-lengths": "0 2", "--cost-table": "none.json"}, "cost_table = none.json:"),
        ({"--cost-table": "t.json"}, "cost_table = t.json:...rollout.draft_lengths"),
        ({"--speedup.steps": "-1"}, "speedup.steps = -1:...0"),
        (PLAIN | {"--speedup.steps": "1"}, "speedup.steps = 1: ...0"),
    ],
)
def test_training_refuses(refusal: Refusal, shrunk: Options, options: Options, message: str):
    assert_refused(refusal(launch.train.main, argv("gsm8k", shrunk | options)), message)


def test_options_that_do_not_fit_are_refused_together(refusal: Refusal, shrunk: Options):
    options = BEST | {"--cost-table": "t.json", "--distill.steps": "1", "--distill.batch-size": "5000"}
    refused = refusal(launch.train.main, argv("gsm8k", shrunk | options), refusals=3).splitlines()
    for line, field in zip(refused, ("checkpoint.every", "cost_table", "distill.batch_size"), strict=True):
        assert_refused(line, f"{field} = ")


def test_training_refuses_what_names_no_run(refusal: Refusal, shrunk: Options, tmp_path: Path):
    assert_refused(refusal(launch.train.main, argv("gms8k", shrunk)), "CONFIG = gms8k: ...gsm8k")
    unknown = refusal(launch.train.main, ["gsm8k", "--data.promts", "4"])
    assert_refused(unknown, "--data.promts...--data.prompts")
    assert_refused(refusal(launch.train.main, ["gsm8k"]), "model.path = None: ")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    taken = refusal(launch.train.main, argv("gsm8k", shrunk | {"--out": str(tmp_path)}))
    assert_refused(taken, f"out = {tmp_path}: ")


def test_a_line_without_the_field_is_named(refusal: Refusal, shrunk: Options, files: Path):
    path = files / "incomplete.jsonl"
    path.write_text('{"question": "1 ?", "answer": "#### 1"}\n\n{"question": "2 ?", "anser": "#### 2"}\n')
    said = refusal(launch.train.main, argv("gsm8k", shrunk | {"--data.train": str(path)}))
    assert_refused(said, f"data.answer_field = answer: {path}:3 has no such field; it has 'question', 'anser'")


def test_generate_refuses(refusal: Refusal, shrunk: Options, tmp_path: Path):
    def said(prompt: str, options: Options) -> str:
        return refusal(launch.generate.main, [*argv("gsm8k", shrunk | options), "--prompt", prompt])

    assert_refused(said("1 ?", {"--checkpoint": str(tmp_path)}), f"checkpoint = {tmp_path}: ")
    (tmp_path / "checkpoints").mkdir()
    assert_refused(said("1 ?", {"--checkpoint": str(tmp_path)}), f"checkpoint = {tmp_path}: ")
    leave_run(tmp_path, build_experiment(parse_run(argv("gsm8k", shrunk), "", "")))
    wider = {"--checkpoint": str(tmp_path), "draft.intermediate_size": 24}
    assert_refused(said("1 ?", wider), "checkpoint: ...params.draft...float32[16, 16]...float32[24, 16]")
    assert_refused(said("1 " * 50, {}), "prompt: ...1...40...data.max_prompt_tokens")
    assert_refused(said("1 ?", {"--samples": "-1"}), "samples = -1: ...0")


def test_generate_refuses_a_draft_of_another_vocabulary(refusal: Refusal, shrunk: Options, tmp_path: Path):
    """The vocabulary has the same size, but other tokens than those chosen from the problems."""
    options = shrunk | {"--draft.vocab-size": "4"}
    leave_run(tmp_path, build_experiment(parse_run(argv("gsm8k", options), "", "")), [0, 1, 2, 3])
    said = refusal(launch.generate.main, [*argv("gsm8k", options | {"--checkpoint": str(tmp_path)}), "--prompt", "1 ?"])
    assert_refused(said, f"checkpoint = {tmp_path}: ...vocabulary")
