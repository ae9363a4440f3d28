"""Runs over several processes on this machine give the results of one process, and all processes end together."""

import json
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.schema import AsynchronousConfig, HostsConfig, MeshConfig
from configs.tiny import config
from launch.errors import RunStopped, Stopped
from launch.jobs.failures import fail
from launch.jobs.hosts import common, join_hosts, launched_by_a_cluster
from launch.jobs.rendezvous import wait_for_all
from launch.jobs.silence import place_of
from specjax.parallel.messages import decode, encode
from tests.jobs import finish_job, free_port, start_job
from tests.launch.processes import children
from tests.launch.programs import LEAST, Options, argv, assert_same_run, metrics, saves, without_times
from tests.refusals import refuses

TWO = LEAST | {"mesh.data": 2, "data.prompts": 4, "log.samples": 4}
WITHIN_S = 30.0


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),  # the batch script itself
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, False),
        ({"OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, False),  # no package `kubernetes`
    ],
)
def test_a_launcher_of_several_processes_is_recognised(environment: dict[str, str], several: bool) -> None:
    assert launched_by_a_cluster(environment) == several


def test_devices_are_requested_for_both_meshes_before_a_checkpoint_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process starts nothing."""
    assert join_hosts(config) == config and not jax.distributed.is_initialized()
    requested = dict[str, Any]()
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(jax.config, "update", requested.__setitem__)
    for lag, count in ((None, 2), (1, 5)):
        ahead = AsynchronousConfig(lag, MeshConfig(data=3) if lag else MeshConfig())
        join_hosts(replace(config, mesh=MeshConfig(data=2), asynchronous=ahead))
        assert requested["jax_num_cpu_devices"] == count


def test_bad_hosts_are_refused_in_one_line() -> None:
    with refuses("index = 2: must be below count = 2"):
        HostsConfig("anna:1234", 2, 2)
    with refuses("coordinator = None: must be HOST:PORT of process 0 where count = 2"):
        HostsConfig(None, 2)
    for wrong in ("anna", "anna:port", ":1234", "anna:0", "anna:65536", "http://anna:1234", "::1:1234"):
        with refuses(f"coordinator = {wrong}: must be HOST:PORT, with a port of 1 to 65535"):
            HostsConfig(wrong)
    for right in ("node-7.example.com:1234", "10.0.0.1:65535", "[fe80::1]:1"):
        HostsConfig(right, 2)


def test_a_process_with_other_options_is_refused() -> None:
    resumed, given = replace(config, resume=True), asdict(config)
    assert common(config, [asdict(resumed), given]) == resumed
    other = asdict(replace(config, seed=config.seed + 1, data=replace(config.data, prompts=3), steps=7, print_every=9))
    with refuses("hosts.index = 2: its options differ from those of process 0: seed = 1, in process 0 0...and 1 more"):
        common(config, [given, given, other])


def test_a_signal_that_stops_one_process_passes_to_the_others() -> None:
    passed = decode(encode(Stopped(15, "warm-up: stopped")))
    assert (passed.signal, str(passed)) == (15, "warm-up: stopped")


# Processes find each other, or each ends with a one-line reason.


def call_all(*processes: tuple[int, int], port: int | None = None, within_s: float = 20.0) -> list[str]:
    """Call from one thread per (index, count). Return each one's error without the coordinator's address, or ""."""
    address = f"localhost:{port or free_port()}"

    def call(index: int, count: int) -> str:
        try:
            wait_for_all(HostsConfig(address, count, index), within_s)
        except RunStopped as refusal:
            return str(refusal).removeprefix(f"hosts.coordinator = {address}: ")
        return ""

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(call, *zip(*processes, strict=True)))


def test_all_processes_are_found() -> None:
    assert call_all((0, 3), (1, 3), (2, 3)) == [""] * 3


def test_two_processes_of_one_index_are_refused_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.jobs.rendezvous._FAILED_WITHIN_S", 0.5)  # until when process 0 waits for process 2
    assert call_all((0, 3), (1, 3), (1, 3)) == ["two processes have hosts.index = 1"] * 3


def test_different_counts_are_refused_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are more processes than process 0 knows of."""
    monkeypatch.setattr("launch.jobs.rendezvous._FAILED_WITHIN_S", 2.0)
    refusals = call_all((0, 2), (1, 3), (2, 3))
    assert refusals == [refusals[0]] * 3 and refusals[0].endswith("has hosts.count = 3, and process 0 has 2")


def test_a_missing_process_is_named_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.jobs.rendezvous._RETRY_S", 0.02)  # process 1 may call before process 0 listens
    assert call_all((0, 3), (1, 3), within_s=2.0) == ["process 2 is missing after 2 s"] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_before_the_job_begins_is_named_in_each(failing: int) -> None:
    """Those that wait are told at once. Process 0 waits for one that calls later."""
    port = free_port()
    hosts = f"--hosts.coordinator=localhost:{port} --hosts.count 3 --hosts.index {failing}"
    threading.Timer(0.5, fail, (2, "steps = x: must be INT", ["tiny", *hosts.split()])).start()
    early, late = [(index, 3) for index in range(3) if index != failing]
    with ThreadPoolExecutor() as threads:
        told = threads.submit(call_all, early, port=port)
        time.sleep(3.0)
        assert told.done() == (failing == 0)
        assert call_all(late, port=port) == told.result() == [f"process {failing} failed: steps = x: must be INT"]


def test_a_process_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TAKEN_WITHIN_S", "_RETRY_S"):
        monkeypatch.setattr(f"launch.jobs.rendezvous.{name}", 0.1)
    with socketserver.TCPServer(("", 0), socketserver.BaseRequestHandler) as begun:  # hangs up, as JAX does
        threading.Thread(target=begun.serve_forever, args=(0.01,)).start()
        (refusal,) = call_all((1, 2), port=begun.server_address[1], within_s=20)
        begun.shutdown()
    assert refusal == "another program, or a job that has begun without hosts.index = 1, has the port"


@pytest.mark.parametrize("index", [0, 1])
def test_a_port_of_another_program_is_refused(index: int) -> None:
    with socket.create_server(("", 0)) as other:
        (refusal,) = call_all((index, 2), port=other.getsockname()[1], within_s=0.2)
    busy = "process 0 cannot open the port: Address already in use"
    expected = busy, "process 0 is missing after 0 s: another program"
    assert refusal.startswith(expected[index])


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(RunStopped, match="nowhere.invalid:1: process 0 is missing after 0 s: "):
        wait_for_all(HostsConfig("nowhere.invalid:1", 2, 1), 0.1)


# Takes longer than the limit, and then the others wait for a scorer of process 1 in a program of the devices.
HANGS = """
import time
import jax
from jax.sharding import PartitionSpec as P
from configs.schema.rewards import RewardConfig
from launch.jobs.hosts import join_hosts
from launch.cli.options import parse_run
from launch.cli.program import run_program
from launch.jobs.silence import note_progress
from launch.rewards.workers import RewardPool
from specjax.parallel import processes
from specjax.parallel.mesh import MeshConfig, make_mesh
def add():
    return jax.lax.psum(jax.lax.axis_index("data"), "data")
def main(argv):
    pool = RewardPool(RewardConfig("tests.launch.sample_scorers:by_command", workers=1, time_limit_s=1000))
    join_hosts(parse_run(["tiny", *argv], "", ""))
    mesh = make_mesh(MeshConfig(data=3))
    for number in range(8):
        time.sleep(0.5)
        note_progress(f"step {number}")
    if processes.index() == 1:
        pool.score(["hang"], [""])
    jax.block_until_ready(jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=P()))())
raise SystemExit(run_program(main))
"""


def test_a_place_is_in_a_users_file_also_where_its_name_is_one_of_pythons() -> None:
    names: dict[str, Any] = {"__name__": "queue"}
    exec(compile("def score(look):\n return look()", "/home/anna/queue.py", "exec"), names)
    assert names["score"](lambda: place_of(sys._getframe(1))) == "score (queue.py:2)"
    assert json.loads("1", parse_int=lambda _: place_of(sys._getframe(1))).startswith("test_a_place_is_in")


def test_row_110_a_scorer_that_hangs_ends_all_processes_and_is_named() -> None:
    job = start_job(["-c", HANGS, "--hosts.silence", "2"], count=3, devices=1)
    errors = [process.communicate(timeout=100)[1] for process in job]
    assert [process.returncode for process in job] == [1, 1, 1], errors
    silent = "hosts.silence = 2 s: no process has gone on for so long: process 1 after step 7, in results (workers.py:"
    waiting = (
        "), waiting for reward.scorer = tests.launch.sample_scorers:by_command; process 0, 2 after step 7, in main"
    )
    assert all(silent in each and waiting in each for each in errors), errors
    assert all("error: ended by process 0 on " in each for each in errors[1:]), errors


def train(run: Path, options: Options, *more: str) -> list[str]:
    return ["-m", "launch.train", *argv("tiny", options | {"--out": str(run)}), "--speedup.steps", "0", *more]


def assert_near(got: Path, expected: Path) -> None:
    """Verify that the metrics of two runs are equal up to rounding."""
    for line, other in zip(without_times(got), without_times(expected), strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(
                np.array(line[name], float), np.array(value, float), rtol=1e-3, atol=1e-4, err_msg=name
            )


@pytest.mark.slow
def test_a_run_over_two_processes_equals_that_of_one(tmp_path: Path) -> None:
    options = TWO | {"--steps": "4", "--checkpoint.every": "2", "--eval.every": "2"}
    options |= {"--warmup.steps": "2", "--warmup.batch-size": "4", "--rollout.max-new-tokens": "20"}
    one, two = tmp_path / "one", tmp_path / "two"
    jobs = start_job(train(two, options), count=2, devices=1), start_job(train(one, options), count=1, devices=2)
    printed = finish_job(jobs[0])
    finish_job(jobs[1])
    assert "run directory" in printed[0]
    assert all(line.startswith("[Gloo]") for line in printed[1].splitlines())  # printed by C++
    assert_near(two, one)
    assert (two / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    assert len(list(two.glob("events.out.*"))) == 1 and (two / "report.html").exists()
    assert json.loads((two / "config.json").read_text())["hosts"]["count"] == 1
    assert saves(two) == saves(one)


@pytest.mark.slow
def test_all_measurements_of_a_run_work_over_two_processes(tmp_path: Path) -> None:
    """The run has measured costs, automatic draft lengths, probes, a host scorer, distillation and a comparison."""
    options = TWO | {"--steps": "4", "--probe-every": "2", "--checkpoint.every": "2", "--rollout.draft-lengths": "0 2"}
    options |= {"--distill.steps": "2", "--distill.answers": "8", "--distill.batch-size": "4"}
    options |= {"draft.lookup.kind": "none", "reward.scorer": "exact", "reward.workers": 1, "speedup.steps": 2}
    command = train(tmp_path / "run", options)[:-2]
    finish_job(start_job(command, count=2, devices=1))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    events = [json.loads(line) for line in (tmp_path / "run" / "diary.jsonl").read_text().splitlines()]
    assert any("step_speedup" in event.get("result", {}) for event in events)


@pytest.mark.slow
def test_two_processes_answer_and_evaluate_as_one_does(tmp_path: Path) -> None:
    options = TWO | {"--steps": "2", "--checkpoint.every": "2"}
    finish_job(start_job(train(tmp_path / "run", options), count=1, devices=2))
    reading = ["--checkpoint", str(tmp_path / "run"), "--samples"]
    for words in (
        ["launch.generate", *argv("tiny", TWO), *reading, "1", "--prompt", "2+3="],
        ["launch.evaluate", *argv("tiny", TWO), *reading, "2"],
    ):
        two, one = (finish_job(start_job(["-m", *words], count, 2 // count))[0] for count in (2, 1))
        said = [[line for line in text.splitlines() if "tokens/s" not in line] for text in (two, one)]
        assert len(said[1]) > 1 and [line for line in said[0] if not line.startswith("[Gloo]")] == said[1]


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_the_same_step_and_one_can_resume(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = TWO | {"--checkpoint.every": "100000"}
    job = start_job(train(run, options | {"--steps": "100000"}), count=2, devices=1)
    wait_for(lambda: lines(run) >= 3, job)
    job[1].send_signal(signal.SIGTERM)
    finish_job(job, code=128 + signal.SIGTERM)
    step = lines(run)
    assert saves(run) == [step]
    more = {"--steps": str(step + 2)}
    finish_job(start_job(train(run, options | more, "--resume"), count=1, devices=2))
    finish_job(start_job(train(whole, options | more), count=1, devices=2))
    assert_near(run, whole)


@pytest.mark.slow
def test_two_processes_resume_what_four_have_saved(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = TWO | {"mesh.data": 4, "--checkpoint.every": "2"}
    finish_job(start_job(train(run, options | {"--steps": "2"}), count=4, devices=1))
    shutil.copytree(run, whole)
    finish_job(start_job(train(run, options | {"mesh.data": 1, "mesh.fsdp": 2, "--steps": "4"}, "--resume"), 2, 1))
    finish_job(start_job(train(whole, options | {"--steps": "4"}, "--resume"), count=1, devices=4))
    assert_near(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "rank"), [(4, 1, 0), (2, 3, 2)], ids=["each over two", "process 0 in both, with adapters"]
)
def test_either_mesh_of_an_asynchronous_run_may_span_processes(
    count: int, devices: int, rank: int, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = TWO | {"mesh.data": 2, "--asynchronous.lag": "1", "--asynchronous.rollout-mesh.data": "2"}
    options |= {"--checkpoint.every": "2", "--eval.every": "2", "--warmup.steps": "2", "--warmup.batch-size": "4"}
    options |= {"--rollout.max-new-tokens": "20", "--lora.rank": str(rank)}
    for steps, *more in (("2",), ("4", "--resume")):
        finish_job(start_job(train(run, options | {"--steps": steps}, *more), count, devices))
    finish_job(start_job(train(whole, options | {"--steps": "4"}), count=1, devices=4))
    assert_near(run, whole)


# The asynchronous job trains in process 0 and generates in process 1.
AHEAD = TWO | {"mesh.data": 1, "--asynchronous.lag": "1"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("killed", "mode", "heartbeat"), [(0, TWO, 20), (1, TWO, 20), (0, AHEAD, 10), (1, AHEAD, 10)])
def test_a_killed_process_ends_the_job_which_resumes_to_the_bit(
    killed: int, mode: Options, heartbeat: int, tmp_path: Path
) -> None:
    options = mode | {"--steps": "60", "--checkpoint.every": "10"}
    run, whole = tmp_path / "run", tmp_path / "whole"
    supervised = ["-m", "launch.supervise", *train(run, options)[1:]]
    job = start_job([*supervised, "--hosts.heartbeat", str(heartbeat)], count=2, devices=1, port=free_port())
    wait_for(lambda: len(saves(run)) > 0 and lines(run) > 12, job)
    trainers = [children(process.pid)[0] for process in job]
    subprocess.run(["kill", "-9", str(trainers[killed])], check=True)
    died, other = time.monotonic(), job[1 - killed]
    wait_for(lambda: trainers[1 - killed] not in children(other.pid), job)
    assert time.monotonic() - died < WITHIN_S
    errors = [process.communicate(timeout=300)[1] for process in job]
    assert [process.returncode for process in job] == [0, 0], errors
    said = [line for line in errors[1 - killed].splitlines() if "died" in line]
    assert len(said) == 1 and said[0].startswith(f"process {killed} on ") and "starting again" in said[0]
    assert "trace" not in errors[1 - killed]
    # One process computes the same where no mesh spans processes.
    count = 1 if mode is AHEAD else 2
    finish_job(start_job(train(whole, options), count=count, devices=3 - count))
    assert_same_run(run, whole, 60)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(ready: Callable[[], bool], job: list["subprocess.Popen[str]"]) -> None:
    deadline = time.monotonic() + 200
    while not ready():
        assert time.monotonic() < deadline and all(process.poll() is None for process in job)
        time.sleep(0.05)
