"""A run that learns from a teacher: what it keeps and saves, how it goes on, and what is refused."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch.run.teacher_check
from configs.override import override
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.data.arithmetic import ALPHABET
from launch.data.tokenizers import CharacterTokenizer, HuggingFaceTokenizer
from launch.run.checks import check_run
from launch.run.summary import summarize
from launch.run.teacher_check import PROMPTS, check_teacher
from launch.setup.experiment import Experiment, build_experiment
from launch.setup.teacher import check_same_teacher, hint_template
from models.config import DecoderConfig
from models.decoder import init_decoder
from models.hf.save import save_policy
from models.params import init_params
from specjax.checkpoint_integrity import fingerprint
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rewards import no_reward
from specjax.types import Rollout, TrainState
from tests.launch.chat_tokenizers import write_chat_tokenizer
from tests.launch.programs import ONE_LAYER, SMALLEST, assert_same_run, metrics, run_to_the_end, saved_state
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("steps_once")
STEPS = 20
# Another shape than the policy's, and ids beyond the tokenizer's.
SHAPE = replace(ONE_LAYER, vocab_size=21, hidden_size=12, num_layers=2)
CONFIG = override(
    SMALLEST,
    {
        **{"name": "taught", "steps": STEPS, "probe_every": 0, "print_every": STEPS, "checkpoint.every": STEPS // 2},
        **{
            "reward.scorer": "none",
            "teacher.rewards": False,
            "eval.every": 0,
            "draft.kind": "none",
            "rollout.draft_length": 0,
        },
        **{"policy_optimizer.learning_rate": 0.1, "teacher.kind": "network", "teacher.hint": "solution"},
        # Characters of the built-in sums.
        **{"teacher.path": "elsewhere", "teacher.hint_text": "\n{hint}\n#"},
    },
)

Taught = tuple[RunConfig, TrainState, Experiment]


def write_teacher(directory: Path, shape: DecoderConfig = SHAPE, seed: int = 5) -> Path:
    mesh = make_mesh(MeshConfig(data=1))
    params = init_params(lambda key: init_decoder(shape, key), jax.random.key(seed), mesh)
    save_policy(directory, params, shape)
    return directory


run = partial(run_to_the_end, reward_fn=no_reward)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    directory = tmp_path_factory.mktemp("taught")
    path = write_teacher(directory / "teacher")
    config = override(CONFIG, {"out": str(directory / "run"), "teacher.path": str(path)})
    return config, *run(config)


def test_the_teacher_stays_to_the_byte_and_is_not_saved(taught: Taught):
    config, state, experiment = taught
    assert experiment.teacher is not None and fingerprint(state.teacher) == experiment.teacher.hash
    kept = experiment.with_state(state).teacher
    assert kept is not None and fingerprint(kept.params) == experiment.teacher.hash
    _, rest = saved_state(Path(str(config.out)), STEPS)
    assert rest["teacher"] is None
    lines = metrics(Path(str(config.out)))
    first, last = ([line["teacher/reverse_kl"] for line in part] for part in (lines[:5], lines[-5:]))
    assert np.mean(last) < 0.8 * np.mean(first)
    assert all(line["groups/sequences_with_advantage"] == 0 and line["update/empty"] == 0 for line in lines)
    assert "teacher: " in next(line for line in summarize(experiment, continuing=False) if "without rewards" in line)


def test_a_killed_run_goes_on_to_the_bit(taught: Taught, tmp_path: Path):
    config, directory = taught[0], Path(str(taught[0].out))
    copied = tmp_path / "copy"
    shutil.copytree(directory, copied)
    shutil.rmtree(copied / "checkpoints" / str(STEPS))
    stored = copied / "config.json"
    stored.write_text(stored.read_text().replace(str(directory), str(copied)))
    run(parse_run([str(copied), "--resume"], "", ""))
    assert_same_run(copied, directory, config.steps)


def test_another_teacher_is_refused(taught: Taught):
    config, _, experiment = taught
    extra = json.loads((Path(str(config.out)) / "checkpoints" / str(STEPS) / "extra/metadata").read_text())
    assert experiment.teacher is not None
    check_same_teacher(experiment.teacher, extra)
    with refuses(f"resume: the run learnt from a teacher with the hash {experiment.teacher.hash}...has None"):
        check_same_teacher(replace(experiment.teacher, hash=None), extra)


def test_a_run_without_a_scorer_needs_prompts_only(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(8)))
    changes = {"data.arithmetic": None, "data.train": str(path), "teacher.hint": "none"}
    changes["teacher.path"] = str(write_teacher(tmp_path / "teacher"))
    experiment = build_experiment(override(CONFIG, changes), takes_steps=True)
    assert {problem.answer for problem in experiment.problems.train} == {""}


def test_without_steps_no_teacher_is_read():
    assert build_experiment(CONFIG, training=False).teacher is None


def answers(experiment: Experiment, stopped: list[bool], last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the teacher's answers end so, each by the token `last`."""

    class Fake:
        def __init__(self, *args: object, **options: object) -> None: ...

        def generate(self, *args: object) -> tuple[Rollout, float]:
            ends = np.array([*stopped, *[False] * (PROMPTS - len(stopped))])
            return Rollout(np.full((PROMPTS, 1), last), np.ones(PROMPTS, int), ends), 0.0  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(launch.run.teacher_check, "Sampler", Fake)


@pytest.mark.parametrize(
    ("stopped", "ends_by", "said"),
    [
        ([True, True, False], 20, None),
        ([True, True, False], 14, "2 of 8 answers to training prompts end within 7 tokens, 2 as the policy's do"),
        ([False, False], 3, "0 of 8 answers ...WARNING: none ends; raise rollout.max_new_tokens"),
    ],
)
def test_a_teacher_must_end_as_the_policy_does(
    taught: Taught,
    stopped: list[bool],
    ends_by: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Test answers that end by the policy's stop token, 14, or by the teacher's own, 20."""
    experiment = taught[2]
    assert experiment.teacher is not None
    experiment = replace(experiment, teacher=replace(experiment.teacher, stop_tokens=(14, 20)))
    answers(experiment, stopped, ends_by, monkeypatch)
    if said is None:
        with refuses("teacher.path = ...none of its 2 finished answers ends by a stop token of the policy...20"):
            check_teacher(experiment)
        return
    check_teacher(experiment)
    printed = " ".join(capsys.readouterr().out.split())
    assert all(part in printed for part in said.split("..."))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher.kind": "none", "teacher.hint": "none"},
            "teacher.path = elsewhere: must be given with kind network, otherwise None",
        ),
        ({"teacher.path": None}, "teacher.path = None: must be given with kind network"),
        ({"teacher.path": None, "teacher.kind": "base"}, "teacher.kind = base: must be network without lora"),
        (
            {"teacher.path": None, "teacher.kind": "self", "teacher.hint": "none"},
            "teacher.hint = none: must be solution or group with kind self",
        ),
        (
            {"teacher.kind": "none", "teacher.path": None, "teacher.hint": "none"},
            "reward.scorer = none: must be a scorer without a teacher to learn from",
        ),
        ({"eval.every": 10}, "eval.every = 10: must be 0 with reward.scorer none"),
        ({"teacher.rewards": True}, "teacher.rewards = True: must be False with reward.scorer none"),
        ({"teacher.hint": "group"}, "teacher.hint = group: must be another with reward.scorer none"),
        (
            {"reward.scorer": "exact", "teacher.hint": "group", "rollout.group_size": 1},
            "teacher.hint = group: must be another with rollout.group_size = 1",
        ),
        ({"ladder": (8, 12)}, "ladder = (8, 12): must be () with teacher.hint = solution"),
        ({"teacher.hint_text": "no place"}, "teacher.hint_text = 'no place': must have {hint} once"),
        (
            {"reward.scorer": "exact", "teacher.rewards": False, "teacher.weight": 0.0},
            "teacher.weight = 0.0: must be above 0 with teacher.rewards = False",
        ),
    ],
)
def test_contradicting_options_are_one_line(changes: dict[str, Any], message: str):
    with refuses(message):
        override(CONFIG, changes)


def test_a_teacher_that_cannot_be_read_or_is_too_small_is_refused(tmp_path: Path):
    small = write_teacher(tmp_path / "small", replace(SHAPE, vocab_size=10))
    short = write_teacher(tmp_path / "short", replace(SHAPE, max_positions=16))
    read = write_teacher(tmp_path / "read", replace(SHAPE, max_positions=24))
    experiment = build_experiment(override(CONFIG, {"teacher.path": str(read)}), takes_steps=True)
    with refuses("teacher.hint = solution: rows of the teacher have up to ...must be at most 24"):
        check_run(experiment, continuing=False)
    for path, message in (
        (tmp_path / "none", f"teacher.path = {tmp_path / 'none'}"),
        (small, f"teacher.path = {small}: its vocab_size is 10; must be at least 15"),
        (short, "data.max_prompt_tokens + rollout.max_new_tokens = 17: must be at most 16"),
    ):
        with refuses(message):
            build_experiment(override(CONFIG, {"teacher.path": str(path)}), takes_steps=True)


def test_a_path_makes_the_teacher_a_network_of_its_own():
    config = parse_run(["tiny", "--teacher.path", "x", "--reward.scorer", "none"], "launch.train", "")
    assert (config.teacher.kind, config.eval.every) == ("network", 0)


def test_hints_stand_before_what_opens_the_answer(tmp_path: Path):
    digits = CharacterTokenizer(ALPHABET, "{prompt}=")
    template = hint_template("\n{hint}#", digits)
    assert (digits.decode(template.before), digits.decode(template.after), template.tail) == ("\n", "#", 1)
    pytest.importorskip("transformers")
    chat = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    directory = write_chat_tokenizer(
        tmp_path, chat + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = HuggingFaceTokenizer(directory)
    template = hint_template("\nSolution: {hint}.", tokenizer)
    asked = tokenizer.chat("1")
    assert tokenizer.with_special_tokens(asked[-template.tail :]) == "<|im_end|>\n<|im_start|>assistant\n"
