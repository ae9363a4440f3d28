import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from launch.cli.options import load_recipe, parse, parse_run, parse_run_and, recipes, run_program, use_compile_cache


def run(*argv: str) -> RunConfig:
    return parse_run(argv, "python -m launch.train", "Train.")


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        run(*argv)
    return str(error.value)


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
            "from specjax.rollout.plan import RolloutConfig\nRolloutConfig(group_size=0)",
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
        *("tiny", "--steps", "7", "--out", "there", "--resume", "--rollout.draft_length", "5"),
        *("--policy-optimizer.learning-rate=1e-2", "--speedup.slots", "1", "2", "--rollout.stop-tokens"),
        *("--loss.importance-cap", "None", "--draft-training.mode", "frozen", "--mesh.data", "8"),
        *("--model.architecture.num-layers", "8"),
    )
    assert changed == dataclasses.replace(
        recipe,
        steps=7,
        out="there",
        resume=True,
        rollout=dataclasses.replace(recipe.rollout, draft_length=5, stop_tokens=()),
        policy_optimizer=dataclasses.replace(recipe.policy_optimizer, learning_rate=1e-2),
        speedup=dataclasses.replace(recipe.speedup, slots=(1, 2)),
        loss=dataclasses.replace(recipe.loss, importance_cap=None),
        draft_training=dataclasses.replace(recipe.draft_training, mode="frozen"),
        mesh=dataclasses.replace(recipe.mesh, data=8),
        model=dataclasses.replace(
            recipe.model, architecture=dataclasses.replace(recipe.model.architecture, num_layers=8)
        ),
    )


@pytest.mark.parametrize(
    "option, message",
    [
        ("--stepz 3", "Unrecognized options: --stepz, 3; did you mean --steps?"),
        ("--draft-length 3", "Unrecognized options: --draft-length, 3; did you mean --rollout.draft-length?"),
        ("--zzz 3", "Unrecognized options: --zzz, 3"),
        ("more", "Unrecognized options: more"),
        ("--steps", "Missing value for argument '--steps'. Expected 1 values."),
        ("--steps many", "--steps: invalid literal for int() with base 10: 'many' (expected INT)"),
        ("--loss.importance-cap x", "--loss.importance-cap: no type matching {None}|FLOAT could be instantiated from "),
        ("--speedup.slots 1 x", "--speedup.slots: Could not find valid parse for arguments: ['1', 'x'] (expected [INT"),
        ("--draft.train False", "Unrecognized options: --draft.train, False; did you mean --draft-training.mode?"),
        (
            "--allow-truncated-law 1",
            "invalid choice '1' for argument '--allow-truncated-law'. Expected one of ('True', 'False').",
        ),
        ("--draft-training.every 0", "draft_training.every = 0: must be at least 1"),
        ("--draft-training.fall 1", "draft_training.fall = 1.0: must be a share, at least 0 and below 1"),
        ("--draft-training.replay -1", "draft_training.replay = -1: must be at least 0"),
        ("--rollout.draft-length -1", "rollout.draft_length = -1: must be at least 0"),
        ("--rollout.law.temperature nan", "rollout.law.temperature = nan: must be >= 0 and finite"),
        ("--rollout.law.temperature inf", "rollout.law.temperature = inf: must be >= 0 and finite"),
        ("--policy-optimizer.learning-rate nan", "policy_optimizer.learning_rate = nan: must be at least 0 and finite"),
        ("--draft-optimizer.weight-decay inf", "draft_optimizer.weight_decay = inf: must be at least 0 and finite"),
        ("--policy-optimizer.b1 nan", "policy_optimizer.b1 = nan: must be in [0, 1)"),
        ("--policy-optimizer.clip-norm nan", "policy_optimizer.clip_norm = nan: must be > 0"),
        ("--loss.clip-low nan", "loss.clip_low = nan: must be >= 0"),
        ("--loss.importance-cap nan", "loss.importance_cap = nan: must be > 0, or none"),
        ("--rollout.law.top-p 3", "rollout.law.top_p = 3.0: must be in (0, 1]"),
        ("--model.architecture.num-kv-heads 3", "model.architecture.num_kv_heads = 3: must divide num_heads = 4"),
        ("--model.architecture.num-kv-heads 0", "model.architecture.num_kv_heads = 0: must be at least 1"),
        ("--model.architecture.head-dim -8", "model.architecture.head_dim = -8: must be at least 1"),
        ("--model.architecture.vocab-size 0", "model.architecture.vocab_size = 0: must be at least 1"),
        ("--model.architecture.num-layers 0", "model.architecture.num_layers = 0: must be at least 1"),
        ("--draft.vocab-size 0", "draft.vocab_size = 0: must be at least 1"),
        ("--draft.num-kv-heads -1", "draft.num_kv_heads = -1: must be at least 1"),
        ("--draft.num-heads 0", "draft.num_heads = 0: must be at least 1"),
        ("--draft.head-dim 0", "draft.head_dim = 0: must be at least 1"),
        ("--draft.intermediate-size -4", "draft.intermediate_size = -4: must be at least 1"),
        ("--draft.unroll 0", "draft.unroll = 0: must be within 1 .. 7"),
        ("--draft.decay 0", "draft.decay = 0.0: must be in (0, 1]"),
        ("--microbatches 0", "microbatches = 0: must be at least 1"),
        ("--ladder 64 32", "ladder = (64, 32): must be total lengths of at least 3, in ascending order"),
        ("--rollout.law.top-p 0.5", "rollout.law = SamplingLaw(temperature=1.0, top_k=None, top_p=0.5, min_p=0.0): "),
    ],
)
def test_bad_options_are_named_in_one_line(option: str, message: str):
    said = refusal("tiny", *option.split())
    assert said.startswith(message) and "\n" not in said and "│" not in said


def test_a_frame_of_colours_is_taken_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert refusal("tiny", "--stepz", "3") == "Unrecognized options: --stepz, 3; did you mean --steps?"


@dataclass(frozen=True)
class Own:
    """Options of a program.

    Attributes:
        prompt: what to say.
    """

    prompt: str
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt = '': must not be empty")


def test_a_program_with_options_of_its_own():
    argv = "tiny --prompt 1+2= --checkpoint there --checkpoint.every 3 --rollout.draft-length 0".split()
    config, own = parse_run_and(Own, argv, "python -m launch.generate", "Generate.")
    assert own == Own("1+2=", Path("there"))
    assert (config.checkpoint.every, config.rollout.draft_length) == (3, 0)
    for argv, message in [
        (["tiny"], "Missing from python -m launch.generate tiny: --prompt STR what to say. (required)"),
        (["tiny", "--prompt", ""], "prompt = '': must not be empty"),
        (["tiny", "--promt", "x", "--prompt", "y"], "Unrecognized options: --promt, x; did you mean --prompt?"),
    ]:
        with pytest.raises(ConfigError) as error:
            parse_run_and(Own, argv, "python -m launch.generate", "Generate.")
        assert str(error.value) == message


def test_a_plain_dataclass():
    assert parse(Own, ["--prompt", "x"], "program") == Own("x")
    with pytest.raises(ConfigError, match="^prompt = '': must not be empty$"):
        parse(Own, ["--prompt", ""], "program")


def test_help_tells_what_options_mean(capsys: pytest.CaptureFixture[str]):
    for argv in (["tiny", "--help"], ["--help"]):
        with pytest.raises(SystemExit) as end:
            run(*argv)
        assert not end.value.code
        text = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert "Train. CONFIG is one of gsm8k, " in text
        assert "--rollout.draft-length INT K, tokens proposed a round; 0 is plain autoregressive sampling. (def" in text
        # Not once more, as a block, over the options of a section.
        assert text.count("K, tokens proposed a round") == 1


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
    expected = "error: Unrecognized options: --rollout.draft-lenght, 3; did you mean --rollout.draft-length?\n"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", expected)
    helped = launch("launch.train", "--help")
    assert (helped.returncode, helped.stderr) == (0, "") and "--probe-every INT" in helped.stdout
