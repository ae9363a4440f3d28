import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import pytest

from configs.algorithms import ALGORITHMS, with_algorithm
from configs.override import override
from configs.schema import AdvantageConfig, LossOptions, RunConfig, SelectionConfig
from launch.cli import reads
from launch.cli.errors import ConfigError
from launch.cli.fields import fields_of
from launch.cli.options import parse, parse_run, parse_run_and, run_program, use_compile_cache
from launch.cli.recipes import load_recipe, recipes


def run(*argv: str, reading: tuple[str, ...] = reads.TRAIN) -> RunConfig:
    return parse_run(argv, "python -m launch.train", "Train.", reading)


def refusal(*argv: str, reading: tuple[str, ...] = reads.TRAIN) -> str:
    with pytest.raises(ConfigError) as error:
        run(*argv, reading=reading)
    return str(error.value)


def shown(capsys: pytest.CaptureFixture[str], *argv: str, reading: tuple[str, ...] = reads.TRAIN) -> str:
    """What --help prints."""
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
        (None, "must be one of gsm8k, .*tiny, or a path to such a .py file"),
        ("config = 3", "must define `config`, a RunConfig"),
        ("from configs.schema import nothing", "ImportError: cannot import name 'nothing'"),
        (
            "from configs.schema import RolloutOptions\nRolloutOptions(group_size=0)",
            "ValueError: group_size = 0: must be at least 1",
        ),
    ],
)
def test_no_such_recipe(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "recipe.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"^CONFIG = {path}: {message}"):
        load_recipe(str(path))


def test_the_recipe_comes_first():
    assert refusal().startswith("CONFIG must come first: one of ")
    assert refusal("--steps", "3").startswith("CONFIG must come first: one of ")


def test_options_change_the_recipe():
    recipe = load_recipe("tiny")
    assert run("tiny") == recipe
    changed = run(
        *("tiny", "--steps", "6", "--steps", "7", "--out", "there", "--resume", "--rollout.draft_length", "5"),
        *("--policy-optimizer.learning-rate=1e-2", "--speedup.slots", "1,2", "--rollout.stop-tokens"),
        *("--rollout.phases", "4", "40", "2", "40", "--loss.importance-cap", "None", "--data.enable-thinking", "False"),
        *("--rollout.verifier", "block", "--draft.lookup.kind", "history", "--reward.workers", "3"),
    )
    assert changed == override(
        recipe,
        {
            "steps": 7,
            "out": "there",
            "resume": True,
            "rollout.draft_length": 5,
            "rollout.stop_tokens": (),
            "rollout.phases": ((4, 40), (2, 40)),
            "rollout.verifier": "block",
            "policy_optimizer.learning_rate": 1e-2,
            "speedup.slots": (1, 2),
            "loss.importance_cap": None,
            "data.enable_thinking": False,
            "draft.lookup.kind": "history",
            "reward.workers": 3,
        },
    )


@pytest.mark.parametrize(
    "option, message",
    [
        ("--stepz 3", "--stepz: unknown option; did you mean --steps?"),
        ("--draft-length 3", "--draft-length: unknown option; did you mean --rollout.draft-length?"),
        ("--zzz 3", "--zzz: unknown option"),
        ("--model.architecture.num-layers 3", "unknown option; set model.architecture.num_layers in a recipe file"),
        ("more", "more: "),
        ("--steps", "steps = nothing: must be INT"),
        ("--steps 3 4", "steps = 3 4: must be INT"),
        ("--steps many", "steps = many: must be INT"),
        ("--loss.importance-cap x", "loss.importance_cap = x: must be FLOAT|None"),
        ("--speedup.slots 1 x", "speedup.slots = 1 x: must be INT ..."),
        ("--rollout.phases 4 40 2", "rollout.phases = 4 40 2: must be INT INT ..."),
        ("--allow-truncated-law 1", "allow_truncated_law = 1: must be True|False"),
        ("--rollout.verifier own", "rollout.verifier = own: must be rejection|block|coupled"),
        ("--algorithm ppo", "algorithm = ppo: must be grpo|dapo|"),
        ("--draft-training.every 0", "draft_training.every = 0: must be at least 1"),
        ("--draft-training.fall 1", "draft_training.fall = 1.0: must be a share"),
        ("--draft-training.replay -1", "draft_training.replay = -1: must be at least 0"),
        ("--rollout.draft-length -1", "rollout.draft_length = -1: must be at least 0"),
        ("--rollout.law.temperature nan", "rollout.law.temperature = nan: must be >= 0"),
        ("--rollout.law.top-p 3", "rollout.law.top_p = 3.0: must be in (0, 1]"),
        ("--rollout.law.top-p 0.5", "rollout.law = SamplingLaw("),
        ("--policy-optimizer.learning-rate nan", "policy_optimizer.learning_rate = nan: must be at least 0"),
        ("--policy-optimizer.clip-norm nan", "policy_optimizer.clip_norm = nan: must be > 0"),
        ("--loss.clip-low nan", "loss.clip_low = nan: must be >= 0"),
        ("--loss.importance-cap nan", "loss.importance_cap = nan: must be > 0"),
        ("--draft.vocab-size 0", "draft.vocab_size = 0: must be at least 1"),
        ("--draft.unroll 0", "draft.unroll = 0: must be within 1 .. 7"),
        ("--draft.decay 0", "draft.decay = 0.0: must be in (0, 1]"),
        ("--draft.kind eagle", "draft.kind = eagle: must be one of eagle3, mtp, model, none, or package.module:name"),
        ("--rollout.function mine", "rollout.function = mine: must be None or a function, package.module:name"),
        ("--loss.function my.loss:", "loss.function = my.loss:: must be None or a function, package.module:name"),
        ("--model.family my-family:f", "model.family = my-family:f: must be None or a function"),
        ("--microbatches 0", "microbatches = 0: must be at least 1"),
        ("--ladder 64 32", "ladder = (64, 32): must be "),
    ],
)
def test_bad_options_are_named_in_one_line(option: str, message: str):
    said = refusal("tiny", *option.split())
    assert message in said and "\n" not in said


def test_functions_are_named_by_module_and_name():
    config = run(
        *("tiny", "--rollout.function", "mine:roll", "--loss.function", "my.own:loss"),
        *("--draft.kind", "my.own.drafts:draft", "--model.family", "mine:Family"),
    )
    assert (config.rollout.function, config.loss.function) == ("mine:roll", "my.own:loss")
    assert (config.draft.kind, config.model.family) == ("my.own.drafts:draft", "mine:Family")


def test_a_recipe_reaches_what_options_do_not():
    recipe = load_recipe("tiny")
    assert recipe.model.architecture is not None
    path = "model.architecture.num_layers"
    assert override(recipe, {path: 8}).model.architecture == replace(recipe.model.architecture, num_layers=8)
    with pytest.raises(ValueError, match=r"^model\.architecture\.num_kv_heads = 3: must divide"):
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
            raise ValueError("prompt = '': must not be empty")


def test_a_program_with_options_of_its_own(capsys: pytest.CaptureFixture[str]):
    argv = "tiny --prompt 1+2= --checkpoint there --checkpoint.every 3 --rollout.draft-length 0".split()
    config, own = parse_run_and(Own, argv, "python -m launch.generate", "Generate.")
    assert own == Own("1+2=", Path("there"))
    assert (config.checkpoint.every, config.rollout.draft_length) == (3, 0)
    for argv, message in [
        (["tiny"], "--prompt STR: must be given. what to say, and how."),
        (["tiny", "--prompt", ""], "prompt = '': must not be empty"),
        (["tiny", "--promt", "x", "--prompt", "y"], "--promt: unknown option; did you mean --prompt?"),
    ]:
        with pytest.raises(ConfigError) as error:
            parse_run_and(Own, argv, "python -m launch.generate", "Generate.")
        assert str(error.value) == message


def test_a_plain_dataclass(capsys: pytest.CaptureFixture[str]):
    assert parse(Own, ["--prompt", "x"], "program") == Own("x")
    assert parse(Own, ["x", "--checkpoint", "y"], "program", positional=("prompt",)) == Own("x", Path("y"))
    for argv, positional in ([["--prompt", ""], ()], [["--checkpoint", "y"], ("prompt",)], [["x", "y"], ("prompt",)]):
        with pytest.raises(ConfigError):
            parse(Own, argv, "program", positional=positional)
    with pytest.raises(SystemExit):
        parse(Own, ["--help"], "program", positional=("prompt",))
    said = capsys.readouterr().out
    assert "usage: program PROMPT [" in said and "--checkpoint PATH|None" in said and "--prompt" not in said


@pytest.mark.parametrize(
    "name, most",
    [("TRAIN", 125), ("COMPARE", 110), ("DISTILL", 60), ("EVALUATE", 50), ("GENERATE", 40), ("EXPORT", 32)],
)
def test_each_program_has_the_options_it_reads_on_one_screen_a_section(
    name: str, most: int, capsys: pytest.CaptureFixture[str]
):
    reading = getattr(reads, name)
    every = list(fields_of(RunConfig, load_recipe("tiny")))
    assert all(
        any(reads.reads((pattern,), field.path) for field in every) for pattern in (*reading, *reads.RECIPE_ONLY)
    )
    said = shown(capsys, "tiny", "--help", "all", reading=reading)
    flags = [line.split()[0] for line in said.splitlines() if line.startswith("  --")]
    assert 0.9 * most <= len(flags) == len(set(flags)) <= most
    # Every option has a help text, and every section fits a screen of 24 lines; the overview has at most 30.
    assert all(field.help for field in every if field.flag in flags)
    sections = said.split("\n\n")
    assert max(len(section.splitlines()) for section in sections) <= 24
    overview = shown(capsys, "tiny", "--help", reading=reading)
    assert len(overview.splitlines()) <= 30
    for section in sections:
        title = section.splitlines()[0].partition(":")[0]
        assert f"\n  {title} " in overview
        assert shown(capsys, "--help", title, reading=reading).count("\n  --") == section.count("\n  --")
    for field in every:
        if field.flag not in flags:
            assert f"{field.flag}: unknown option" in refusal("tiny", field.flag, "1", reading=reading)


def test_a_program_tells_which_options_are_anothers():
    reading = reads.GENERATE
    assert refusal("tiny", "--warmup.steps", "3", reading=reading).endswith("launch.train does not read it")
    assert refusal("tiny", "--algorithm", "dapo", reading=reading) == "--algorithm: unknown option"
    assert "must be one of all, run, rollout" in refusal("tiny", "--help", "warmup", reading=reading)


def test_help_shows_the_recipes_values(capsys: pytest.CaptureFixture[str]):
    said = " ".join(shown(capsys, "gsm8k", "--help", "rollout").split())
    assert "--rollout.max-new-tokens INT Most tokens of a completion. [512]" in said
    assert "--rollout.draft-lengths INT ... " in said and "--rollout.law.top-k INT|None" in said


NAMED = {
    "grpo": (AdvantageConfig(), LossOptions(clip_high=0.2, aggregate="sequence"), SelectionConfig()),
    "dapo": (AdvantageConfig(), LossOptions(), SelectionConfig(groups=3, drop_truncated=True, overlong_buffer=4)),
    "dr_grpo": (AdvantageConfig(scale="none"), LossOptions(clip_high=0.2, aggregate="budget"), SelectionConfig()),
    "rloo": (
        AdvantageConfig(baseline="others", scale="none"),
        LossOptions(clip_high=0.2, aggregate="sequence"),
        SelectionConfig(),
    ),
    "reinforce_pp": (
        AdvantageConfig(baseline="batch", scale="batch"),
        LossOptions(clip_high=0.2, aggregate="sequence", kl_in="token", kl_estimator="k1", kl_coefficient=0.01),
        SelectionConfig(),
    ),
    "gspo": (
        AdvantageConfig(),
        LossOptions(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="sequence"),
        SelectionConfig(),
    ),
    "cispo": (AdvantageConfig(), LossOptions(surrogate="cispo", clip_low=1.0), SelectionConfig()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_all_one_types(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever the recipe had of another algorithm is gone, and what belongs to none stays."""
    recipe = tmp_path / "own.py"
    recipe.write_text(
        "from configs.schema import *\n"
        "config = RunConfig(name='own', steps=1, data=DataConfig(prompts=3), rollout=RolloutOptions(max_new_tokens=20),"
        "advantage=AdvantageConfig(baseline='batch', scale='batch'), selection=SelectionConfig(overlong_buffer=9),"
        "loss=LossOptions(kl_in='token', kl_coefficient=0.1, dual_clip=3.0, importance_cap=5.0))"
    )
    config = run(str(recipe), "--algorithm", name)
    advantage, loss, selection = NAMED[name]
    assert (config.advantage, config.selection) == (advantage, selection)
    assert config.loss == replace(loss, importance_cap=5.0)
    assert config.data.prompts == (6 if name == "dapo" else 3)
    assert config == with_algorithm(load_recipe(str(recipe)), name) == with_algorithm(config, name)
    said = capsys.readouterr().out
    assert said.startswith(f"algorithm {name} (arXiv 2") and f"baseline = {advantage.baseline}, " in said
    assert "(given)" not in said and f"clip_high = {loss.clip_high}" in said


def test_options_win_over_the_algorithm(capsys: pytest.CaptureFixture[str]):
    argv = "--algorithm reinforce_pp --loss.clip-high 0.3 --loss.kl-in reward --loss.kl-coefficient 0.2".split()
    config = run("tiny", *argv)
    assert (config.loss.clip_high, config.loss.kl_in, config.loss.kl_coefficient) == (0.3, "reward", 0.2)
    assert (config.loss.kl_estimator, config.advantage.baseline) == ("k1", "batch")
    said = capsys.readouterr().out
    assert "clip_high = 0.3 (given)" in said and "clip_low = 0.2," in said
    # A number of prompts of one's own is not doubled, and goes with the groups.
    config = run(*"tiny --data.prompts 8 --algorithm dapo --rollout.max-new-tokens 50".split())
    assert (config.data.prompts, config.selection.groups, config.selection.overlong_buffer) == (8, 8, 10)
    config = run(*"tiny --data.prompts 8 --selection.groups 4 --algorithm dapo".split())
    assert (config.data.prompts, config.selection.groups) == (8, 4)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["program", "a", "b"])

    def program(error: BaseException | None) -> int:
        def main(argv: list[str]) -> int:
            assert argv == ["a", "b"]
            if error is not None:
                raise error
            return 5

        return run_program(main)

    for error, code, said in [
        (None, 5, ""),
        (ConfigError("steps = 0:\n  must be more"), 2, "error: steps = 0: must be more\n"),
        (KeyboardInterrupt(), 130, ""),
    ]:
        assert program(error) == code
        assert capsys.readouterr() == ("", said)
    with pytest.raises(ValueError, match="a fault"):
        program(ValueError("a fault"))


def test_compile_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECJAX_CACHE", "elsewhere")
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    use_compile_cache()
    assert jax.config.jax_compilation_cache_dir == kept  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        use_compile_cache()
        assert jax.config.jax_compilation_cache_dir == "elsewhere"  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


def launch(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", *argv], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_on_cpu_a_mesh_finds_its_devices_where_there_are_cores():
    """In a process of its own, where JAX has not begun: nothing that the program imports may begin it."""
    code = (
        "import dataclasses, jax, launch.train; from configs.tiny import config; "
        "from launch.build.experiment import build_experiment; "
        "from specjax.parallel.mesh import MeshConfig; "
        "data = dataclasses.replace(config.data, prompts=4);"
        "build_experiment(dataclasses.replace(config, mesh=MeshConfig(data=4), data=data));"
        "assert jax.device_count() == 4"
    )

    def with_cores(count: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", f"import os; os.cpu_count = lambda: {count}; {code}"],
            env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )

    assert with_cores(4).returncode == 0
    assert "mesh = (4, 1, 1): needs 4 devices, 2 present" in with_cores(2).stderr


def test_the_programs_exit_codes():
    bad = launch("launch.train", "tiny", "--rollout.draft-lenght", "3")
    expected = "error: --rollout.draft-lenght: unknown option; did you mean --rollout.draft-length?\n"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", expected)
    helped = launch("launch.train", "--help")
    assert (helped.returncode, helped.stderr) == (0, "") and "--help SECTION" in helped.stdout
