"""Faults that could lose or damage a run."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import launch.train
from configs.schema import LogConfig, RunConfig
from launch.console import console
from launch.costs.cost_table import read_cells
from launch.errors import ConfigError
from launch.phases.lock import LOCK_FILE, exclusive
from launch.report import write_report
from launch.run.directory import CHECKPOINTS, open_run, record_config
from launch.run.history import cut_after, missing_history, records_of
from launch.run.logs import EventLog
from launch.run.metric_log import MetricLog, wandb_log
from specjax.checkpoint import Checkpointer
from specjax.checkpoint_integrity import DamagedSave, set_damaged_aside, write_manifest
from specjax.types import Params, TrainState
from tests.launch.programs import LEAST, argv
from tests.launch.test_report import run_of
from tests.refusals import assert_refused, refuses

CONFIG = RunConfig(name="sums", steps=10)


HOLDER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from launch.phases.lock import exclusive
with exclusive("out", Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(directory: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock of a directory until its standard input closes."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


@pytest.mark.parametrize("ending", ["end", "sigkill"])
def test_row_13_a_directory_is_locked_as_long_as_its_holder_lives(tmp_path: Path, ending: str) -> None:
    config = replace(CONFIG, out=str(tmp_path / "a"))
    holder = hold(tmp_path / "a")
    for resume in (False, True):
        start = time.monotonic()
        with refuses(f"out = {tmp_path / 'a'}: process {holder.pid} on ", ConfigError):
            with open_run(replace(config, resume=resume)):
                pass
        assert time.monotonic() - start < 2
    with refuses(f"out = {tmp_path / 'a'}: process {holder.pid} on ", ConfigError):
        launch.train.main(argv("tiny", LEAST | {"--out": str(tmp_path / "a")}))
    with exclusive("out", tmp_path / "b"):
        pass
    if ending == "sigkill":
        holder.kill()
    holder.communicate()
    with open_run(config) as directory:
        assert LOCK_FILE in os.listdir(directory)
    assert not (tmp_path / "b").exists()


TAKE_TURNS = """
import multiprocessing, sys
from pathlib import Path
from launch.errors import ConfigError
from launch.phases.lock import exclusive
# Started by fork: each would import for seconds.
context = multiprocessing.get_context("fork")
entered = context.Semaphore(1)
def take_turns():
    for _ in range(50):
        try:
            with exclusive("out", Path(sys.argv[1])):
                assert entered.acquire(block=False), "two processes hold the lock"
                entered.release()
        except ConfigError:
            continue
processes = [context.Process(target=take_turns) for _ in range(3)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit([process.exitcode for process in processes] != [0, 0, 0])
"""


def test_row_13_no_two_processes_hold_the_lock(tmp_path: Path) -> None:
    """Meanwhile, the directory and the lock's file are repeatedly removed and created."""
    ended = subprocess.run([sys.executable, "-c", TAKE_TURNS, str(tmp_path / "x")], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def save(saves: Checkpointer, step: int, healthy: bool = True) -> None:
    state = TrainState(jnp.int32(step), Params({"x": jnp.zeros(2)}, {}), Params({}, {}), None)
    saves.save(step, state, {}, {}, healthy=healthy)


@pytest.fixture
def run_directory(tmp_path: Path) -> Iterator[Path]:
    with open_run(replace(CONFIG, out=str(tmp_path / "run"))) as directory:
        record_config(directory, CONFIG)
        (directory / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 7)))
        yield directory


@pytest.mark.parametrize("gone", ["directory", "contents"])
def test_row_16_a_run_whose_checkpoints_are_gone_is_not_started_again(tmp_path: Path, gone: str) -> None:
    resumed = replace(CONFIG, out=str(tmp_path / "run"), resume=True)
    with open_run(replace(resumed, resume=False)) as directory:
        record_config(directory, CONFIG)
        EventLog(directory).record_checkpoint(6)
    if gone == "contents":
        (directory / CHECKPOINTS).mkdir()
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with refuses("resume: ...checkpoints...6", ConfigError):
        with open_run(resumed):
            pass
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_row_16_history_is_set_aside_before_it_is_cut(run_directory: Path) -> None:
    path = run_directory / "metrics.jsonl"
    assert cut_after(path, 4) == 4
    assert [record["step"] for record in records_of(path)] == [1, 2, 3, 4]
    assert cut_after(path, 0) is None
    aside = (run_directory / "metrics.jsonl.set_aside").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [5, 6, 1, 2, 3, 4]


DAMAGED = [b"\xff\xfe\x00", b"[1]", b"null", b'{"step": "3"}', b'{"step": 1.5}', b"{}", b'{"step": 3, "x', b"[" * 10**5]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_row_18_damaged_lines_are_set_aside_with_a_line(run_directory: Path, line: bytes) -> None:
    path, said = run_directory / "metrics.jsonl", list[str]()
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert cut_after(path, 6, report=said.append) == 6
    assert [record["step"] for record in records_of(path)] == [1, 2, 3, 4, 5, 6]
    assert (run_directory / "metrics.jsonl.set_aside").read_bytes() == line + b"\n"
    assert len(said) == 1 and "metrics.jsonl" in said[0] and "\n" not in said[0]


HOSTILE = [None, True, -1, 10**400, 1e308, float("nan"), float("inf"), 1e-320, 2**63, "x", "\ud83d", [], [1], {}]


def damaged(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part of it removed or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        others = {other: value[other] for other in value if other != name}
        return others if rng.random() < 0.2 else others | {name: damaged(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], damaged(value[i], rng), *value[i + 1 :]]
    return rng.choice(HOSTILE)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "diary.jsonl", "config.json"])
def test_row_18_a_report_leaves_damaged_records_out(tmp_path: Path, name: str) -> None:
    path, rng = run_of(tmp_path, 12) / name, random.Random(0)
    lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    for _ in range(25):
        changed, i = list(lines), rng.randrange(len(lines))
        changed[i] = json.dumps(damaged(json.loads(lines[i]), rng))
        path.write_text("\n".join(changed))
        with contextlib.suppress(ConfigError):  # a config.json that is no object
            write_report(tmp_path)
    if name != "config.json":
        path.write_bytes(b"\n".join(DAMAGED) + b"\n" + "\n".join(lines).encode())
        assert f"{name}: {len(DAMAGED)} of {len(DAMAGED) + len(lines)} lines" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("levels", [100, 900, 10**5])
def test_row_18_a_config_of_many_levels_is_refused(tmp_path: Path, levels: int) -> None:
    (run_of(tmp_path, 1) / "config.json").write_text('{"a":' * levels + "1" + "}" * levels)
    with refuses("resume: ...config.json: ", ConfigError):
        with open_run(replace(CONFIG, out=str(tmp_path), resume=True)) as directory:
            record_config(directory, replace(CONFIG, resume=True))
    with refuses("/...config.json: ", ConfigError):
        write_report(tmp_path)


def test_row_15_checkpoints_of_skipped_updates_do_not_replace_healthy_ones(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as saves:
        for step in (3, 6, 9):
            save(saves, step)
        saves.mark_unhealthy(9)  # the step after it is skipped
        for step in (12, 15, 18):
            save(saves, step, healthy=False)
        assert saves.newest_healthy() == 6
    for _ in range(2):
        with Checkpointer(tmp_path, keep=2) as saves:
            assert saves.newest() == 18 and saves.newest_healthy() == 6
            assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()) == [6, 18]
    with Checkpointer(tmp_path, keep=2) as saves:
        for step in (21, 24):
            save(saves, step)
        assert saves.newest_healthy() == 24
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()) == [21, 24]


# With dozens of arrays, the threads that write them report errors of their own.
FULL_DISK = """
import resource, signal
from pathlib import Path
from types import SimpleNamespace
import jax.numpy as jnp
from launch.cli.program import run_program
from launch.phases.long_phases import LongPhases
from specjax.checkpoint import Checkpointer
from specjax.checkpoint_integrity import DamagedSave, set_damaged_aside, write_manifest
from specjax.types import Params, TrainState
def arrays(count):
    return {f"x{i}": jnp.arange(count) * 1.1 for i in range(60)}
def fill():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
def state(count):
    return TrainState(jnp.int32(1), Params(arrays(count), {}), Params({}, {}), None)
def checkpoint(directory):
    with Checkpointer(directory, keep=2) as saves:
        saves.save(3, state(1), {}, {})
        saves.wait()
        fill()
        saves.save(6, state(10**5), {}, {})
        saves.save(9, state(1), {}, {})
def phase(directory):
    with LongPhases(directory).phase("warm-up", 9, "steps") as phase:
        phase.finish({"networks": arrays(1)}, save=True)
        fill()
        phase.finish({"networks": arrays(10**5)}, save=True)
def main(argv):
    globals()[argv[0]](Path(argv[1]))
    return 0
raise SystemExit(run_program(main))
"""


@pytest.mark.parametrize(
    ("what", "path", "whole"), [("checkpoint", "6", "step 3"), ("phase", "warm-up/2", "warm-up: 1 steps are saved")]
)
def test_row_17_failed_writes_end_in_one_line(tmp_path: Path, what: str, path: str, whole: str) -> None:
    command = [sys.executable, "-c", FULL_DISK, what, str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert_refused(line, f"error: {tmp_path / path}: cannot be written: ...File too large...{whole}")
    assert "Event loop is closed" not in ended.stderr and "never retrieved" not in ended.stderr
    assert ended.returncode == 1


@pytest.mark.parametrize("out", ["", "/proc/run", "file/run"])
def test_row_17_an_unwritable_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with refuses(f"out = {out or repr(out)}: ", ConfigError), open_run(replace(CONFIG, out=out)):
        pass
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("name", ["[ace]o", "[/bold]", "[red]", "[link=x]", "3:100:5", ":x:"])
def test_row_19_names_are_printed_as_they_are(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(replace(CONFIG, out=str(tmp_path / name))) as directory:
        record_config(directory, CONFIG, report=console.print)
        EventLog(directory).warn(1, f"a text [{name}]")
    said = capsys.readouterr().out
    assert f"run directory: {tmp_path / name}\n" in said and f"a text [{name}]\n" in said


def test_row_19_no_console_reads_markup() -> None:
    root = Path(__file__).parents[2]
    lines = [line for path in root.glob("launch/**/*.py") for line in path.read_text().splitlines()]
    consoles = [line for line in lines if "Console(" in line and not line.startswith("class ")]
    assert consoles and all("markup=False, emoji=False" in line for line in consoles)


def no_network(*_: Any, **__: Any) -> Any:
    raise OSError("no network\nmore")


@pytest.mark.parametrize("failing", [no_network, sys.exit])
def test_row_38_wandb_that_does_not_start_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: failing("no network")))
    monkeypatch.setattr("launch.train.start_new", lambda *_: pytest.fail("something was compiled"))
    with refuses("log.wandb_project = sums: ...no network", ConfigError):
        launch.train.main(argv("tiny", LEAST | {"--out": str(tmp_path / "run"), "--log.wandb-project": "sums"}))


def test_row_38_a_log_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SimpleNamespace(log=no_network, finish=no_network)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: broken))
    monkeypatch.setattr("launch.run.metric_log.EventsWriter", no_network)
    warned, config = list[tuple[int, str]](), replace(CONFIG, log=LogConfig(wandb_project="sums"))
    with wandb_log(config, tmp_path) as also:
        with MetricLog(tmp_path, also=also, warn=lambda step, text: warned.append((step, text))) as metrics:
            for step in (1, 2, 3):
                metrics.log(step, {"reward/mean": 0.5})
    assert [step for step, _ in warned] == [1, 1] and all("no network; the run goes on" in text for _, text in warned)
    assert [text.partition(" failed: ")[0] for _, text in warned] == ["TensorBoard", "Weights & Biases"]
    assert len(list(records_of(tmp_path / "metrics.jsonl"))) == 3
    assert capsys.readouterr().out.count("Weights & Biases failed: OSError: no network") == 1


FILES = ["config.json", "metrics.jsonl", "diary.jsonl", "samples.jsonl", "wandb_id", "cost_table.json", ".lock"]


@pytest.mark.parametrize("name", [*FILES, ".metrics.jsonl.tmp", "metrics.jsonl.set_aside"])
@pytest.mark.parametrize("resume", [True, False])
def test_row_42_a_file_of_a_run_is_a_regular_one(run_directory: Path, tmp_path: Path, name: str, resume: bool) -> None:
    directory = tmp_path / "other"
    shutil.copytree(run_directory, directory)
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with refuses("...regular file", ConfigError):
        with open_run(replace(CONFIG, out=str(directory), resume=resume)):
            pass


def test_row_42_no_pipe_device_or_directory_is_read_as_a_record(run_directory: Path) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        path = run_directory / f"{make.__name__.strip('<>')}.jsonl"
        make(path)
        with refuses(f"{path}: must be a regular file", ConfigError):
            list(records_of(path))
        with refuses("cost_table = ...must be a regular file", ConfigError):
            read_cells(path)


@pytest.mark.parametrize("name", ["1/files.json", "1/_CHECKPOINT_METADATA", "1/state/data"])
def test_row_42_a_checkpoint_with_a_pipe_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / "1/state").mkdir(parents=True)
    write_manifest(tmp_path / "1")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with refuses(f"...{name[2:]} is no regular file", DamagedSave):
        set_damaged_aside(tmp_path)


def test_row_42_missing_history_is_said(run_directory: Path) -> None:
    (run_directory / "diary.jsonl").touch()
    (run_directory / "samples.jsonl").touch()
    assert not missing_history(run_directory, 6, True) and not missing_history(run_directory, 0, True)
    (line,) = missing_history(run_directory, 8, True)
    assert line.endswith("has no metrics of 2 of 8 steps, the first 7")
    for name in ("metrics.jsonl", "diary.jsonl", "samples.jsonl"):
        (run_directory / name).unlink()
    lines = missing_history(run_directory, 6, True)
    assert [line.rpartition("/")[2].partition(":")[0] for line in lines] == [
        *("metrics.jsonl", "diary.jsonl", "samples.jsonl")
    ]
    assert "6 of 6 steps, the first 1" in lines[0] and missing_history(run_directory, 6, False) == lines[:2]
