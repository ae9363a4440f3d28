import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import pytest

from configs.algorithms import ALGORITHMS, with_algorithm
from configs.override import override
from configs.schema import RunConfig
from launch.cli import recipe_options
from launch.cli.fields import fields_of
from launch.cli.options import parse, parse_run, parse_run_and
from launch.cli.program import run_program, use_compile_cache
from launch.cli.recipes import load_recipe, recipes
from launch.errors import ConfigError, RunStopped
from tests.launch.programs import argv
from tests.refusals import assert_refused, refuses


def run(*argv: str, reading: tuple[str, ...] = recipe_options.TRAIN) -> RunConfig:
    return parse_run(argv, "python -m launch.train", "Train.", reading)


def refusal(*argv: str, reading: tuple[str, ...] = recipe_options.TRAIN) -> str:
    with pytest.raises(ConfigError) as error:
        run(*argv, reading=reading)
    return str(error.value)


def shown(capsys: pytest.CaptureFixture[str], *argv: str, reading: tuple[str, ...] = recipe_options.TRAIN) -> str:
    """Return the output of --help."""
    with pytest.raises(SystemExit) as end:
        run(*argv, reading=reading)
    assert not end.value.code
    return capsys.readouterr().out


def test_recipes_by_name_and_by_path(tmp_path: Path):
    assert {"tiny", "gsm8k"} <= set(recipes()) and "schema" not in recipes()
    assert load_recipe("tiny").name == "tiny"
    own = tmp_path / "own.py"
    own.write_text("from configs.schema import RunConfig\nconfig = RunConfig(name='mine', steps=3)\n")
    assert load_recipe(str(own)) == RunConfig(name="mine", steps=3)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "...gsm8k...tiny...py"),
        ("config = 3", "...config...RunConfig"),
        ("from configs.schema import nothing", "ImportError:...'nothing'"),
        ("from configs.schema import *\nRolloutOptions(group_size=0)", "ValueError: group_size = 0:...1"),
    ],
)
def test_no_such_recipe(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "recipe.py"
    if text is not None:
        path.write_text(text)
    with refuses(f"CONFIG = {path}: {message}", ConfigError):
        load_recipe(str(path))


def test_options_change_the_recipe():
    recipe = load_recipe("tiny")
    assert run("tiny") == recipe
    options = (
        '--steps 6 --steps 7 --out there --resume --data.chat-template-kwargs {"a":[1]} --rollout.draft_length 5 '
        "--policy-optimizer.learning-rate=1e-2 --reward.scorer exact --reward.also format --reward.weights 1 -0.5 "
        "--eval.every 3 --rollout.stop-tokens --rollout.phases 4 40 2 40 --loss.importance-cap None "
        "--rollout.verifier block --rollout.function mine:roll --draft.kind own.drafts:draft --model.family own:Family"
    )
    assert run("tiny", *options.split()) == override(
        recipe,
        {
            **{"steps": 7, "out": "there", "resume": True, "rollout.draft_length": 5},
            **{"data.chat_template_kwargs": {"a": [1]}},
            **{"policy_optimizer.learning_rate": 1e-2, "reward.scorer": "exact", "reward.also": ("format",)},
            **{"reward.weights": (1.0, -0.5), "eval.every": 3, "rollout.stop_tokens": ()},
            **{"rollout.phases": ((4, 40), (2, 40)), "loss.importance_cap": None, "rollout.verifier": "block"},
            **{"rollout.function": "mine:roll", "draft.kind": "own.drafts:draft", "model.family": "own:Family"},
        },
    )


@pytest.mark.parametrize(
    "option, message",
    [
        ("--stepz 3", "--stepz: ...--steps"),
        ("--draft-length 3", "--draft-length: ...--rollout.draft-length"),
        ("--zzz 3", "--zzz: "),
        ("--frozen 1", "--frozen: ...mean --draft-training.mode?"),
        ("--model.architecture.num-layers 3", "--model.architecture.num-layers: ...recipe"),
        ("more", "more: "),
        ("--steps", "argument --steps: "),
        ("--steps 3 4", "4: "),
        ("--steps many", "steps = many: ...INT"),
        ("--loss.importance-cap x", "loss.importance_cap = x: ...FLOAT|None"),
        ("--ladder 1 x", "ladder = 1 x: ...INT"),
        ("--data.chat-template-kwargs [1]", "data.chat_template_kwargs = [1]: ...JSON"),
        ("--data.chat-template-kwargs x", "data.chat_template_kwargs = x: ...JSON"),
        ("--rollout.phases 4 40 2", "rollout.phases = 4 40 2: ...INT"),
        ("--allow-truncated-law 1", "allow_truncated_law = 1: ...True|False"),
        ("--rollout.verifier own", "rollout.verifier = own: ...rejection|block|coupled"),
        ("--algorithm ppo", "algorithm = ppo: ...grpo|dapo|"),
        ("--draft-training.every 0", "draft_training.every = 0: ...1"),
        ("--draft-training.fall 1", "draft_training.fall = 1.0: "),
        ("--draft-training.replay -1", "draft_training.replay = -1: ...0"),
        ("--draft-training.replay -1e-3", "draft_training.replay = -1e-3: ...INT"),
        ("--rollout.draft-length -1", "rollout.draft_length = -1: ...0"),
        ("--rollout.law.temperature nan", "rollout.law.temperature = nan: ...0"),
        ("--rollout.law.top-p 3", "rollout.law.top_p = 3.0: ...1"),
        ("--rollout.law.top-p 0.5", "rollout.law = SamplingLaw("),
        ("--draft.vocab-size 0", "draft.vocab_size = 0: ...1"),
        ("--draft.unroll 0", "draft.unroll = 0: ...1...7"),
        ("--draft.decay 0", "draft.decay = 0.0: ...0...1"),
        ("--draft.kind eagle", "draft.kind = eagle: ...eagle3...mtp...model...none...package.module:name"),
        ("--rollout.function mine", "rollout.function = mine: ...None...package.module:name"),
        ("--loss.function my.loss:", "loss.function = my.loss:: ...None...package.module:name"),
        ("--model.family my-family:f", "model.family = my-family:f: ...None"),
        ("--microbatches 0", "microbatches = 0: ...1"),
        ("--ladder 64 32", "ladder = (64, 32): "),
        ("--draft.kind none --rollout.draft-length 2", "rollout.draft_length = 2: must be 0 with draft.kind none"),
    ],
)
def test_bad_options_are_named_in_one_line(option: str, message: str):
    assert_refused(refusal("tiny", *option.split()), message)


@pytest.mark.parametrize(
    ("options", "microbatches"),
    [
        ("", 64),
        ("--data.prompts 2", 16),
        ("--data.prompts 9 --rollout.group-size 8", 72),
        ("--data.prompts 2 --microbatches 64", 64),
        ("--mesh.data 2 --mesh.fsdp 4", 32),
        ("--asynchronous.lag 1 --mesh.fsdp 8 --asynchronous.rollout-mesh.fsdp 2", 32),
        ("--selection.groups 4", 32),
        ("--algorithm dapo --selection.groups 4", 32),
        ("--updates.minibatches 8", 32),
        # Refused for the numbers that do not divide: the microbatches are not to be named too.
        ("--data.prompts 6 --mesh.fsdp 32", 1),
        ("--updates.minibatches 3", 1),
    ],
)
def test_the_microbatches_of_a_recipe_fit_the_batch(options: str, microbatches: int):
    assert run("own_data", *options.split()).microbatches == microbatches


@pytest.mark.parametrize(
    ("options", "lengths", "vocabulary", "distilled"),
    [
        ("", (0, 1, 3), 8192, 192),
        ("--rollout.draft-length 2", (2,), 8192, 192),
        ("--rollout.draft-length 2 --rollout.draft-lengths 0 2", (0, 2), 8192, 192),
        ("--draft.kind eagle3", (0, 1, 3), 8192, 192),
        ("--draft.path DIR", (0, 1, 3), None, 192),
        ("--draft.kind mtp", (0, 1, 3), None, 192),
        ("--draft.kind tests.launch.sample_scorers:draft", (0, 1, 3), 8192, 192),
        ("--draft.kind none", (0,), None, 0),
        ("--draft.kind none --draft.lookup.kind ngram", (0, 1, 3), None, 0),
        ("--draft.kind none --draft.lookup.kind ngram --rollout.draft-lengths 0 4", (0, 4), None, 0),
    ],
)
def test_what_a_recipe_sets_for_its_own_draft_does_not_stand_in_the_way_of_another(
    options: str, lengths: tuple[int, ...], vocabulary: int | None, distilled: int
):
    config = parse_run(["smollm2_extraction", *options.split()], "python -m launch.train", "Train.")
    found = config.rollout.lengths, config.draft.vocab_size, config.distill.steps
    assert found == (lengths, vocabulary, distilled)


@pytest.mark.parametrize("kind", ["none", "mtp", "model", "eagle3"])
def test_another_kind_of_draft_clears_all_that_describes_the_recipes(kind: str, tmp_path: Path):
    recipe = tmp_path / "own.py"
    own = "kind='eagle3', path='head', unroll=7, decay=0.5, rollout_dtype='int8'"
    if kind == "eagle3":
        own = "kind='mtp', mtp_convention='mimo'"
    recipe.write_text(
        f"from configs.schema import *\nconfig = RunConfig(name='own', steps=1, draft=DraftConfig({own}))"
    )
    words = [str(recipe), "--draft.kind", kind, *(["--draft.path", "small"] if kind == "model" else [])]
    draft = parse_run(words, "python -m launch.train", "Train.").draft
    assert (draft.kind, draft.path and str(draft.path)) == (kind, "small" if kind == "model" else None)
    assert draft.rollout_dtype == (None if kind in ("none", "eagle3") else "int8")


def test_the_recipe_comes_first_and_can_set_fields_without_options():
    for words in ([], ["--steps", "3"], ["--steps", "3", "tiny"]):
        assert "tiny" in refusal(*words)
    recipe = load_recipe("tiny")
    path = "model.architecture.num_layers"
    assert override(recipe, {path: 8}).model.architecture == replace(recipe.model.architecture, num_layers=8)
    with refuses("model.architecture.num_kv_heads = 3:"):
        override(recipe, {"model.architecture.num_kv_heads": 3})


@dataclass(frozen=True)
class Own:
    """Options of a program.

    Attributes:
        prompt: what to say,
                and how.
    """

    prompt: str
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt = '': ")


def test_a_program_with_options_of_its_own():
    words = "tiny --prompt 1+2= --checkpoint there --checkpoint.every 3 --rollout.draft-length 0".split()
    config, own = parse_run_and(Own, words, "python -m launch.generate", "Generate.", steps=9)
    assert own == Own("1+2=", Path("there"))
    assert (config.checkpoint.every, config.rollout.draft_length, config.steps) == (3, 0, 9)
    for words, message in [
        (["tiny"], "--prompt...what to say, and how."),
        (["tiny", "--prompt", ""], "prompt = '': "),
        (["tiny", "--promt", "x", "--prompt", "y"], "--promt: ...--prompt"),
    ]:
        with refuses(message, ConfigError):
            parse_run_and(Own, words, "python -m launch.generate", "Generate.")


def test_a_plain_dataclass(capsys: pytest.CaptureFixture[str]):
    assert parse(Own, ["x"], "program") == Own("x")
    assert parse(Own, ["-3 my_own", "--checkpoint=a_b"], "program") == Own("-3 my_own", Path("a_b"))
    for words in ([""], ["--checkpoint", "y"], ["x", "y"], ["x", "--promt", "y"]):
        with pytest.raises(ConfigError):
            parse(Own, words, "program")
    with pytest.raises(SystemExit):
        parse(Own, ["--help"], "program")
    said = capsys.readouterr().out
    assert "[--checkpoint PATH|None] PROMPT" in said and "what to say, and how." in said and "--prompt" not in said


@pytest.mark.parametrize(
    "name, most",
    [("TRAIN", 173), ("COMPARE", 154), ("DISTILL", 74), ("EVALUATE", 75), ("GENERATE", 61), ("EXPORT", 41)],
)
def test_each_program_shows_only_its_options_within_the_help_limits(
    name: str, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    reading = getattr(recipe_options, name)
    every = list(fields_of(RunConfig, load_recipe("tiny")))
    for pattern in (*reading, *recipe_options.RECIPE_ONLY):
        assert any(recipe_options.reads((pattern,), field.path) for field in every)
    said = shown(capsys, "tiny", "--help", "all", reading=reading)
    flags = re.findall(r"^  (--[\w.-]+)", said, re.MULTILINE)
    assert 0.9 * most <= len(flags) == len(set(flags)) <= most
    assert all(field.help for field in every if field.flag in flags)
    overview = shown(capsys, "tiny", "--help", reading=reading)
    assert len(overview.splitlines()) <= 40
    sections = re.findall(r"^(\w+): ", said, re.MULTILINE)
    listed = 0
    # All of one program, which share the code with the others.
    for name in sections if reading is recipe_options.TRAIN else sections[:2]:
        section = shown(capsys, "tiny", "--help", name.replace("_", "-"), reading=reading)
        assert f"\n  {name} " in overview and section in said and len(section.splitlines()) <= 30
        listed += section.count("\n  --")
    assert listed == len(flags) or reading is not recipe_options.TRAIN
    assert len(flags) == shown(capsys, "--help", "all", reading=reading).count("\n  --")
    # A few: each takes a fifth of a second. Help also leaves out options of other kinds of draft, which are read.
    unread = [field for field in every if not recipe_options.reads(reading, field.path)]
    unread += [field for field in every if recipe_options.reads(recipe_options.RECIPE_ONLY, field.path)]
    for field in unread[::12]:
        assert_refused(refusal("tiny", field.flag, "1", reading=reading), f"{field.flag}: ")


def test_options_of_other_programs_are_named_and_help_shows_the_recipes_values(capsys: pytest.CaptureFixture[str]):
    others = {"--warmup.steps 3": "--warmup.steps...launch.train", "--algorithm dapo": "--algorithm: "}
    for words, said in (others | {"--help warmup": "...--warmup.steps: "}).items():
        assert_refused(refusal("tiny", *words.split(), reading=recipe_options.GENERATE), said)
    said = " ".join(shown(capsys, "gsm8k", "--help", "rollout").split())
    assert "--rollout.max-new-tokens INT Most tokens of a completion. [512]" in said
    assert "--rollout.draft-lengths [INT ...]" in said and "--rollout.law.top-k INT|None" in said


# Characteristic options of each paper.
SETTINGS = {
    "grpo": {"advantage.scale": "group", "loss.clip_high": 0.2, "loss.aggregate": "sequence"},
    "dapo": {"loss.clip_high": 0.28, "loss.aggregate": "token", "selection.groups": 3, "selection.overlong_buffer": 4},
    "dr_grpo": {"advantage.scale": "none", "loss.aggregate": "budget"},
    "rloo": {"advantage.baseline": "others", "advantage.scale": "none", "loss.aggregate": "sequence"},
    "reinforce_pp": {"advantage.baseline": "batch", "loss.kl_in": "token", "loss.kl_coefficient": 0.01},
    "gspo": {"loss.ratio": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    "cispo": {"loss.surrogate": "cispo", "loss.clip_low": 1.0, "loss.aggregate": "token"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_option_sets_an_algorithm(name: str, capsys: pytest.CaptureFixture[str]):
    """Fields that the recipe set for another algorithm are reset. Other fields stay."""
    kept = {"data.prompts": 3, "rollout.max_new_tokens": 20, "loss.importance_cap": 5.0}
    replaced = {"advantage.baseline": "batch", "advantage.scale": "batch", "selection.overlong_buffer": 9}
    replaced |= {"loss.kl_in": "token", "loss.kl_coefficient": 0.1, "loss.dual_clip": 3.0}
    config = run(*argv("tiny", kept | replaced), "--algorithm", name)
    assert config == with_algorithm(override(load_recipe("tiny"), kept), name)
    assert config == override(config, SETTINGS[name]) == with_algorithm(config, name)
    assert config.data.prompts == (6 if name == "dapo" else 3)
    said = capsys.readouterr().out
    assert said.startswith(f"algorithm {name} (arXiv 2") and f"clip_high = {config.loss.clip_high}" in said
    assert "(given)" not in said


def test_options_win_over_the_algorithm(capsys: pytest.CaptureFixture[str]):
    words = "--algorithm reinforce_pp --loss.clip-high 0.3 --loss.kl-in reward --loss.kl-coefficient 0.2"
    config = run("tiny", *words.split())
    assert (config.loss.clip_high, config.loss.kl_in, config.loss.kl_coefficient) == (0.3, "reward", 0.2)
    assert (config.loss.kl_estimator, config.advantage.baseline) == ("k1", "batch")
    said = capsys.readouterr().out
    assert "clip_high = 0.3 (given)" in said and "clip_low = 0.2," in said
    # DAPO generates data.prompts prompts and trains on half of them.
    config = run(*"tiny --data.prompts 8 --algorithm dapo --rollout.max-new-tokens 50".split())
    assert (config.data.prompts, config.selection.groups, config.selection.overlong_buffer) == (8, 4, 10)
    config = run(*"tiny --data.prompts 8 --selection.groups 6 --algorithm dapo".split())
    assert (config.data.prompts, config.selection.groups) == (8, 6)
    # Another algorithm after it trains on the original number of prompts, and generates no more.
    assert with_algorithm(config, "grpo").data.prompts == 6


@pytest.mark.parametrize(
    "error, code, said",
    [
        (None, 5, ""),
        (ConfigError("steps = 0:\n  must be more"), 2, "error: steps = 0: must be more\n"),
        (RunStopped("no more"), 1, "error: no more\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(error: BaseException | None, code: int, said: str, capsys: pytest.CaptureFixture[str]):
    def main(argv: list[str]) -> int:
        assert argv == sys.argv[1:]
        if error is not None:
            raise error
        return 5

    assert run_program(main) == code
    assert capsys.readouterr() == ("", said)
    # A bug of the program propagates.
    with pytest.raises(ZeroDivisionError):
        run_program(lambda argv: 1 // 0)


def test_compile_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECJAX_CACHE", "elsewhere")
    settings = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    kept, seconds = (getattr(jax.config, name) for name in settings)
    try:
        for before, after in (((kept, seconds), (kept, seconds)), ((None, seconds), ("elsewhere", 0.5))):
            for name, value in zip(settings, before, strict=True):
                jax.config.update(name, value)
            use_compile_cache()
            assert tuple(getattr(jax.config, name) for name in settings) == after
    finally:
        for name, value in zip(settings, (kept, seconds), strict=True):
            jax.config.update(name, value)


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_on_cpu_a_mesh_finds_its_devices_where_there_are_cores():
    """This runs in a new process: no import of the program may initialise JAX's backends."""
    code = (
        "import jax, launch.train; from configs.override import override; from configs.tiny import config; "
        "from launch.setup.experiment import build_experiment; "
        "build_experiment(override(config, {'mesh.data': 4, 'data.prompts': 4})); assert jax.device_count() == 4"
    )
    enough, few = (python("-c", f"import os; os.cpu_count = lambda: {count}; {code}") for count in (4, 2))
    assert enough.returncode == 0
    assert "mesh = (4, 1, 1, 1): " in few.stderr


def test_a_programs_exit_code():
    bad = python("-m", "launch.train", "tiny", "--rollout.draft-lenght", "3")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert_refused(bad.stderr.removesuffix("\n"), "error: --rollout.draft-lenght: ...--rollout.draft-length")
