"""Faults around a command line: closed output pipes, recipes and modules that exit, and names of other libraries."""

import io
import logging
import subprocess
import sys
from pathlib import Path
from types import NoneType

import pytest

import launch.evaluate
import launch.train
from configs.schema import RunConfig
from launch.cli.fields import fields_of
from launch.cli.functions import load_function
from launch.cli.option_search import SYNONYMS, named_like
from launch.cli.options import parse_run
from launch.cli.program import plain_warnings, run_program
from launch.cli.recipe_options import GENERATE, TRAIN
from launch.cli.recipes import load_recipe
from launch.errors import ConfigError
from tests.refusals import assert_refused, refuses

EXITS = (
    *("raise SystemExit(0)", "raise SystemExit", "raise SystemExit('two\\nlines')", "import sys; sys.exit(3)"),
    *("exit()", "raise GeneratorExit", "class Own(BaseException): pass\nraise Own('x')", "raise BaseException"),
    *("1 / 0", "("),
)


@pytest.mark.parametrize(("arguments", "read"), [(["--help"], 0), (["tiny", "--help", "all"], 1)])
def test_row_23_a_closed_output_pipe_is_not_an_error(arguments: list[str], read: int) -> None:
    program = [sys.executable, "-m", "launch.train", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(read)
        process.stdout.close()
        assert process.stderr.read() == ""
        # The whole output may fit into the pipe before it is closed.
        assert process.wait() in (141, 0 if read else 141)


def test_row_23_other_broken_pipes_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: list[str]) -> int:
        raise BrokenPipeError(32, "a scorer is gone")

    assert run_program(main) == 1
    assert "a scorer is gone" in capsys.readouterr().err


def test_row_23_warnings_of_a_program_name_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(written)])
    plain_warnings()
    logging.getLogger("launch.data.problems").warning("data.train = a: dropped")
    assert written.getvalue() == "WARNING: data.train = a: dropped\n"


@pytest.mark.parametrize("number", range(len(EXITS)))
def test_row_23_a_file_that_exits_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / f"exits_{number}.py"
    recipe.write_text(EXITS[number])
    with pytest.raises(ConfigError, match=f"CONFIG = {recipe}: "):
        load_recipe(str(recipe))
    monkeypatch.syspath_prepend(tmp_path)
    with refuses(f"loss.function = exits_{number}:f: ", ConfigError):
        load_function("loss.function", f"exits_{number}:f")
    monkeypatch.setattr(sys, "argv", ["program", str(recipe)])
    assert run_program(launch.train.main) == 2
    recipe.write_text("raise KeyboardInterrupt")
    assert run_program(launch.train.main) == 130


@pytest.mark.parametrize(
    ("name", "hint"), [("animl", " (did you mean animal?)"), ("Animal", " (did you mean animal?)"), ("xyz", "")]
)
def test_a_function_that_is_missing_names_the_closest(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_animals.py").write_text("animals = 1\n\ndef animal(completion, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    missing = (
        f"AttributeError: module 'own_animals' has no attribute {name!r}{hint}; must be exact, package.module:name"
    )
    with refuses(f"reward.scorer = own_animals:{name}: {missing}", ConfigError):
        load_function("reward.scorer", f"own_animals:{name}", ["exact"])
    with refuses(
        "reward.scorer = own/animals.py:animal: must name a module, not its file: own.animals:animal", ConfigError
    ):
        load_function("reward.scorer", "own/animals.py:animal")


RATES = "--policy-optimizer.learning-rate, --draft-optimizer.learning-rate or --warmup.optimizer.learning-rate?"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning-rate 1e-5", RATES),
        ("--lr=1e-5", RATES),
        ("--actor_rollout_ref.actor.optim.lr 1e-5", RATES),
        ("lr=1e-5", RATES),
        ("--learning-rte 1e-5", RATES),
        ("--draft.lr 1e-5", "--draft-optimizer.learning-rate, --policy-optimizer.learning-rate or "),
        ("--policy-lr 1e-5", "mean --policy-optimizer.learning-rate?"),
        ("--num-generations 8", "mean --rollout.group-size?"),
        ("actor_rollout_ref.rollout.n=8", "mean --rollout.group-size?"),
        ("--temperature 1", "mean --rollout.law.temperature?"),
        ("--grpo.num_prompts_per_step 8", "mean --data.prompts?"),
        ("--epsilon 0.2", "mean --loss.clip-low or --loss.clip-high?"),
        ("--beta 0", "mean --loss.kl-coefficient or --teacher.beta?"),
        ("--path x", "mean --teacher.path, --model.path, --lora.path or --draft.path?"),
        ("--num-layers 3", "--model.architecture.num-layers: set model.architecture.num_layers in a recipe file; "),
        ("--length 3", "mean --rollout.draft-length, --reward.length.least, "),
    ],
)
def test_row_54_an_unknown_option_names_all_it_may_mean(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(["tiny", *words.split()], "python -m launch.train", "Train.", TRAIN)
    assert_refused(str(error.value), f"...{message}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hosts.coordinator a:1", "hosts.coordinator = a:1: has no effect with hosts.count = 1\n"),
        (
            "--draft.kind none --draft-optimizer.learning-rate 1",
            "draft_optimizer.learning_rate = 1.0: has no effect with ",
        ),
        ("--warmup.steps 0 --warmup.batch-size 3", "warmup.batch_size = 3: has no effect with warmup.steps = 0\n"),
        (
            "--eval.every 0 --distill.steps 0 --eval.samples 3",
            "eval.samples = 3: has no effect with eval.every = 0 and distill.steps = 0\n",
        ),
        ("--log.samples 0 --log.samples-every 3", "log.samples_every = 3: has no effect with log.samples = 0\n"),
        (
            "--draft-training.mode frozen --distill.steps 0 --draft-optimizer.learning-rate 0.3",
            "draft_optimizer.learning_rate = 0.3: has no effect with draft_training.mode = frozen and ",
        ),
        ("--reward.scorer exact_traced --reward.workers 3", "reward.workers = 3: has no effect with reward.scorer = "),
        ("--reward.scorer exact_traced --reward.time-limit-s 3", "reward.time_limit_s = 3.0: has no effect with "),
        ("--hosts.silence 9", "hosts.silence = 9: has no effect with hosts.count = 1\n"),
        ("--draft.unroll 7 --warmup.steps 0 --seed 3", ""),
    ],
)
def test_row_91_an_option_without_effect_is_said(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse_run(["tiny", *words.split()], "python -m launch.train", "Train.", TRAIN)
    out = capsys.readouterr().out
    assert out.startswith(said) and out.count("\n") == bool(said)


def test_row_91_an_option_that_the_kind_of_draft_does_not_read_is_refused() -> None:
    with refuses("draft.unroll = 7: ...3 with kind dspark", ConfigError):
        parse_run(["tiny", "--draft.kind", "dspark", "--draft.unroll", "7"], "python -m launch.train", "Train.", TRAIN)


@pytest.mark.parametrize("name", ["host", "device", "dropout", "server", "save", "foo"])
def test_row_98_no_guess_is_better_than_a_silly_one(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(["tiny", f"--{name}", "x"], "python -m launch.train", "Train.", TRAIN)
    assert "mean" not in str(error.value)


def test_row_54_each_unknown_option_has_a_line_and_another_programs_option_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(["tiny", "--lr", "-1", "--zzz", "--beta=0"], "python -m launch.train", "Train.", TRAIN)
    assert [line.partition(":")[0] for line in error.value.args] == ["--lr", "--zzz", "--beta"]
    with refuses("--lr: ...--policy-optimizer.learning-rate: launch.generate does not read it", ConfigError):
        parse_run(["tiny", "--lr", "1"], "python -m launch.generate", "Generate.", GENERATE)
    with refuses("--eval.prompts: ...launch.evaluate does not read it, but --prompts", ConfigError):
        launch.evaluate.main(["tiny", "--eval.prompts", "5"])


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        ("lr", "--policy-optimizer.learning-rate FLOAT", "--seed"),
        ("temperature", "--rollout.law.temperature FLOAT", "--seed"),
        ("--num-generations", "--rollout.group-size INT", "--seed"),
        ("kl penalty", "--loss.kl-coefficient FLOAT", "--seed"),
        ("Muon", "--policy-optimizer.kind", "--seed"),
        ("draft-training", "draft_training: ", "--seed"),
        ("all", "--seed", "nothing"),
    ],
)
def test_row_54_help_searches(words: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run(["tiny", f"--help={words}"], "python -m launch.train", "Train.", TRAIN)
    said = capsys.readouterr().out
    assert shown in said and hidden not in said


def test_row_54_help_of_what_is_no_option() -> None:
    for words, message in {"xyzzy": "a section: run, ", "num-layers": "set model.architecture.num_layers in a"}.items():
        with refuses(f"--help '{words}': ...{message}", ConfigError):
            parse_run(["tiny", "--help", words], "python -m launch.train", "Train.", TRAIN)


def test_row_54_synonyms_stand_for_options() -> None:
    flags = [*(field.flag for field in fields_of(RunConfig)), "--algorithm"]
    for option, names in SYNONYMS.items():
        assert any(option in (flag, f"--{flag.rpartition('.')[2]}") for flag in flags), option
        for name in names.split():
            assert named_like(name, flags) and f"--{name}" not in flags, name


def test_row_104_every_option_that_may_be_none_takes_none() -> None:
    fields = [field for field in fields_of(RunConfig) if NoneType in field.kinds]
    assert len(fields) > 40 and {field.path for field in fields} >= {"loss.importance_cap", "data.train"}
    for field in fields:
        assert [field.read([word]) for word in ("none", "None")] == [None, None], field.path
    words = ["tiny", "--loss.importance-cap", "none", "--rollout.law.top-k=none", "--data.tools-field", "none"]
    config = parse_run(words, "", "")
    assert (config.loss.importance_cap, config.rollout.law.top_k, config.data.tools_field) == (None, None, None)
    with refuses("loss.importance_cap = nothing: must be FLOAT|None"):
        parse_run(["tiny", "--loss.importance-cap", "nothing"], "", "")
