"""The programs as a user runs them, on networks and problems of almost no size."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import launch.generate
import launch.train
from configs.gsm8k import DATA
from launch.cli import run_program
from launch.loggers import metric_names
from launch.train import StepRecord
from tests.launch.checkpoints import write_checkpoint, write_problems
from tests.launch.processes import children, gone

HERE = Path(__file__).parent
PROBLEMS = 12
DRAFT_LENGTH = 2
SHRUNK = {
    "--data.prompts": "4",
    "--data.max-prompt-tokens": "40",
    "--rollout.group-size": "4",
    "--rollout.max-new-tokens": "8",
    "--rollout.draft-length": str(DRAFT_LENGTH),
    "--microbatches": "2",
    "--model.feature-layers": "0 1",
    "--model.dtype": "float32",
    "--policy-optimizer.learning-rate": "0.01",
    "--reward.workers": "1",
    "--eval.every": "0",
    "--probe-every": "0",
}
# What a step's time and a probe decide; all else is the same however often a run is made.
TIMED = ("time/", "perf/")

Options = dict[str, str]


def argv(config: str, options: Options) -> list[str]:
    return [config, *(part for name, value in options.items() for part in (name, *value.split(" ")))]


def start(config: str, options: Options, *flags: str) -> subprocess.Popen[str]:
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.train", *argv(config, options), *flags],
        env=os.environ
        | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What the program printed; it must have ended well."""
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out


def saves(run: Path) -> list[int]:
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def metrics(run: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def measured(line: dict[str, float | None]) -> set[str]:
    return {name for name, value in line.items() if value is not None}


@pytest.fixture(scope="module", autouse=True)
def light_compilation() -> Iterator[None]:
    """Every program is run once and on little: what compiles fastest is best."""
    kept = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", kept)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy`, a checkpoint with a tokenizer, and problems to train and to evaluate on."""
    directory = tmp_path_factory.mktemp("files")
    write_checkpoint(directory / "policy")
    write_problems(directory / "train.jsonl", ["1", "2", "3"] * (PROBLEMS // 3))
    write_problems(directory / "test.jsonl", ["1", "2", "3"])
    return directory


@pytest.fixture(scope="module")
def shrunk(files: Path) -> Options:
    data = {"--data.train": str(files / "train.jsonl"), "--data.held-out": str(files / "test.jsonl")}
    return SHRUNK | {"--model.path": str(files / "policy")} | data


@pytest.fixture(scope="module")
def killed(files: Path, shrunk: Options) -> tuple[Path, int, list[int]]:
    """A run ended by SIGKILL once it had saved, its newest save, and the processes that it had started."""
    pytest.importorskip("math_verify")
    run = files / "killed"
    process = start("gsm8k", shrunk | {"--out": str(run), "--steps": "1000", "--checkpoint.every": "1"})
    try:
        deadline = time.monotonic() + 300
        while not saves(run) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process.poll() is None, process.communicate()
        started = children(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return run, saves(run)[-1], started


@pytest.fixture(scope="module")
def steps(killed: tuple[Path, int, list[int]]) -> int:
    return killed[1] + 2


@pytest.fixture(scope="module")
def resumed(killed: tuple[Path, int, list[int]], shrunk: Options, steps: int) -> str:
    """What the killed run said when it was resumed."""
    out = {"--out": str(killed[0]), "--steps": str(steps), "--checkpoint.every": "1"}
    return finish(start("gsm8k", shrunk | out, "--resume"))


@pytest.fixture(scope="module")
def finished(files: Path, shrunk: Options, steps: int) -> Path:
    """The run that the killed one would have been."""
    run = files / "finished"
    said = finish(start("gsm8k", shrunk | {"--out": str(run), "--steps": str(steps)}))
    assert f"run directory: {run}\n" in said
    return run


def test_a_run_leaves_everything_behind(finished: Path, files: Path, steps: int):
    lines = metrics(finished)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    names = ("step", *metric_names(DRAFT_LENGTH))
    only_in_other_runs = {"eval/accuracy", "kl/reference", "perf/generation_tokens_per_s"}
    only_in_other_runs |= {"perf/speedup_vs_autoregressive"}
    only_in_other_runs |= {f"time/{stage}" for stage in ("prepare", "generation", "logprob", "train")}
    for line in lines:
        assert tuple(line) == names
        assert measured(line) == set(names) - only_in_other_runs
        assert line["reward/failed"] == 0
    # The scorer saw right answers and wrong ones, and the policy learnt from them.
    assert any(0 < (line["reward/mean"] or 0) < 1 for line in lines)
    assert any(line["grad_norm/policy"] for line in lines)
    config = json.loads((finished / "config.json").read_text())
    assert (config["name"], config["steps"], config["model"]["path"]) == ("gsm8k", steps, str(files / "policy"))
    assert config["reward"]["scorer"] == "math"
    assert saves(finished) == [steps]
    assert list(finished.glob("events.out.tfevents.*"))


def test_killed_and_resumed_is_as_if_it_had_never_been_killed(
    killed: tuple[Path, int, list[int]], resumed: str, finished: Path, steps: int
):
    run, save, _ = killed
    assert f"resumed after step {save}\n" in resumed
    assert saves(run)[-1] == steps
    lines, expected = metrics(run), metrics(finished)
    assert len(lines) == len(expected) == steps
    for line, other in zip(lines, expected, strict=True):
        for name in line:
            assert name.startswith(TIMED) or line[name] == other[name], f"{name} of step {line['step']}"


def test_a_killed_run_leaves_no_process_behind(killed: tuple[Path, int, list[int]]):
    _, _, started = killed
    assert started
    assert gone(started)


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="no GSM8K; SPECJAX_DATA names its directory")
def test_two_steps_on_gsm8k_itself(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("math_verify")
    options = SHRUNK | {"--model.path": str(files / "policy"), "--out": str(tmp_path / "run"), "--steps": "2"}
    assert launch.train.main(argv("gsm8k", options | {"--data.max-prompt-tokens": "64"})) == 0
    dropped = re.search(r"(\d+) prompts are empty or over 64 tokens: dropped", capsys.readouterr().out)
    assert dropped and 0 < int(dropped[1]) < 7473 / 2
    assert [line["reward/failed"] for line in metrics(tmp_path / "run")] == [0, 0]
    assert saves(tmp_path / "run") == [2]


def test_samples_that_cannot_be_scored_cost_nothing_else(
    files: Path, shrunk: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(HERE)
    write_problems(tmp_path / "train.jsonl", ["value 1", "raise an error", "hang", "value 0.25"])
    options = {
        "--data.train": str(tmp_path / "train.jsonl"),
        "--reward.scorer": "sample_scorers:by_answer",
        "--reward.workers": "2",
        "--reward.time-limit-s": "1",
        "--rollout.group-size": "2",
        "--steps": "2",
        "--checkpoint.every": "0",
        "--out": str(tmp_path / "run"),
    }
    assert launch.train.main(argv("gsm8k", shrunk | options)) == 0
    assert capsys.readouterr().out.count("4 not scored") == 2
    # Every step asks all four problems twice.
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert (line["reward/failed"], line["reward/mean"], line["reward/accuracy"]) == (4, 0.625, 0.5)
        assert line["reward/std"] == 0.375
        assert math.isfinite(line["loss/draft"] or math.nan)
    assert children_of_tests_scorers() == []


def children_of_tests_scorers() -> list[int]:
    def command(pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_text()

    return [pid for pid in children(os.getpid()) if "sample_scorers:by_answer" in command(pid)]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs a program that must refuse: exit code 2, nothing done, and returns the one line that it says why."""

    def refuse(main: Callable[[list[str]], int], arguments: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        before = sorted(tmp_path.rglob("*"))
        assert run_program(main) == 2
        out, errors = capsys.readouterr()
        assert out == "" and errors.startswith("error: ") and errors.endswith("\n")
        assert errors.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return errors.removeprefix("error: ").removesuffix("\n")

    return refuse


Refusal = Callable[[Callable[[list[str]], int], list[str]], str]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--data.train": "nowhere.jsonl"}, "nowhere.jsonl: cannot read it: No such file or directory"),
        ({"--data.answer-field": "solution"}, "train.jsonl:1: no field 'solution'; it has 'question', 'answer'"),
        ({"--data.prompt-field": "problem"}, "train.jsonl:1: no field 'problem'; it has 'question', 'answer'"),
        ({"--model.path": "nowhere"}, "tokenizer: no directory 'nowhere'"),
        ({"--model.path": "nowhere", "--data.tokenizer": "bytes"}, "model.path = nowhere: no config.json there"),
        ({"--draft.hidden-size": "12"}, "hidden_size"),
        ({"--model.feature-layers": "0 1 7"}, "feature_layers = (0, 1, 7): must be distinct, ascending and within"),
        ({"--mesh.data": "9"}, "mesh = (9, 1, 1): needs 9 devices, 8 present"),
        ({"--mesh.data": "0"}, "mesh.data = 0: must be at least 1"),
        ({"--mesh.data": "3"}, "data.prompts = 4: must be a multiple of mesh.data x mesh.fsdp = 3"),
        ({"--data.prompts": "6", "--mesh.fsdp": "4"}, "data.prompts = 6: must be a multiple of mesh.data x mesh.fsdp"),
        ({"--microbatches": "3"}, "microbatches = 3: must divide the 16 sequences of a data shard"),
        ({"--data.prompts": "100"}, "prompts a batch=100: must be between 1 and 12"),
        ({"--data.prompts": "0"}, "prompts a batch=0: must be between 1 and 12"),
        ({"--data.max-prompt-tokens": "2"}, "usable prompts"),
        ({"--rollout.group-size": "0"}, "rollout.group_size = 0: must be at least 1"),
        ({"--rollout.law.top-p": "0.9"}, "allowed only with allow_truncated_law"),
        ({"--reward.scorer": "nowhere:score"}, "scorer='nowhere:score': ModuleNotFoundError"),
        ({"--reward.time-limit-s": "0"}, "time_limit_s=0.0: both must be positive"),
        ({"--draft.vocab-size": "100"}, "vocab_size = 100"),
        ({"--draft.kind": "none"}, "rollout.draft_length = 2: must be 0 with draft.kind none"),
        ({"--eval.every": "1", "--eval.samples": "0"}, "eval.samples = 0: must be at least 1"),
        ({"--eval.every": "1", "--eval.prompts": "0"}, "eval.prompts = 0: must be at least 1"),
        ({"--steps": "-1"}, "steps = -1: must be at least 1"),
        ({"--checkpoint.keep": "0"}, "checkpoint.keep = 0: must be at least 1"),
        ({"--seed": "-1"}, "seed = -1: must be between 0 and"),
        ({"--warmup.steps": "1", "--warmup.batch-size": "2"}, "has no solution to learn from"),
        ({"--speedup.slots": "4", "--speedup.prompts": "4"}, "speedup.prompts = 4: must be at most 3, the usable"),
        (
            {"--speedup.slots": "2", "--speedup.prompts": "3", "--mesh.data": "2"},
            "speedup.prompts = 3: must be a multiple of mesh.data x mesh.fsdp = 2",
        ),
        ({"--rollout.draft-lengths": "0 2", "--cost-table": "none.json"}, "cost_table = none.json: no table of costs"),
        ({"--cost-table": "t.json"}, "cost_table = t.json: must be none without rollout.draft_lengths"),
        ({"--speedup.slots": "0"}, "speedup.slots = (0,): each must be at least 1"),
        ({"--speedup.slots": "1", "--draft.kind": "none", "--rollout.draft-length": "0"}, "(1,): must be empty"),
    ],
)
def test_training_refuses(refusal: Refusal, shrunk: Options, options: Options, message: str):
    assert message in refusal(launch.train.main, argv("gsm8k", shrunk | options))


def test_training_refuses_what_names_no_run(refusal: Refusal, shrunk: Options, finished: Path):
    assert "CONFIG = gms8k: must be one of gsm8k, " in refusal(launch.train.main, argv("gms8k", shrunk))
    unknown = refusal(launch.train.main, ["gsm8k", "--data.promts", "4"])
    assert unknown == "Unrecognized options: --data.promts, 4; did you mean --data.prompts?"
    nothing = refusal(launch.train.main, ["gsm8k"])
    assert nothing == "model.path = None: must be a directory with a tokenizer, or set data.tokenizer to bytes"
    taken = refusal(launch.train.main, argv("gsm8k", shrunk | {"--out": str(finished)}))
    assert taken == f"out = {finished}: holds a run already; --resume continues it"


def test_a_line_without_the_field_is_named(refusal: Refusal, shrunk: Options, files: Path):
    path = files / "incomplete.jsonl"
    path.write_text('{"question": "1 ?", "answer": "#### 1"}\n\n{"question": "2 ?", "anser": "#### 2"}\n')
    said = refusal(launch.train.main, argv("gsm8k", shrunk | {"--data.train": str(path)}))
    assert said == f"{path}:3: no field 'answer'; it has 'question', 'anser'"


def test_a_refusal_is_one_line_from_outside_too(shrunk: Options, tmp_path: Path):
    out = tmp_path / "run"
    process = start("gsm8k", shrunk | {"--data.train": "nowhere.jsonl", "--out": str(out)})
    said, errors = process.communicate(timeout=120)
    assert (process.returncode, said) == (2, "")
    assert errors == "error: nowhere.jsonl: cannot read it: No such file or directory\n"
    assert not out.exists()


def test_generate_answers_from_a_finished_run(
    finished: Path, shrunk: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    own = {"--checkpoint": str(finished), "--samples": "2", "--data.train": "not-needed.jsonl"}
    assert launch.generate.main([*argv("gsm8k", shrunk | own), "--prompt", "1 and 2 ?"]) == 0
    *answers, summary = capsys.readouterr().out.removesuffix("\n").split("\n\n")
    assert len(answers) == 2
    assert set(" ".join(answers).split()) <= {"and", "?", "1", "2", "3"}
    assert "tokens/s" in summary and "tokens a round" in summary


def test_generate_refuses(refusal: Refusal, shrunk: Options, tmp_path: Path, finished: Path):
    def said(prompt: str, options: Options) -> str:
        return refusal(launch.generate.main, [*argv("gsm8k", shrunk | options), "--prompt", prompt])

    assert said("1 ?", {"--checkpoint": str(tmp_path)}) == f"checkpoint = {tmp_path}: no checkpoints there"
    (tmp_path / "checkpoints").mkdir()
    assert said("1 ?", {"--checkpoint": str(tmp_path)}) == f"checkpoint: {tmp_path}/checkpoints: no save"
    wider = {"--checkpoint": str(finished), "--draft.intermediate-size": "24"}
    assert "expected float32[24, 16]" in said("1 ?", wider)
    assert said("1 " * 50, {}) == "prompt: must take 1 .. 40 tokens (data.max_prompt_tokens)"
    assert said("1 ?", {"--samples": "0"}) == "samples = 0: must be at least 1"


def test_draft_lengths_are_chosen_by_a_table_that_can_be_used_again(shrunk: Options, tmp_path: Path):
    """Measured, kept, followed on resume, and read by another run, which then is the same to the bit."""
    pytest.importorskip("math_verify")
    options = shrunk | {"--rollout.draft-lengths": "0 2", "--rollout.phases": "8 9999 2 9999"}
    first, second = tmp_path / "first", tmp_path / "second"
    assert launch.train.main(argv("gsm8k", options | {"--steps": "2", "--out": str(first)})) == 0
    table = json.loads((first / "cost_table.json").read_text())
    assert {(cell["slots"], cell["draft_length"]) for cell in table["cells"]} == {
        *((8, 0), (8, 2), (2, 0), (2, 2)),
        # A quarter of the last phase's slots, without which the model would not be determined.
        *((1, 0), (1, 2)),
    }
    assert min(table["model"].values()) >= 0 < min(cell["seconds"] for cell in table["cells"])
    assert launch.train.main([*argv("gsm8k", options | {"--steps": "4", "--out": str(first)}), "--resume"]) == 0
    again = options | {"--cost-table": str(first / "cost_table.json")}
    assert launch.train.main(argv("gsm8k", again | {"--steps": "4", "--out": str(second)})) == 0
    lines, others = metrics(first), metrics(second)
    assert len(lines) == len(others) == 4
    for line, other in zip(lines, others, strict=True):
        assert line["rollout/draft_length"] is not None
        for name in line:
            assert name.startswith(TIMED) or line[name] == other[name], f"{name} of step {line['step']}"


def test_a_step_that_ends_within_its_call_is_timed_by_itself():
    logged = {}
    record = StepRecord(SimpleNamespace(log=lambda number, values: logged.update({number: values["time/step"]})))  # pyright: ignore[reportArgumentType]
    metrics = {"reward/mean": jax.block_until_ready(jnp.zeros(()))}
    for number, seconds in ((1, 0.2), (2, 0.1)):
        begin = time.perf_counter()
        time.sleep(seconds)
        record.dispatched(number, begin, dict(metrics))
    record.finish()
    assert logged[1] >= 0.2 and logged[2] >= 0.1


def test_tiny_from_warm_up_to_the_closing_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = {
        "--model.architecture.hidden-size": "16",
        "--model.architecture.intermediate-size": "16",
        "--model.architecture.num-layers": "2",
        "--model.architecture.num-heads": "2",
        "--model.architecture.num-kv-heads": "1",
        "--model.architecture.head-dim": "8",
        "--model.feature-layers": "0 1",
        "--data.arithmetic.problems": "64",
        "--data.arithmetic.max-terms": "3",
        "--data.held-out-count": "16",
        "--data.prompts": "4",
        "--data.max-prompt-tokens": "6",
        "--rollout.group-size": "2",
        "--rollout.max-new-tokens": "20",
        "--rollout.draft-length": "1",
        "--warmup.steps": "2",
        "--warmup.batch-size": "4",
        "--steps": "4",
        "--eval.every": "3",
        "--eval.prompts": "8",
        "--probe-every": "2",
        "--checkpoint.every": "3",
        "--speedup.slots": "4",
        "--speedup.draft-lengths": "1",
        "--speedup.prompts": "8",
        "--speedup.repeats": "1",
        "--out": str(tmp_path / "run"),
    }
    assert launch.train.main(argv("tiny", options)) == 0
    said = capsys.readouterr().out
    for part in ("warm-up step 2: loss ", "held out ", "held-out accuracy: ", "autoregressive", "speed-up "):
        assert part in said
    lines = metrics(tmp_path / "run")
    names = ("step", *metric_names(1))
    stages = {f"time/{stage}" for stage in ("prepare", "generation", "logprob", "train")}
    stages |= {"perf/generation_tokens_per_s", "perf/speedup_vs_autoregressive"}
    for number, line in enumerate(lines, start=1):
        assert line["step"] == number and tuple(line) == names
        left_out = {"kl/reference"}
        left_out |= set() if number == 3 else {"eval/accuracy"}
        left_out |= set() if number % 2 == 0 else stages
        assert measured(line) == set(names) - left_out
        assert line["rollout/draft_length"] == 1
    assert len(lines) == 4
    assert saves(tmp_path / "run") == [3, 4]
